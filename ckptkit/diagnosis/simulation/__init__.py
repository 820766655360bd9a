"""Estimates a job's goodput: drawn or replayed failures, declared tiers, and a policy for the intervals."""

from typing import TYPE_CHECKING

from ckptkit.util.package import lazy_names

if TYPE_CHECKING:
    from ckptkit.diagnosis.simulation.cluster import FAILURES as FAILURES
    from ckptkit.diagnosis.simulation.cluster import PRESETS as PRESETS
    from ckptkit.diagnosis.simulation.cluster import TIER_NAMES as TIER_NAMES
    from ckptkit.diagnosis.simulation.cluster import Cluster as Cluster
    from ckptkit.diagnosis.simulation.cluster import Failure as Failure
    from ckptkit.diagnosis.simulation.cluster import Preset as Preset
    from ckptkit.diagnosis.simulation.cluster import TierModel as TierModel
    from ckptkit.diagnosis.simulation.cluster import default_tier as default_tier
    from ckptkit.diagnosis.simulation.comparing import FixedIntervals as FixedIntervals
    from ckptkit.diagnosis.simulation.comparing import Learned as Learned
    from ckptkit.diagnosis.simulation.comparing import Result as Result
    from ckptkit.diagnosis.simulation.comparing import compare as compare
    from ckptkit.diagnosis.simulation.comparing import continuous as continuous
    from ckptkit.diagnosis.simulation.comparing import daly as daly
    from ckptkit.diagnosis.simulation.comparing import find_oracle as find_oracle
    from ckptkit.diagnosis.simulation.comparing import levels as levels
    from ckptkit.diagnosis.simulation.comparing import mean_ci as mean_ci
    from ckptkit.diagnosis.simulation.comparing import young as young
    from ckptkit.diagnosis.simulation.cycle import Schedule as Schedule
    from ckptkit.diagnosis.simulation.engine import Mark as Mark
    from ckptkit.diagnosis.simulation.engine import Outcome as Outcome
    from ckptkit.diagnosis.simulation.engine import Policy as Policy
    from ckptkit.diagnosis.simulation.engine import Seen as Seen
    from ckptkit.diagnosis.simulation.engine import simulate as simulate
    from ckptkit.diagnosis.simulation.engine import simulate_all as simulate_all
    from ckptkit.diagnosis.simulation.failures import Failures as Failures
    from ckptkit.diagnosis.simulation.failures import FailureTrace as FailureTrace
    from ckptkit.diagnosis.simulation.failures import draw as draw
    from ckptkit.diagnosis.simulation.failures import read_trace as read_trace
    from ckptkit.diagnosis.simulation.failures import replay as replay

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
