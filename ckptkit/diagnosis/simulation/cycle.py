"""The endless repetition of saves in an uptime: what is done, and what is saved, after any time of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptkit.diagnosis.simulation.cluster import Cluster

_NEVER_S = 1e12  # an interval that no run lives to see, and that arithmetic still bears


@dataclass(frozen=True, slots=True)
class Schedule:
    """Intervals of work after a restart, shape (runs, tiers), fastest first, in seconds.

    `growth` (runs,): save n of the fastest tier ends at n ** (1 / growth) times the first one's end. The slower tiers
    still join every k-th save. None: all intervals stay constant.
    """

    intervals_s: np.ndarray
    growth: np.ndarray | None = None


class Cycle:
    """Nested intervals: every slower one a multiple of the one before. Arrays are (policies, runs), one per tier.

    `plan` sets those of one policy, `enter` begins an uptime in what is planned. `growing`: the (adjacent) policies
    whose intervals grow by `growth`, which covers only them; the other intervals stay.
    """

    def __init__(self, cluster: Cluster, policies: int, runs: int, growing: slice):
        shape = (len(cluster.tiers), policies, runs)
        self.cluster, self.growing = cluster, growing
        self.works, self.lengths, self.times, self.multiples = (np.ones(shape) for _ in range(4))
        self.growth = np.ones((growing.stop - growing.start, runs))

    def plan(self, policy: int, schedule: Schedule) -> None:
        """The intervals of `policy` from now on."""
        before, length, multiple = self.cluster.step_s, np.zeros(()), np.ones(())
        for tier, model in enumerate(self.cluster.tiers):
            # A save begins between two steps' ends, and cannot be committed before the one before it.
            wanted = np.rint(np.minimum(schedule.intervals_s[:, tier], _NEVER_S) / before)
            times = np.maximum(np.maximum(wanted, np.ceil(model.persist_s / before - 1e-9)), 1.0)
            length = (before if tier == 0 else length) * times + model.stall_s
            multiple = multiple * times if tier else multiple
            before = before * times
            self.works[tier, policy], self.lengths[tier, policy] = before, length
            self.times[tier, policy], self.multiples[tier, policy] = times, multiple
        if policy >= self.growing.start:
            self.growth[policy - self.growing.start] = 1.0 if schedule.growth is None else schedule.growth

    def enter(self, since_s: np.ndarray) -> Uptime:
        """An uptime that begins at a save of the fastest tier, `since_s` of work after the last one of the slowest."""
        return Uptime(self, since_s)


class Uptime:
    """One uptime of every run, from its entry into a cycle."""

    def __init__(self, cycle: Cycle, since_s: np.ndarray):
        self._cycle, rows = cycle, cycle.growing
        # Whole intervals of the fastest tier; a slow save that was not committed in time is not made again. Where
        # intervals grow there are fewer saves to that work, and one that is overdue is made at the next save.
        passed, whole_cycle = np.rint(since_s / cycle.works[0]), cycle.multiples[-1]
        entered = passed - np.floor(passed / whole_cycle) * whole_cycle
        entered[rows] = np.minimum(passed[rows], whole_cycle[rows] - 1.0)
        self._entered_work, self._entered = entered * cycle.works[0], entered * cycle.lengths[0]
        for tier, multiple in zip(cycle.cluster.tiers[1:-1], cycle.multiples[1:-1], strict=True):
            self._entered += np.floor(entered / multiple) * tier.stall_s

    def until(self, up_s: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Work done `up_s` after the entry, and for each tier how much of it the newest committed save holds.

        0 or less: no save since the entry is committed. Cost: one division for each tier.
        """
        cycle, tiers = self._cycle, self._cycle.cluster.tiers
        position = self._entered + self._even(up_s)
        left, done, spent, after = position, -self._entered_work, np.zeros(()), np.zeros(())
        committed = [done] * len(tiers)
        for level in reversed(range(len(tiers))):
            work, length = cycle.works[level], cycle.lengths[level]
            whole, room = np.floor(left / length), None
            since = position
            if level + 1 < len(tiers):
                room = cycle.times[level + 1]
                whole = np.minimum(whole, room)
                # The newest save may have been a slower tier's too, and this one's part of it was over before.
                after = np.where(whole > 0, 0.0, after + tiers[level + 1].stall_s)
                since = position + after
            took = whole * length
            left = left - took
            if room is not None:
                # After the last save of a cycle there is only the slower tier's own stall.
                left = np.where(whole < room, left, 0.0)
            done, spent = done + whole * work, spent + took
            # No two saves of a tier are under way at the same time: of those that ended, all but one are committed.
            late = since - spent < tiers[level].persist_s
            committed[level] = done - np.where(late, work, 0.0)
            self._grown_committed(committed[level], level, up_s, done, spent, after)
        work_s = done + np.minimum(left, cycle.works[0])
        self._grown_work(work_s, up_s, done, spent, left)
        return work_s, committed

    def _grown_committed(
        self, found: np.ndarray, level: int, up_s: np.ndarray, done: np.ndarray, spent: np.ndarray, after: np.ndarray
    ) -> None:
        """Puts right what `until` found of a tier as if intervals did not grow."""
        rows = self._cycle.growing
        if rows.start == rows.stop:
            return
        after = np.broadcast_to(after, spent.shape)[rows]
        done, spent = done[rows], spent[rows]
        late = up_s[rows] - self._age(spent - after) < self._cycle.cluster.tiers[level].persist_s
        done = done - np.where(late, self._cycle.works[level][rows], 0.0)
        spent = spent - np.where(late, self._cycle.lengths[level][rows] + after, 0.0)
        here = spent - self._entered[rows] > 0.5 * self._cycle.lengths[0][rows]
        found[rows] = np.where(here, self._saved(done, spent, self._age(spent)), 0.0)

    def _grown_work(
        self, found: np.ndarray, up_s: np.ndarray, done: np.ndarray, spent: np.ndarray, left: np.ndarray
    ) -> None:
        """Puts right the work that `until` found as if intervals did not grow."""
        rows = self._cycle.growing
        if rows.start == rows.stop:
            return
        done, spent = done[rows], spent[rows]
        at = self._age(spent)
        following = self._age(spent + self._cycle.lengths[0][rows]) - self._cycle.cluster.tiers[0].stall_s
        since = np.maximum(np.minimum(up_s[rows], following) - at, 0.0)
        found[rows] = self._saved(done, spent, at) + np.where(left[rows] > 0, since, 0.0)

    def _even(self, up_s: np.ndarray) -> np.ndarray:
        """The way into the cycle, as if intervals did not grow: there they follow each other evenly."""
        cycle, rows = self._cycle, self._cycle.growing
        if rows.start == rows.stop:
            return up_s
        first, even = cycle.lengths[0][rows], up_s.copy()
        even[rows] = first * (up_s[rows] / first) ** cycle.growth
        return even

    def _age(self, spent: np.ndarray) -> np.ndarray:
        """Of the growing rows: the time since the entry at which a place in the cycle is reached."""
        first = self._cycle.lengths[0][self._cycle.growing]
        return first * (np.maximum(spent - self._entered[self._cycle.growing], 0.0) / first) ** (
            1.0 / self._cycle.growth
        )

    def _saved(self, done: np.ndarray, spent: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Of the growing rows: work since the entry that a save holds which ended `at`. `done` is without growth."""
        stalls = spent - done - self._entered[self._cycle.growing]
        return np.maximum(at - np.maximum(stalls, 0.0), 0.0)
