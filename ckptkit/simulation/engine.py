"""Runs of a job, side by side in arrays: from failure to failure, with what is saved and lost in between.

Between two failures nothing is random: with a schedule fixed, the saves, the commits and the work done by any moment
follow from divisions. So one pass over the failures, vectorised over runs and policies, is the whole simulation. A
restart goes on where it is in the cycle of saves: work that a fast tier gave back since the last slow save counts
towards the next one. Stalls of a save come at its end. A failure during a restart starts the restart again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ckptkit.intervals import GROWTHS, moments
from ckptkit.simulation.cluster import FAILURES, Cluster
from ckptkit.simulation.cycle import Cycle, Schedule
from ckptkit.simulation.failures import Failures

_PROGRESS_EVERY = 64  # failures: some milliseconds


@dataclass(slots=True)
class Seen:
    """What the runs have been through: arrays over runs, and over (runs, tiers) where that is said."""

    up_s: np.ndarray  # time in which steps were taken, the older the less it weighs
    failures: np.ndarray  # (runs, tiers): what the tier survived and no faster one did, weighed alike
    moments: np.ndarray  # (runs, 2, growths): of every uptime that a failure ended, see `ckptkit.intervals.moments`


class Policy(Protocol):
    """Chooses intervals from what a run has been through; the same object serves every run."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def memory(self) -> float | None:
        """How many failures back what was seen still weighs 1/e; None: nothing is learned, one schedule is for all."""
        ...

    def schedule(self, cluster: Cluster, seen: Seen) -> Schedule:
        """What holds from a restart until the next failure."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of every run: arrays over runs, in seconds, except `failures`. Kept work, stalls, lost work and
    down time add up to `horizon_s`; what is left in the last, unfinished interval is kept work.
    """

    horizon_s: float
    work_s: np.ndarray
    stall_s: np.ndarray
    lost_s: np.ndarray
    down_s: np.ndarray
    failures: np.ndarray
    from_tier: np.ndarray  # (runs, tiers): how many restores each tier served
    marked_s: np.ndarray = field(default_factory=lambda: np.zeros(0))  # work kept until the mark, see `simulate`
    marked_at_s: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def goodput(self) -> np.ndarray:
        """New work over elapsed time, of every run."""
        return self.work_s / self.horizon_s

    def goodput_after_mark(self) -> np.ndarray:
        """Goodput from the marked failure on; NaN for runs that did not get that far."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return (self.work_s - self.marked_s) / (self.horizon_s - self.marked_at_s)


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

    `mark` notes what was kept when the `mark`-th failure came, so that what a policy learned first can be left
    out. `progress` hears how many of the failures of a run are done, and of how many. Cost: some dozens of operations
    on arrays of policies x runs x tiers for each failure of the run that has most; together they cost less than one
    by one, as long as there are not many runs.
    """
    # Those that learn last: rows of one kind are neighbours, whatever the order asked for.
    order = sorted(range(len(policies)), key=lambda i: policies[i].memory is not None)
    found = _simulate(cluster, failures, [policies[i] for i in order], horizon_s, mark, progress)
    return [found[order.index(i)] for i in range(len(policies))]


def _simulate(
    cluster: Cluster,
    failures: Failures,
    policies: Sequence[Policy],
    horizon_s: float,
    mark: int | None,
    progress: Callable[[int, int], None] | None,
) -> list[Outcome]:
    runs, tiers, copies = len(failures.at_s), len(cluster.tiers), len(policies)
    rows = runs * copies
    levels = np.array(cluster.levels())
    restore_s = np.array([tier.restore_s for tier in cluster.tiers])
    persist_s = np.array([tier.persist_s for tier in cluster.tiers])
    survives = np.array([[kind in tier.survives for kind in FAILURES] for tier in cluster.tiers])
    planner = _Planner(cluster, policies, runs)
    work, newest = np.zeros(rows), np.zeros((tiers, rows))  # the work that is done; that each tier holds
    stall, lost, down = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    served, every = np.zeros((tiers, rows)), np.arange(rows)
    resumed, count = np.zeros(rows), np.zeros(rows)
    marked, marked_at = np.full(rows, np.nan), np.full(rows, np.nan)
    for number in range(failures.at_s.shape[1]):
        if number and bool((failures.at_s[:, number - 1] >= horizon_s).all()):
            break
        fails_at, kind = np.tile(failures.at_s[:, number], copies), np.tile(failures.kind[:, number], copies)
        at = np.minimum(fails_at, horizon_s)
        up = np.maximum(at - resumed, 0.0)
        uptime = planner.cycle().enter(work - newest[-1])
        done = uptime.work(up)
        committed = np.stack([uptime.saved(up - persist, tier) for tier, persist in enumerate(persist_s)])
        newest = np.maximum(newest, np.where(committed > 0, work + committed, 0.0))
        work = work + done
        stall += up - done
        failed = fails_at < horizon_s
        holds = survives[:, kind]
        kept = np.where(holds, newest, -1.0)
        source = kept.argmax(axis=0)  # the first of equals: the fastest
        restored = np.maximum(kept.max(axis=0), 0.0)
        lost += np.where(failed, work - restored, 0.0)
        work = np.where(failed, restored, work)
        newest = np.where(failed & ~holds, 0.0, newest)
        begins = at + np.tile(failures.outage_s[:, number], copies) + cluster.restart_s + restore_s[source]
        # A failure before the job was up again: the down time that was planned ends, another begins.
        down += np.where(failed, np.minimum(begins, horizon_s) - at, 0.0)
        down -= np.where(failed | (at >= horizon_s), np.maximum(np.minimum(resumed, horizon_s) - at, 0.0), 0.0)
        resumed = np.where(failed, begins, np.where(at >= horizon_s, np.inf, resumed))
        planner.learn(failed & (up > 0), up, levels[kind])
        served[source, every] += failed
        count += failed
        if mark is not None:
            here = failed & (count == mark)
            marked, marked_at = np.where(here, work, marked), np.where(here, at, marked_at)
        if progress is not None and number % _PROGRESS_EVERY == 0:
            progress(number, failures.at_s.shape[1])
    told = (work, stall, lost, down, count, served.T, marked, marked_at)
    parts = [slice(first, first + runs) for first in range(0, rows, runs)]
    return [Outcome(horizon_s, *(each[part] for each in told)) for part in parts]


class _Planner:
    """The schedules of all policies, as one cycle over their rows; and what the learning ones have seen."""

    def __init__(self, cluster: Cluster, policies: Sequence[Policy], runs: int):
        self._cluster, self._runs, tiers = cluster, runs, len(cluster.tiers)
        rows = runs * len(policies)
        self._wanted = np.empty((rows, tiers))
        self._learning = [(i, policy) for i, policy in enumerate(policies) if policy.memory is not None]
        self._seen = {i: _nothing_seen(runs, tiers) for i, _ in self._learning}
        self._growing = slice(rows - runs * len(self._learning), rows)
        self._growth = np.ones(self._growing.stop - self._growing.start)
        for i, policy in enumerate(policies):
            self._wanted[self._rows(i)] = policy.schedule(cluster, _nothing_seen(runs, tiers)).intervals_s
        self._constant = None if self._learning else self._made()

    def cycle(self) -> Cycle:
        """What holds now."""
        if self._constant is not None:
            return self._constant
        for i, policy in self._learning:
            schedule = policy.schedule(self._cluster, self._seen[i])
            self._wanted[self._rows(i)] = schedule.intervals_s
            rows = self._rows(i)
            grows = 1.0 if schedule.growth is None else schedule.growth
            self._growth[rows.start - self._growing.start : rows.stop - self._growing.start] = grows
        return self._made()

    def learn(self, failed: np.ndarray, up: np.ndarray, level: np.ndarray) -> None:
        """Takes in the uptimes that a failure ended."""
        for i, policy in self._learning:
            rows, memory = self._rows(i), policy.memory
            fade = 1.0 if memory is None else float(np.exp(-1.0 / memory))
            _learn(self._seen[i], failed[rows], up[rows], level[rows], fade)

    def _made(self) -> Cycle:
        return Cycle(self._cluster, self._wanted, self._growth, self._growing)

    def _rows(self, i: int) -> slice:
        return slice(i * self._runs, (i + 1) * self._runs)


def _nothing_seen(runs: int, tiers: int) -> Seen:
    return Seen(np.zeros(runs), np.zeros((runs, tiers)), np.zeros((runs, 2, len(GROWTHS))))


def _learn(seen: Seen, failed: np.ndarray, up: np.ndarray, level: np.ndarray, fade: float) -> None:
    weight = np.where(failed, fade, 1.0)
    seen.up_s = seen.up_s * weight + up
    seen.failures *= weight[:, None]
    seen.failures[np.arange(len(level)), level] += failed
    mean_s = seen.up_s / np.maximum(seen.failures.sum(axis=1), 1e-9)
    seen.moments += np.where(failed[:, None, None], moments(up, np.maximum(mean_s, 1e-9)), 0.0)
