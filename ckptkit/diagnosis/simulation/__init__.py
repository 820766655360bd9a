"""Estimates a job's goodput: drawn or replayed failures, declared tiers, and a policy for the intervals."""

from ckptkit.diagnosis.simulation.cluster import (
    FAILURES,
    PRESETS,
    TIER_NAMES,
    Cluster,
    Failure,
    Preset,
    TierModel,
    default_tier,
)
from ckptkit.diagnosis.simulation.compare import (
    FixedIntervals,
    Learned,
    Result,
    compare,
    continuous,
    daly,
    find_oracle,
    levels,
    mean_ci,
    young,
)
from ckptkit.diagnosis.simulation.cycle import Schedule
from ckptkit.diagnosis.simulation.engine import Mark, Outcome, Policy, Seen, simulate, simulate_all
from ckptkit.diagnosis.simulation.failures import Failures, FailureTrace, draw, read_trace, replay

__all__ = [
    "FAILURES",
    "PRESETS",
    "TIER_NAMES",
    "Cluster",
    "Failure",
    "FailureTrace",
    "Failures",
    "FixedIntervals",
    "Learned",
    "Mark",
    "Outcome",
    "Policy",
    "Preset",
    "Result",
    "Schedule",
    "Seen",
    "TierModel",
    "compare",
    "continuous",
    "daly",
    "default_tier",
    "draw",
    "find_oracle",
    "levels",
    "mean_ci",
    "read_trace",
    "replay",
    "simulate",
    "simulate_all",
    "young",
]
