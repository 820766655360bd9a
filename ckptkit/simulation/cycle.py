"""The endless repetition of saves in an uptime: what is done, and what is saved, after any time of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptkit.simulation.cluster import Cluster

_NEVER_S = 1e12  # an interval that no run lives to see, and that arithmetic still bears


@dataclass(frozen=True, slots=True)
class Schedule:
    """Intervals of work after a restart, shape (runs, tiers), fastest first, in seconds.

    `growth` (runs,): save n of the fastest tier ends at n ** (1 / growth) times the first one's end, and the slower
    tiers go on taking part in every so many; None: all intervals stay as they are.
    """

    intervals_s: np.ndarray
    growth: np.ndarray | None = None


class Cycle:
    """Nested intervals: every slower one a multiple of the one before. Immutable; `enter` begins an uptime in it.

    `growing`: the rows of `growth`, which are neighbours; the intervals of others stay.
    """

    def __init__(self, cluster: Cluster, wanted: np.ndarray, growth: np.ndarray, growing: slice):
        self.works: list[np.ndarray] = []
        self.lengths: list[np.ndarray] = []
        self.most: list[np.ndarray] = []
        self.growth, self.growing = growth, growing
        self.first_stall_s = cluster.tiers[0].stall_s
        for tier, model in enumerate(cluster.tiers):
            # A save cannot be committed before the one before it, nor begin between two steps' ends.
            least = np.clip(wanted[:, tier], max(model.persist_s, cluster.step_s), _NEVER_S)
            if tier:
                times = np.maximum(np.rint(least / self.works[-1]), 1.0)
                self.works.append(self.works[-1] * times)
                self.lengths.append(self.lengths[-1] * times + model.stall_s)
                self.most.append(times)
            else:
                self.works.append(np.maximum(np.rint(least / cluster.step_s), 1.0) * cluster.step_s)
                self.lengths.append(self.works[0] + model.stall_s)
                self.most.append(np.full(len(wanted), np.inf))

    def enter(self, since_s: np.ndarray) -> Uptime:
        """An uptime that begins at a save of the fastest tier, `since_s` of work after the last one of the slowest."""
        return Uptime(self, since_s)


class Uptime:
    """One uptime of every run, from its entry into a cycle."""

    def __init__(self, cycle: Cycle, since_s: np.ndarray):
        self._cycle = cycle
        works, lengths = cycle.works, cycle.lengths
        # Whole intervals of the fastest tier; a slow save that was not committed in time is not made again. Where
        # intervals grow there are fewer saves to that work, and one that is overdue is made at the next save.
        passed, whole_cycle = np.rint(since_s / works[0]), np.rint(works[-1] / works[0])
        entered = passed % whole_cycle
        rows = cycle.growing
        entered[rows] = np.minimum(passed[rows], whole_cycle[rows] - 1.0)
        self._entered_work, self._entered = entered * works[0], np.zeros_like(since_s)
        for length, work in zip(lengths[::-1], works[::-1], strict=True):
            whole = np.floor(entered * works[0] / work + 1e-9)
            self._entered = self._entered + whole * length
            entered = entered - np.rint(whole * work / works[0])

    def work(self, elapsed: np.ndarray) -> np.ndarray:
        """Work done `elapsed` after the entry."""
        cycle, rows = self._cycle, self._cycle.growing
        done, spent, left = self._down_to(self._position(elapsed), 0)
        found = done + np.minimum(left, cycle.works[0]) - self._entered_work
        if rows.stop > rows.start:
            saved, at = self._saved_at(done, spent)
            following = self._age((spent + cycle.lengths[0])[rows] - self._entered[rows])
            since = np.minimum(elapsed[rows], following - cycle.first_stall_s) - at
            found[rows] = saved + np.where(left[rows] > 0, np.maximum(since, 0.0), 0.0)
        return found

    def saved(self, elapsed: np.ndarray, tier: int) -> np.ndarray:
        """Work since the entry in the newest save of `tier` that was taken by `elapsed`; 0 or less: none."""
        cycle, rows = self._cycle, self._cycle.growing
        done, spent, _ = self._down_to(self._position(elapsed), tier)
        found = done - self._entered_work
        if rows.stop > rows.start:
            here = spent[rows] - self._entered[rows] > 0.5 * cycle.lengths[0][rows]
            found[rows] = np.where(here, self._saved_at(done, spent)[0], 0.0)
        return found

    def _position(self, elapsed: np.ndarray) -> np.ndarray:
        """The place in the cycle, as if intervals did not grow: there they follow each other evenly."""
        cycle, rows = self._cycle, self._cycle.growing
        even = elapsed
        if rows.stop > rows.start:
            first, even = cycle.lengths[0][rows], elapsed.copy()
            even[rows] = first * (np.maximum(elapsed[rows], 0.0) / first) ** cycle.growth
        return np.maximum(self._entered + even, 0.0)

    def _age(self, even: np.ndarray) -> np.ndarray:
        """Of the growing rows: the time since the entry at which a place in the cycle is reached."""
        first = self._cycle.lengths[0][self._cycle.growing]
        return first * (np.maximum(even, 0.0) / first) ** (1.0 / self._cycle.growth)

    def _saved_at(self, done: np.ndarray, spent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the growing rows: work since the entry that a save holds, and when it ended."""
        rows = self._cycle.growing
        at = self._age(spent[rows] - self._entered[rows])
        stalls = (spent - done)[rows] - (self._entered - self._entered_work)[rows]
        return np.maximum(at - np.maximum(stalls, 0.0), 0.0), at

    def _down_to(self, elapsed: np.ndarray, tier: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of whole cycles of `tier` and all slower ones: the work, the time, and the time that is left after them."""
        cycle = self._cycle
        done, spent, left = np.zeros_like(elapsed), np.zeros_like(elapsed), elapsed
        room = np.full_like(elapsed, np.inf)
        for level in reversed(range(tier, len(cycle.works))):
            whole = np.minimum(np.floor(left / cycle.lengths[level]), room)
            done = done + whole * cycle.works[level]
            spent = spent + whole * cycle.lengths[level]
            # After the last save of a cycle there is only the slower tier's own stall.
            left = np.where(whole < room, left - whole * cycle.lengths[level], 0.0)
            room = cycle.most[level]
        return done, spent, left
