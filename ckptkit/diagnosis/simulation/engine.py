"""Runs of a job, side by side in arrays: from failure to failure, with what is saved and lost in between.

Between two failures nothing is random: with a schedule fixed, the saves, the commits and the work done by any moment
follow from divisions. So one pass over the failures, vectorised over runs and policies, is the whole simulation. A
restart continues at its place in the cycle of saves: work that a fast tier gave back since the last slow save counts
towards the next one. Stalls of a save come at its end. A failure during a restart starts the restart again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckptkit.diagnosis.simulation.cluster import FAILURES, Cluster
from ckptkit.diagnosis.simulation.cycle import Cycle, Schedule
from ckptkit.diagnosis.simulation.failures import Failures
from ckptkit.goodput.intervals import GROWTHS, moments

_PROGRESS_EVERY = 64  # failures: some milliseconds
_BLOCK = 64  # failures of a run, adjacent in memory


@dataclass(slots=True)
class Seen:
    """The history of the runs: arrays over runs, and over (runs, tiers) if noted."""

    up_s: np.ndarray  # time in which steps were taken, the older the less it weighs
    failures: np.ndarray  # (runs, tiers): what the tier survived and no faster one did, with the same weights
    moments: (
        np.ndarray
    )  # (runs, 2, growths): of every uptime that a failure ended, see `ckptkit.goodput.intervals.moments`


class Policy(Protocol):
    """Chooses intervals from what a run has been through; the same object serves every run."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    @property
    def memory(self) -> float | None:
        """How many failures back what was seen still weighs 1/e; None: nothing is learned, one schedule is for all."""
        ...

    def schedule(self, cluster: Cluster, seen: Seen) -> Schedule:
        """The settings from a restart until the next failure."""
        ...


@dataclass(frozen=True, slots=True)
class Mark:
    """The work that each run had kept at the marked failure, and its time; NaN for runs without that failure."""

    work_s: np.ndarray
    at_s: np.ndarray


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of every run: arrays over runs, in seconds, except `failures`. Kept work, stalls, lost work and
    down time add up to `horizon_s`; what is left in the last, unfinished interval is kept work.
    """

    horizon_s: float
    work_s: np.ndarray
    stall_s: np.ndarray
    lost_s: np.ndarray
    down_s: np.ndarray
    failures: np.ndarray
    from_tier: np.ndarray  # (runs, tiers): how many restores each tier served
    mark: Mark  # see `simulate_all`

    @property
    def goodput(self) -> np.ndarray:
        """New work over elapsed time, of every run."""
        return self.work_s / self.horizon_s

    def goodput_after_mark(self) -> np.ndarray:
        """Goodput from the marked failure on; NaN for runs that did not get that far."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return (self.work_s - self.mark.work_s) / (self.horizon_s - self.mark.at_s)


def simulate(
    cluster: Cluster, failures: Failures, policy: Policy, *, horizon_s: float, mark: int | None = None
) -> Outcome:
    """`simulate_all` for one policy."""
    return simulate_all(cluster, failures, [policy], horizon_s=horizon_s, mark=mark)[0]


def simulate_all(
    cluster: Cluster,
    failures: Failures,
    policies: Sequence[Policy],
    *,
    horizon_s: float,
    mark: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Every run of `failures` under each of the policies, until `horizon_s`.

    `mark` records the kept work at the `mark`-th failure, so that a policy's learning phase can be left out. `progress`
    is called with the number of failures done and their total. Cost: some dozens of operations on arrays of policies x
    runs x tiers, for each failure of the run with the most failures. With few runs, policies together cost less than
    one by one. Policies with the same steps cost as much as one.
    """
    alike = [kept_intervals_s(cluster, policy) or ("learns", i) for i, policy in enumerate(policies)]
    distinct = dict(zip(alike, policies, strict=True))
    # Those that learn last: rows of one kind are neighbours, in any order of the request.
    keys = sorted(distinct, key=lambda key: distinct[key].memory is not None)
    found = _simulate(cluster, failures, [distinct[key] for key in keys], horizon_s, mark, progress)
    by_key = dict(zip(keys, found, strict=True))
    return [by_key[key] for key in alike]


def kept_intervals_s(cluster: Cluster, policy: Policy) -> tuple[float, ...] | None:
    """The intervals of a policy that does not learn, as the simulation uses them: in whole steps, at least as long as a
    commit, each tier's a multiple of the faster one's. None for a policy that learns.
    """
    if policy.memory is not None:
        return None
    cycle = Cycle(cluster, policies=1, runs=1, growing=slice(1, 1))
    cycle.plan(0, policy.schedule(cluster, _nothing_seen(1, len(cluster.tiers))))
    return tuple(cycle.works[:, 0, 0].tolist())


def _simulate(
    cluster: Cluster,
    failures: Failures,
    policies: Sequence[Policy],
    horizon_s: float,
    mark: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[Outcome]:
    runs, tiers, copies = len(failures.at_s), cluster.tiers, len(policies)
    levels = np.array(cluster.levels())
    survives = np.array([[kind in tier.survives for kind in FAILURES] for tier in tiers])
    planner = _Planner(cluster, policies, runs)
    work, newest = np.zeros((copies, runs)), np.zeros((len(tiers), copies, runs))  # done; what each tier holds of it
    stall, lost, down, resumed = (np.zeros((copies, runs)) for _ in range(4))
    served, count = np.zeros((len(tiers), copies, runs)), np.zeros(runs)
    marked, marked_at = np.full((copies, runs), np.nan), np.full(runs, np.nan)
    for number, (fails_at, kind, outage_s) in enumerate(_one_by_one(failures)):
        at, failed = np.minimum(fails_at, horizon_s), fails_at < horizon_s
        up = np.maximum(at - resumed, 0.0)
        done, committed = planner.cycle().enter(work - newest[-1]).until(up)
        for tier, held in enumerate(committed):
            newest[tier] = np.maximum(newest[tier], np.where(held > 0, work + held, 0.0))
        work += done
        stall += up - done
        holds = survives[:, kind]
        # The newest that survived, of equals the fastest; a run that is over stays as it is.
        source, restore_s = np.zeros(work.shape, np.int8), np.full_like(work, tiers[0].restore_s)
        restored = np.where(holds[0], newest[0], -1.0)
        for tier, model in enumerate(tiers[1:], 1):
            better = holds[tier] & (newest[tier] > restored)
            source = np.where(better, np.int8(tier), source)
            restored = np.where(better, newest[tier], restored)
            restore_s = np.where(better, model.restore_s, restore_s)
            newest[tier - 1] *= holds[tier - 1]  # the last one survives everything
        restored = np.where(failed, restored, work)
        lost += work - restored
        work = restored
        begins = (at + outage_s + cluster.restart_s) + restore_s
        # A failure before the job was up again: the down time that was planned ends, another begins.
        down += np.minimum(begins, horizon_s) - at
        down -= np.maximum(np.minimum(resumed, horizon_s) - at, 0.0)
        resumed = begins
        planner.learn(failed & (up > 0), up, levels[kind])
        for tier in range(len(tiers)):
            served[tier] += failed & (source == tier)
        count += failed
        if mark is not None and (here := failed & (count == mark)).any():
            marked, marked_at = np.where(here, work, marked), np.where(here, at, marked_at)
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(number, failures.at_s.shape[1])
        if not failed.any():
            break
    return [
        Outcome(horizon_s, work[i], stall[i], lost[i], down[i], count, served[:, i].T, Mark(marked[i], marked_at))
        for i in range(copies)
    ]


def _one_by_one(failures: Failures) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The first failure of every run, then the second: a few are laid out side by side at a time, 8 lines of cache."""
    for first in range(0, failures.at_s.shape[1], _BLOCK):
        parts = (failures.at_s, failures.kind, failures.outage_s)
        yield from zip(*(each[:, first : first + _BLOCK].T.copy() for each in parts), strict=True)


class _Planner:
    """The schedules of all policies, as one cycle; and what the learning ones, the last, have seen."""

    def __init__(self, cluster: Cluster, policies: Sequence[Policy], runs: int):
        self._cluster = cluster
        self._learning = {i: policy for i, policy in enumerate(policies) if policy.memory is not None}
        self._seen = {i: _nothing_seen(runs, len(cluster.tiers)) for i in self._learning}
        growing = slice(len(policies) - len(self._learning), len(policies))
        self._cycle = Cycle(cluster, len(policies), runs, growing)
        for i, policy in enumerate(policies):
            if i not in self._learning:
                self._cycle.plan(i, policy.schedule(cluster, _nothing_seen(runs, len(cluster.tiers))))

    def cycle(self) -> Cycle:
        """What holds now."""
        for i, policy in self._learning.items():
            self._cycle.plan(i, policy.schedule(self._cluster, self._seen[i]))
        return self._cycle

    def learn(self, failed: np.ndarray, up: np.ndarray, level: np.ndarray) -> None:
        """Takes in the uptimes that a failure ended."""
        for i, policy in self._learning.items():
            fade = 1.0 if policy.memory is None else float(np.exp(-1.0 / policy.memory))
            _learn(self._seen[i], failed[i], up[i], level, fade)


def _nothing_seen(runs: int, tiers: int) -> Seen:
    # Runs side by side in memory: operations on all of them are what this costs.
    return Seen(np.zeros(runs), np.zeros((tiers, runs)).T, np.moveaxis(np.zeros((2, len(GROWTHS), runs)), -1, 0))


def _learn(seen: Seen, failed: np.ndarray, up: np.ndarray, level: np.ndarray, fade: float) -> None:
    weight = np.where(failed, fade, 1.0)
    seen.up_s = seen.up_s * weight + up
    seen.failures *= weight[:, None]
    for tier, count in enumerate(seen.failures.T):
        count += failed & (level == tier)
    mean_s = seen.up_s / np.maximum(seen.failures.sum(axis=1), 1e-9)
    seen.moments += np.where(failed[:, None, None], moments(up, np.maximum(mean_s, 1e-9)), 0.0)
