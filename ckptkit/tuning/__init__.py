"""How the durable tier is written and read, and what a save costs: profiles and forecasts."""

from ckptkit.tuning.forecast import SaveForecast as SaveForecast
from ckptkit.tuning.profile import COMPRESSORS as COMPRESSORS
from ckptkit.tuning.profile import HELD_IN_FLIGHT as HELD_IN_FLIGHT
from ckptkit.tuning.profile import Codec as Codec
from ckptkit.tuning.profile import DurableProfile as DurableProfile
