"""How a simulated run chooses its intervals, and policies side by side against the best fixed ones in hindsight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.diagnosis.simulation.cluster import Cluster
from ckptkit.diagnosis.simulation.cycle import Schedule
from ckptkit.diagnosis.simulation.engine import Outcome, Policy, Seen, kept_intervals_s, simulate_all
from ckptkit.diagnosis.simulation.failures import Failures
from ckptkit.goodput import intervals

# The search needs differences on the same failures, not absolute values: 100 runs, and their first 30,000 failures.
_SEARCH_RUNS, _SEARCH_FAILURES = 100, 30_000
_COARSE = tuple(2.0 ** (k / 2.0) for k in range(-6, 7))
_FINE = tuple(2.0 ** (k / 8.0) for k in range(-3, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One policy: means over runs, each share a share of the wall clock, with half of a 95 % confidence interval.

    `behind_oracle` is the mean of the paired differences, oracle less policy. `after_learning` is goodput after the
    first 10 failures over the oracle's on the same stretch (None: no run had as many). `intervals_s`: as they were
    kept, see `kept_intervals_s`; None for a policy that learns.
    """

    policy: str
    goodput: float
    goodput_ci: float
    behind_oracle: float
    behind_oracle_ci: float
    after_learning: float | None
    stall: float
    lost: float
    down: float
    failures: float
    from_tier: dict[str, float]
    intervals_s: tuple[float, ...] | None


def compare(
    cluster: Cluster,
    failures: Failures,
    policies: Sequence[Policy],
    *,
    horizon_s: float,
    begin: FixedIntervals,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """The oracle first, then every policy, all on the same failures. The oracle's search begins at `begin`; where one
    of the fixed policies is better on all runs than what the search found on some, that one is the oracle.

    `progress` is called with the number of failures done and their total. Cost: one pass over all failures for
    all policies together, and some 40 candidates per tier over 30,000 failures.
    """
    oracle = find_oracle(cluster, failures, horizon_s=horizon_s, begin=begin)
    judged = [oracle, *policies]
    outcomes = simulate_all(cluster, failures, judged, horizon_s=horizon_s, mark=10, progress=progress)
    fixed = [
        (policy, outcome)
        for policy, outcome in zip(judged, outcomes, strict=True)
        if isinstance(policy, FixedIntervals)
    ]
    best, reached = max(fixed, key=lambda each: float(each[1].goodput.mean()))
    told = [(FixedIntervals(best.fixed_s, oracle.name), reached), *zip(policies, outcomes[1:], strict=True)]
    return [_result(cluster, policy, outcome, reached) for policy, outcome in told]


def find_oracle(cluster: Cluster, failures: Failures, *, horizon_s: float, begin: FixedIntervals) -> FixedIntervals:
    """The fixed intervals with the highest mean goodput on these very failures: one tier after the other, coarse
    and then fine, from `begin`. No real run can have it: it is chosen with the failures known. Of more than
    30,000 failures the search sees the first ones of 100 runs.
    """
    sample = Failures(*(each[:_SEARCH_RUNS] for each in (failures.at_s, failures.kind, failures.outage_s)))
    count = int((sample.at_s < horizon_s).sum())
    horizon_s = horizon_s * min(1.0, _SEARCH_FAILURES / max(count, 1))

    def best_of(tried: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        outcomes = simulate_all(cluster, sample, [FixedIntervals(wanted) for wanted in tried], horizon_s=horizon_s)
        return max(zip(tried, outcomes, strict=True), key=lambda each: float(each[1].goodput.mean()))[0]

    best = tuple(min(each, horizon_s) for each in begin.fixed_s)
    for factors in (_COARSE, _COARSE, _FINE):
        for tier in range(len(best)):
            scaled = [(*best[:tier], best[tier] * factor, *best[tier + 1 :]) for factor in factors]
            best = best_of([best, *scaled])
    # A slower tier that is asked to save more often than a faster one saves with it: show that.
    return FixedIntervals(tuple(np.maximum.accumulate(best).tolist()), "oracle")


def mean_ci(values: np.ndarray) -> tuple[float, float]:
    """Mean, and half of its 95 % confidence interval (normal; NaN with fewer than two values)."""
    if len(values) < 2:
        return float(values.mean()), math.nan
    return float(values.mean()), 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))


def _result(cluster: Cluster, policy: Policy, outcome: Outcome, oracle: Outcome) -> Result:
    goodput, goodput_ci = mean_ci(outcome.goodput)
    behind, behind_ci = mean_ci(oracle.goodput - outcome.goodput)
    there = np.isfinite(outcome.mark.at_s)
    after = None
    if there.any():
        after = float(outcome.goodput_after_mark()[there].mean() / oracle.goodput_after_mark()[there].mean())
    served = outcome.from_tier.mean(axis=0)
    return Result(
        policy=policy.name,
        goodput=goodput,
        goodput_ci=goodput_ci,
        behind_oracle=behind,
        behind_oracle_ci=behind_ci,
        after_learning=after,
        stall=float(outcome.stall_s.mean() / outcome.horizon_s),
        lost=float(outcome.lost_s.mean() / outcome.horizon_s),
        down=float(outcome.down_s.mean() / outcome.horizon_s),
        failures=float(outcome.failures.mean()),
        from_tier={tier.name: float(served[i]) for i, tier in enumerate(cluster.tiers)},
        intervals_s=kept_intervals_s(cluster, policy),
    )


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
