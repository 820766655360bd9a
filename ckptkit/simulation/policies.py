"""How a simulated run chooses its intervals: fixed, by formula from what is true, or from what it has seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptkit import intervals
from ckptkit.simulation.cluster import Cluster
from ckptkit.simulation.engine import Seen


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same intervals always, in seconds of work, one per tier."""

    fixed_s: tuple[float, ...]
    name: str = "fixed"
    memory: float = np.inf

    def intervals_s(self, cluster: Cluster, seen: Seen) -> np.ndarray:
        """See `Policy.intervals_s`."""
        wanted = np.asarray(self.fixed_s, float)
        if wanted.shape != (len(cluster.tiers),) or not (wanted > 0).all():
            raise ValueError(f"intervals {self.fixed_s}: give {len(cluster.tiers)} of more than 0 s, one per tier")
        return np.broadcast_to(wanted, (len(seen.up_s), len(wanted)))


def continuous(cluster: Cluster) -> Fixed:
    """The next save as soon as the one before is committed, in every tier."""
    return Fixed(tuple(max(tier.persist_s, cluster.step_s) for tier in cluster.tiers), "continuous")


def young(cluster: Cluster, mtbf_s: float) -> Fixed:
    """Young's interval for the slowest tier, from the true MTBF; the others save with it and never alone."""
    interval_s = float(intervals.young_s(sum(tier.stall_s for tier in cluster.tiers), mtbf_s))
    return Fixed((interval_s,) * len(cluster.tiers), "young")


def daly(cluster: Cluster, mtbf_s: float) -> Fixed:
    """As `young`, by Daly's higher-order estimate."""
    interval_s = float(intervals.daly_s(sum(tier.stall_s for tier in cluster.tiers), mtbf_s))
    return Fixed((interval_s,) * len(cluster.tiers), "daly")


def levels(cluster: Cluster, mtbf_s: float) -> Fixed:
    """The optimum of each level, from the true MTBF and the true shares of failures."""
    return Fixed(tuple(_levels_s(cluster, np.array(mtbf_s), np.array(cluster.level_shares())).tolist()), "levels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """`levels` with the failure rate that a run has seen in its uptime, and a prior.

    The prior says `prior_mtbf_s` for the job with the weight of `prior_failures` failures, and divides them over
    the tiers by `prior_shares` (None: the cluster's own). `memory`: what was seen that many failures ago
    weighs 1/e. Failures in real logs come in good and bad weeks: 20 is the best of 10, 20, 50 and infinity on those
    of Los Alamos and of spot fleets, and costs 0.03 to 0.1 points where nothing ever changes (bench/LOG.md).
    """

    prior_mtbf_s: float
    prior_failures: float = 2.0
    prior_shares: tuple[float, ...] | None = None
    interval_max_s: float = 6 * 3600.0
    memory: float = 20.0
    name: str = "learned"

    def intervals_s(self, cluster: Cluster, seen: Seen) -> np.ndarray:
        """See `Policy.intervals_s`."""
        weights = np.asarray(self.prior_shares or cluster.level_shares()) * self.prior_failures
        counts = weights + seen.failures
        mtbf_s = (self.prior_failures * self.prior_mtbf_s + seen.up_s) / counts.sum(axis=1)
        wanted = _levels_s(cluster, mtbf_s, counts / counts.sum(axis=1, keepdims=True))
        return np.minimum(wanted, self.interval_max_s)


def _levels_s(cluster: Cluster, mtbf_s: np.ndarray, shares: np.ndarray) -> np.ndarray:
    costs_s = np.array([max(tier.stall_s, 1e-3) for tier in cluster.tiers])
    with np.errstate(divide="ignore"):
        return intervals.levels_s(costs_s, mtbf_s[..., None] / shares)
