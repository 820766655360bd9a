"""How a simulated run chooses its intervals: fixed, by formula from what is true, or from what it has seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptkit.schedule import intervals
from ckptkit.schedule.simulation.cluster import Cluster
from ckptkit.schedule.simulation.cycle import Schedule
from ckptkit.schedule.simulation.engine import Seen


@dataclass(frozen=True, slots=True)
class FixedIntervals:
    """The same intervals always, in seconds of work, one per tier."""

    fixed_s: tuple[float, ...]
    name: str = "fixed"
    memory: None = None

    def schedule(self, cluster: Cluster, seen: Seen) -> Schedule:
        """See `Policy.schedule`."""
        wanted = np.asarray(self.fixed_s, float)
        if wanted.shape != (len(cluster.tiers),) or not (wanted > 0).all():
            raise ValueError(f"intervals {self.fixed_s}: give {len(cluster.tiers)} of more than 0 s, one per tier")
        return Schedule(np.broadcast_to(wanted, (len(seen.up_s), len(wanted))))


def continuous(cluster: Cluster) -> FixedIntervals:
    """The next save as soon as the one before is committed, in every tier."""
    return FixedIntervals(tuple(max(tier.persist_s, cluster.step_s) for tier in cluster.tiers), "continuous")


def young(cluster: Cluster, mtbf_s: float) -> FixedIntervals:
    """Young's interval for the slowest tier, from the true MTBF; the others save with it and never alone."""
    interval_s = float(intervals.young_s(sum(tier.stall_s for tier in cluster.tiers), mtbf_s))
    return FixedIntervals((interval_s,) * len(cluster.tiers), "young")


def daly(cluster: Cluster, mtbf_s: float) -> FixedIntervals:
    """As `young`, by Daly's higher-order estimate."""
    interval_s = float(intervals.daly_s(sum(tier.stall_s for tier in cluster.tiers), mtbf_s))
    return FixedIntervals((interval_s,) * len(cluster.tiers), "daly")


def levels(cluster: Cluster, mtbf_s: float) -> FixedIntervals:
    """The optimum of each level, from the true MTBF and the true shares of failures."""
    with np.errstate(divide="ignore"):
        mtbfs_s = mtbf_s / np.array(cluster.level_shares())
    return FixedIntervals(tuple(intervals.levels_s(_costs_s(cluster), mtbfs_s).tolist()), "levels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """`levels` with the failure rate that a run has seen in its uptime, and a prior.

    The prior is `prior_mtbf_s` for the job, with the weight of `prior_failures` failures. It is divided over the tiers
    by `prior_shares` (None: the cluster's own). `memory`: a failure that many failures ago weighs 1/e. Real logs have
    good and bad weeks. 20 is the best of 10, 20, 50 and infinity on the logs of Los Alamos and of spot fleets; it costs
    0.03 to 0.1 points under constant conditions (bench/LOG.md). `ageing`: intervals grow with the uptime, as far as the
    observed uptimes cluster (`intervals.growth`).
    """

    prior_mtbf_s: float
    prior_failures: float = 2.0
    prior_shares: tuple[float, ...] | None = None
    interval_max_s: float = intervals.INTERVAL_MAX_S
    memory: float = 20.0
    ageing: bool = True
    name: str = "learned"

    def schedule(self, cluster: Cluster, seen: Seen) -> Schedule:
        """See `Policy.schedule`."""
        costs_s = _costs_s(cluster)
        wanted = intervals.learned_s(
            costs_s,
            seen.failures,
            seen.up_s,
            prior_failures=self.prior_failures,
            prior_mtbf_s=self.prior_mtbf_s,
            prior_shares=self.prior_shares or cluster.level_shares(),
        )
        wanted = np.minimum(wanted, self.interval_max_s)
        if not self.ageing:
            return Schedule(wanted)
        grown = intervals.growth(seen.moments)
        mtbf_s = (self.prior_failures * self.prior_mtbf_s + seen.up_s) / (
            self.prior_failures + seen.failures.sum(axis=1)
        )
        # Tiers that share an interval save together. The slower ones keep their place among the saves of the fastest.
        together_s = np.where(wanted <= wanted[:, :1], costs_s, 0.0).sum(axis=1)
        period_s = wanted[:, 0] + together_s
        first_s = np.maximum(intervals.first_s(period_s, mtbf_s, grown) - together_s, cluster.step_s)
        return Schedule(wanted * (first_s / wanted[:, 0])[:, None], grown[0])


def _costs_s(cluster: Cluster) -> np.ndarray:
    return np.array([max(tier.stall_s, 1e-3) for tier in cluster.tiers])
