"""How the durable tier is written and read, and what a save costs: profiles and forecasts."""

from ckptkit.tuning.forecast import SaveForecast as SaveForecast
from ckptkit.tuning.pieces import INLINE_BYTES as INLINE_BYTES
from ckptkit.tuning.pieces import Part as Part
from ckptkit.tuning.pieces import Pieces as Pieces
from ckptkit.tuning.profile import COMPRESSORS as COMPRESSORS
from ckptkit.tuning.profile import Codec as Codec
from ckptkit.tuning.profile import DurableProfile as DurableProfile
