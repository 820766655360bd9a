"""Runs of a job, side by side in arrays: from failure to failure, with what is saved and lost in between.

Between two failures nothing is random: with intervals fixed, the saves, the commits and the work done by any moment
follow from divisions. So one pass over the failures, vectorised over runs, is the whole simulation. A restart goes on
where it is in the cycle of saves: work that a fast tier gave back since the last slow save counts towards the next
one. Stalls of a save come at its end. A failure during a restart starts the restart again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ckptkit.simulation.cluster import FAILURES, Cluster
from ckptkit.simulation.failures import Failures

_NEVER_S = 1e12  # an interval that no run lives to see, and that arithmetic still bears


@dataclass(slots=True)
class Seen:
    """What the runs have been through: arrays over runs, and over (runs, tiers) where that is said."""

    up_s: np.ndarray  # time in which steps were taken, the older the less it weighs
    failures: np.ndarray  # (runs, tiers): what the tier survived and no faster one did, weighed alike


class Policy(Protocol):
    """Chooses intervals from what a run has been through; the same object serves every run."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def memory(self) -> float:
        """How many failures back what was seen still weighs 1/e; infinity: all weigh alike."""
        ...

    def intervals_s(self, cluster: Cluster, seen: Seen) -> np.ndarray:
        """The intervals of work after a restart, shape (runs, tiers), fastest first, in seconds."""
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
    """Every run of `failures` under `policy`, until `horizon_s`.

    `mark` notes what was kept when the `mark`-th failure came, so that what a policy learned first can be left
    out. Cost: some dozens of operations on arrays of runs x tiers for each failure of the run that has most.
    """
    runs, tiers = len(failures.at_s), len(cluster.tiers)
    levels = np.array(cluster.levels())
    restore_s = np.array([tier.restore_s for tier in cluster.tiers])
    persist_s = np.array([tier.persist_s for tier in cluster.tiers])
    survives = np.array([[kind in tier.survives for tier in cluster.tiers] for kind in FAILURES])
    seen = Seen(np.zeros(runs), np.zeros((runs, tiers)))
    work, newest = np.zeros(runs), np.zeros((runs, tiers))  # the work that is done; that each tier holds
    stall, lost, down = np.zeros(runs), np.zeros(runs), np.zeros(runs)
    served = np.zeros((runs, tiers))
    resumed, count = np.zeros(runs), np.zeros(runs)
    marked, marked_at = np.full(runs, np.nan), np.full(runs, np.nan)
    for number in range(failures.at_s.shape[1]):
        at = np.minimum(failures.at_s[:, number], horizon_s)
        if number and bool((failures.at_s[:, number - 1] >= horizon_s).all()):
            break
        up = np.maximum(at - resumed, 0.0)
        cycle = _Cycle(cluster, policy.intervals_s(cluster, seen), since_s=work - newest[:, -1])
        done, stalled, committed = _uptime(cycle, up, persist_s)
        newest = np.maximum(newest, np.where(committed > 0, work[:, None] + committed, 0.0))
        work = work + done
        stall += stalled
        failed = failures.at_s[:, number] < horizon_s
        kind = failures.kind[:, number]
        holds = survives[kind]
        kept = np.where(holds, newest, -1.0)
        source = kept.argmax(axis=1)  # the first of equals: the fastest
        restored = np.maximum(kept.max(axis=1), 0.0)
        lost += np.where(failed, work - restored, 0.0)
        work = np.where(failed, restored, work)
        newest = np.where(failed[:, None] & ~holds, 0.0, newest)
        begins = at + failures.outage_s[:, number] + cluster.restart_s + restore_s[source]
        # A failure before the job was up again: the down time that was planned ends, another begins.
        down += np.where(failed, np.minimum(begins, horizon_s) - at, 0.0)
        down -= np.where(failed | (at >= horizon_s), np.maximum(np.minimum(resumed, horizon_s) - at, 0.0), 0.0)
        resumed = np.where(failed, begins, np.where(at >= horizon_s, np.inf, resumed))
        _learn(seen, failed & (up > 0), up, levels[kind], float(np.exp(-1.0 / policy.memory)))
        served[np.arange(runs), source] += failed
        count += failed
        if mark is not None:
            here = failed & (count == mark)
            marked, marked_at = np.where(here, work, marked), np.where(here, at, marked_at)
    return Outcome(horizon_s, work, stall, lost, down, count, served, marked, marked_at)


def _learn(seen: Seen, failed: np.ndarray, up: np.ndarray, level: np.ndarray, fade: float) -> None:
    weight = np.where(failed, fade, 1.0)
    seen.up_s = seen.up_s * weight + up
    seen.failures *= weight[:, None]
    seen.failures[np.arange(len(level)), level] += failed


def _uptime(cycle: _Cycle, up: np.ndarray, persist_s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Work done, time stalled, and work that each tier has committed (0: none), after `up` seconds of uptime."""
    done = cycle.work(up)
    committed = [cycle.saved(up - persist, tier) for tier, persist in enumerate(persist_s)]
    return done, up - done, np.stack(committed, axis=1)


class _Cycle:
    """The endless repetition of saves with nested intervals: every slower one a multiple of the one before.

    It is entered at a save of the fastest tier, `since_s` of work after the last one of the slowest.
    """

    def __init__(self, cluster: Cluster, wanted: np.ndarray, since_s: np.ndarray):
        works, lengths, most = [], [], []
        for tier, model in enumerate(cluster.tiers):
            # A save cannot be committed before the one before it, nor begin between two steps' ends.
            least = np.clip(wanted[:, tier], max(model.persist_s, cluster.step_s), _NEVER_S)
            if tier:
                times = np.maximum(np.rint(least / works[-1]), 1.0)
                works.append(works[-1] * times)
                lengths.append(lengths[-1] * times + model.stall_s)
                most.append(times)
            else:
                works.append(np.maximum(np.rint(least / cluster.step_s), 1.0) * cluster.step_s)
                lengths.append(works[0] + model.stall_s)
                most.append(np.full(len(wanted), np.inf))
        self._works, self._lengths, self._most = works, lengths, most
        # Whole intervals of the fastest tier; a slow save that was not committed in time is not made again.
        entered = np.rint(since_s / works[0]) % np.rint(works[-1] / works[0])
        self._entered_work, self._entered = entered * works[0], np.zeros_like(since_s)
        for length, work in zip(lengths[::-1], works[::-1], strict=True):
            whole = np.floor(entered * works[0] / work + 1e-9)
            self._entered = self._entered + whole * length
            entered = entered - np.rint(whole * work / works[0])

    def work(self, elapsed: np.ndarray) -> np.ndarray:
        """Work done `elapsed` after the entry."""
        done, left = self._down_to(self._entered + elapsed, 0)
        return done + np.minimum(left, self._works[0]) - self._entered_work

    def saved(self, elapsed: np.ndarray, tier: int) -> np.ndarray:
        """Work since the entry in the newest save of `tier` that was taken by `elapsed`; 0 or less: none."""
        return self._down_to(np.maximum(self._entered + elapsed, 0.0), tier)[0] - self._entered_work

    def _down_to(self, elapsed: np.ndarray, tier: int) -> tuple[np.ndarray, np.ndarray]:
        """Work in whole cycles of `tier` and all slower ones, and the time that is left after them."""
        done, left = np.zeros_like(elapsed), elapsed
        room = np.full_like(elapsed, np.inf)
        for level in reversed(range(tier, len(self._works))):
            whole = np.minimum(np.floor(left / self._lengths[level]), room)
            done = done + whole * self._works[level]
            # After the last save of a cycle there is only the slower tier's own stall.
            left = np.where(whole < room, left - whole * self._lengths[level], 0.0)
            room = self._most[level]
        return done, left
