"""From one checkpoint to another: rules, casts, formats, layouts; and what differs between two."""

from ckptkit.conversion.assembling import averaged as averaged
from ckptkit.conversion.assembling import combined as combined
from ckptkit.conversion.assembling import extracted as extracted
from ckptkit.conversion.assembling import lora_merged as lora_merged
from ckptkit.conversion.assembling import state_of as state_of
from ckptkit.conversion.converting import ConvertPlan as ConvertPlan
from ckptkit.conversion.converting import convert as convert
from ckptkit.conversion.converting import no_arrays as no_arrays
from ckptkit.conversion.converting import not_read as not_read
from ckptkit.conversion.converting import plan_convert as plan_convert
from ckptkit.conversion.mapping import MapRule as MapRule
from ckptkit.conversion.mapping import cast as cast
from ckptkit.conversion.mapping import mapped as mapped
from ckptkit.conversion.mapping import read_rules as read_rules
from ckptkit.conversion.quantizing import Quantization as Quantization
from ckptkit.conversion.roots import leased as leased
from ckptkit.conversion.statistics import Difference as Difference
from ckptkit.conversion.statistics import Statistics as Statistics
from ckptkit.conversion.statistics import diff as diff
from ckptkit.conversion.statistics import statistics_of as statistics_of
