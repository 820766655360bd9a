"""`GoodputOptimal`: save intervals that follow from what saves cost and how often the run fails, both learned."""

from __future__ import annotations

import datetime
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from ckptkit.events import Event, EventLog, Kind
from ckptkit.goodput import intervals, load_run
from ckptkit.goodput.runs import Attempt, attempts_of
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.util.clock import monotonic_s, time_text

_log = logging.getLogger("ckptkit")
_KEPT = 20  # failures back that what was seen weighs 1/e (bench/LOG.md)
_PRIOR_FAILURES = 2.0
_COST_MIN_S = 1e-3  # nothing is free: without it the interval would go to 0
_SAVES_KEPT = 20  # saves that a cost is the mean of
_STEPS_KEPT = 200
_QUIET_MIN = 5  # steps that define the usual length of a step
_OUTLIER = 2.0  # times the median: a compilation, an evaluation
_OPEN_MAX = 8  # saves that may have no further events
_OVER = (Kind.COMMITTED, Kind.SKIPPED, Kind.FAILED, Kind.DEGRADED)
_DROPPED = (Kind.SKIPPED, Kind.FAILED)
_SLOWER = (SSD, PEER, DURABLE)  # than the slots that feed them: what is dropped there is dropped everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalBounds:
    """The limits of an interval, in seconds; a change smaller than `hysteresis` of it is not made."""

    min_s: float = 1.0
    max_s: float = intervals.INTERVAL_MAX_S
    hysteresis: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.min_s <= self.max_s < math.inf and 0 <= self.hysteresis < 1):
            raise ValueError(f"{self}: give 0 < min_s <= max_s, and a hysteresis from 0 to below 1")


class GoodputOptimal:
    """Sets the interval of each tier to the optimum for the observed costs and failures; emits `interval_changed`
    events.

        events = EventLog("runs/7/events/attempt-2-process-0.jsonl")
        best = GoodputOptimal(events, tiers=("ram", "durable"), history="runs/7/events")
        ram = Tier.ram("/dev/shm/ckpt", save=best.every("ram"))
        options = CheckpointManagerOptions(save_decision_policy=best.every("durable"))
        manager = CheckpointManager(root, options=options, tiers=[ram], events=events)

    The cost of a save is its stall plus the slowdown of steps until it is committed, on average over the last 20 of
    each tier (where the loop records `step` spans: `SaveCosts`). Failures and uptime come from the logs of earlier
    attempts in `history`. An attempt that did not finish failed. Its failure counts for the slowest tier that its
    successor restored from. A preemption whose last save the successor restored is not a failure. A prior of two
    failures, `prior_mtbf_s` apart, is added: a tenth for the slowest tier, and of the rest for each tier twice as many
    as for the next slower one. Each tier has Daly's interval for the failures that it survives and no faster one does
    (Young 1974, Daly 2006, Benoit et al. 2017: `ckptkit.goodput.intervals`), but at least the time that its last saves
    took to commit. If the uptimes of attempts show that failures cluster, intervals are shorter just after a restart
    and grow with the time since (Ling et al. 2001). The simulator's `learned` policy is this formula (`ckptkit
    simulate`). Process 0's answer counts, so it alone reads `history`.

    Cost: some list operations per event, and one or two evaluations of the formula per commit (0.1 ms).

    Raises ValueError for no tiers, one named twice, or a prior that is not a time. Missing logs in `history` are not an
    error: the first attempt finds none. With damaged logs, only the prior counts, and the `ckptkit` logger reports it.
    """

    def __init__(
        self,
        events: EventLog,
        *,
        tiers: Sequence[str],
        history: str | os.PathLike[str] | None = None,
        prior_mtbf_s: float = 6 * 3600.0,
        bounds: IntervalBounds | None = None,
    ):
        if not tiers or len(set(tiers)) != len(tiers):
            raise ValueError(f"tiers={tuple(tiers)}: name each tier that saves once, fastest first")
        if not 0 < prior_mtbf_s < math.inf:
            raise ValueError(f"prior_mtbf_s={prior_mtbf_s}: give the seconds between two failures that you expect")
        self._events = events
        self._tiers = tuple(tiers)
        self._bounds = bounds or IntervalBounds()
        self._prior_mtbf_s = prior_mtbf_s
        self._heard: deque[Event] = deque()
        self._lock = threading.Lock()  # never waited for: a signal handler may save in the middle of `_hear`
        self._costs = SaveCosts(self._tiers)
        self._failures = np.zeros(len(self._tiers))
        self._up_s = 0.0
        self._moments = np.zeros((2, len(intervals.GROWTHS)))
        self._saved_at_s = dict.fromkeys(self._tiers, 0.0)  # the age of this attempt at the tier's last save
        self._started_s = monotonic_s()
        if history is not None and events.process == 0:  # whose answer counts: a thousand need not read them
            self._look_back(Path(history))
        self._wanted_s = dict(zip(self._tiers, self._formula(), strict=True))
        events.observe(self._hear)

    def every(self, tier: str) -> OptimalInterval:
        """The policy of one tier: for `save=` of a fast tier, or as Orbax's save decision policy of the durable one."""
        if tier not in self._tiers:
            raise ValueError(f"tier {tier!r} is none of tiers={self._tiers}")
        return OptimalInterval(self, tier)

    def interval_s(self, tier: str) -> float:
        """The interval of `tier` at present."""
        return self._wanted_s[tier]

    def _look_back(self, history: Path) -> None:
        """Failures and uptime of the attempts before this one."""
        try:
            logs = load_run(history)
        except FileNotFoundError:
            return
        except ValueError as error:  # a job must not stop for its telemetry
            _log.warning("save intervals begin from the prior: %s", error)
            return
        earlier = [[event for event in log if event.at_s < self._events.opened_s] for log in logs]
        attempts = [attempt for attempt in attempts_of(earlier)[0] if attempt.first_s is not None]
        for attempt, after in zip_longest(attempts, attempts[1:]):
            up_s, fade = attempt.up_s, math.exp(-1.0 / _KEPT)
            if attempt.is_finished or self._was_saved(attempt, after):
                self._up_s += up_s
                continue
            self._up_s = self._up_s * fade + up_s
            self._failures *= fade
            self._failures[self._level(after.events if after is not None else [])] += 1.0
            self._moments += intervals.moments(up_s, self._up_s / self._failures.sum()) if up_s > 0 else 0.0

    def _was_saved(self, attempt: Attempt, after: Attempt | None) -> bool:
        """Whether it was preempted, and the next one went on from its last save: no interval could have been better."""
        told = next((event for event in attempt.events if event.kind == Kind.PREEMPTED), None)
        if told is None:
            return False
        if after is None:  # nothing is restored yet: the slowest tier is there for every successor
            return self._tiers[-1] in told.fields["tiers"]
        return any(event.kind == Kind.RESTORED and event.step == told.step for event in after.events)

    def _level(self, log: Sequence[Event]) -> int:
        """The slowest tier that a restart took bytes from; the slowest of all where it began afresh."""
        served = [
            self._tiers.index(tier)
            for event in log
            if event.kind == Kind.RESTORED
            for tier, size in event.fields["sources"].items()
            if size and tier in self._tiers
        ]
        return max(served, default=len(self._tiers) - 1)

    def _hear(self, event: Event) -> None:
        """The thread that has the lock also handles the events that other threads bring meanwhile."""
        self._heard.append(event)
        changes: list[tuple[str, float, float, str]] = []
        while self._heard and self._lock.acquire(blocking=False):
            try:
                while self._heard:
                    changes += self._changes(self._heard.popleft())
            finally:
                self._lock.release()
        for tier, before_s, wanted_s, reason in changes:  # not under the lock: an observer may ask for the interval
            self._events.emit(Kind.INTERVAL, tier=tier, seconds=wanted_s, before=before_s, reason=reason)

    def _changes(self, event: Event) -> list[tuple[str, float, float, str]]:
        if event.kind == Kind.COMMITTED and event.tier in self._saved_at_s:
            self._saved_at_s[event.tier] = max(0.0, self._age_s() - event.fields["duration_s"])
        return self._reconsider() if self._costs.hear(event) else []

    def _reconsider(self) -> list[tuple[str, float, float, str]]:
        changes, faster_s = [], 0.0
        for tier, wanted_s in zip(self._tiers, self._formula(), strict=True):
            before_s = self._wanted_s[tier]
            kept = abs(wanted_s - before_s) <= self._bounds.hysteresis * before_s
            # A faster tier's may be kept where this one's moves: it must not save more often for that.
            faster_s = found_s = max(before_s if kept else wanted_s, faster_s)
            if found_s != before_s:
                self._wanted_s[tier] = found_s
                changes.append((tier, round(before_s, 3), round(found_s, 3), self._reason(tier)))
        return changes

    def _formula(self) -> list[float]:
        costs_s, up_s = np.array(self._costs_s()), self._up_s + self._age_s()
        wanted = intervals.learned_s(
            costs_s,
            self._failures,
            up_s,
            prior_failures=_PRIOR_FAILURES,
            prior_mtbf_s=self._prior_mtbf_s,
            prior_shares=_prior_shares(len(self._tiers)),
        )
        grown = intervals.growth(self._moments)
        mtbf_s = (_PRIOR_FAILURES * self._prior_mtbf_s + up_s) / (_PRIOR_FAILURES + self._failures.sum())
        first_s = np.maximum(intervals.first_s(wanted + costs_s, mtbf_s, grown) - costs_s, _COST_MIN_S)
        ages_s = [self._saved_at_s[tier] for tier in self._tiers]
        wanted = intervals.next_s(first_s, ages_s, grown[0])
        found = []
        for tier, each_s in zip(self._tiers, wanted.tolist(), strict=True):
            least_s = max([self._bounds.min_s, *self._costs.commits_s(tier)])
            found.append(min(max(each_s, least_s), max(self._bounds.max_s, least_s)))
        return found

    def _age_s(self) -> float:
        """For how long this attempt has been up."""
        return monotonic_s() - self._started_s

    def _costs_s(self) -> list[float]:
        return [max(cost_s, _COST_MIN_S) for cost_s in self._costs.costs_s()]

    def _reason(self, tier: str) -> str:
        place = self._tiers.index(tier)
        commits_s = self._costs.commits_s(tier)
        commit = f", committed in {time_text(fmean(commits_s))}" if commits_s else ""
        up_s, (chosen, _) = self._up_s + self._age_s(), intervals.growth(self._moments)
        clusters = f"; failures come in clusters: growth {chosen:g}" if chosen < 1 else ""
        return (
            f"a save costs {time_text(self._costs_s()[place])}{commit}; {self._failures[place]:.1f} failures that need "
            f"{tier} in {time_text(up_s)} of uptime, and a prior of 2 in {time_text(2 * self._prior_mtbf_s)}{clusters}"
        )


def _prior_shares(tiers: int) -> list[float]:
    """A tenth of the failures for the slowest tier; of the rest each tier has twice what the next slower one has."""
    if tiers == 1:
        return [1.0]
    weights = [0.5**place for place in range(1, tiers)]
    return [0.9 * weight / sum(weights) for weight in weights] + [0.1]


class OptimalInterval:
    """One tier's part of a `GoodputOptimal`: a policy of a fast tier, and of Orbax's options."""

    def __init__(self, optimum: GoodputOptimal, tier: str):
        self._optimum = optimum
        self._tier = tier
        self._last: tuple[Any, float] = (None, 0.0)  # the last save, and when it was by the monotonic clock

    def __repr__(self) -> str:
        return f"OptimalInterval({self._tier!r}, {self._optimum.interval_s(self._tier):.3g} s)"

    def due_after(self, passed_s: float | None) -> bool:
        """See `TierClockPolicy.due_after`."""
        return passed_s is None or passed_s >= self._optimum.interval_s(self._tier)

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """See Orbax's `SaveDecisionPolicy.should_save`: at a preemption, first, and then by the interval."""
        if context.reached_preemption or not previous_steps:
            return True
        if step.step <= previous_steps[-1].step:
            return False
        return self.due_after(self._passed_s(previous_steps[-1]))

    def _passed_s(self, last: Any) -> float:
        """Since the last save. The wall clock is read once for each, when it is first seen. It may be set back during a
        run, and the host that saved before a restart may have been ahead."""
        now_s, save = monotonic_s(), (last.step, last.time)
        if self._last[0] != save:
            now = datetime.datetime.now(last.time.tzinfo or datetime.UTC)
            passed = now - last.time if last.time.tzinfo else now.replace(tzinfo=None) - last.time
            self._last = (save, now_s - max(0.0, passed.total_seconds()))
        return now_s - self._last[1]


@dataclass(slots=True)
class _Save:
    stall_s: float
    slowed_before_s: float  # by all saves before it
    left: set[str]  # tiers without an event so far
    alone: bool  # no other save was in flight when it was staged


class SaveCosts:
    """Learns from the events of one process what a save into each tier costs, in seconds; for one thread at a time.

    A step in whose time a save is in flight counts with what it takes more, or less, than steps without one do on
    average: the noise of single steps cancels. A loop that records no `step` spans shows stalls alone. Where a save
    begins while another one is in flight, what steps take longer is not counted for it, unless it is never otherwise.
    """

    def __init__(self, tiers: Sequence[str]):
        self._tiers = tuple(tiers)
        self._stalls: dict[str, deque[float]] = {name: deque(maxlen=_SAVES_KEPT) for name in tiers}
        self._slowed: dict[tuple[str, bool], deque[float]] = {
            (name, alone): deque(maxlen=_SAVES_KEPT) for name in tiers for alone in (True, False)
        }
        self._commits: dict[str, deque[float]] = {name: deque(maxlen=_SAVES_KEPT) for name in tiers}
        self._on_its_way: dict[int | None, _Save] = {}
        self._committed: list[tuple[str, _Save]] = []  # since the last step ended: it may have slowed the present one
        self._was_saving = False  # since the last step ended
        self._quiet_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._usual_s = math.inf
        self._slowed_s = 0.0

    def hear(self, event: Event) -> bool:
        """Takes in what happened; whether the costs are others now. Cost: a median of 200 numbers per save."""
        if event.kind == Kind.SPAN and event.fields["span"] == "step":
            return self._step(event.fields["duration_s"])
        if event.kind == Kind.STAGED:
            self._begin(event)
        elif event.kind in _OVER and event.tier is not None:
            return self._end(event, event.tier)
        return False

    def costs_s(self) -> list[float]:
        """The cost of a save into each tier on top of the faster ones: a save of all tiers is staged once."""
        costs_s, faster_s = [], 0.0
        for tier in self._tiers:
            stalls = self._stalls[tier]
            seen_s = fmean(stalls) + max(0.0, self._slowing_s(tier)) if stalls else 0.0
            costs_s.append(max(seen_s - faster_s, 0.0))
            faster_s = max(faster_s, seen_s)
        return costs_s

    def commits_s(self, tier: str) -> Sequence[float]:
        """The time from staging to commit of the last saves."""
        return self._commits[tier]

    def _slowing_s(self, tier: str) -> float:
        found = self._slowed[tier, True] or self._slowed[tier, False]
        return fmean(found) if found else 0.0

    def _begin(self, event: Event) -> None:
        quiet = self._quiet_s if len(self._quiet_s) >= _QUIET_MIN else ()
        if quiet:
            middle_s = median(quiet)
            self._usual_s = fmean(each for each in quiet if each <= _OUTLIER * middle_s)
        else:
            self._usual_s = median(self._steps_s or [math.inf])
        while len(self._on_its_way) >= _OPEN_MAX:
            del self._on_its_way[next(iter(self._on_its_way))]
        alone = not self._on_its_way
        left = set(event.fields["tiers"])
        self._on_its_way[event.step] = _Save(event.fields["stall_s"], self._slowed_s, left, alone)
        self._was_saving = True

    def _end(self, event: Event, tier: str) -> bool:
        save = self._on_its_way.get(event.step)
        if save is not None:
            save.left.discard(tier)
            if not save.left or (event.kind in _DROPPED and tier not in _SLOWER):
                del self._on_its_way[event.step]
        if event.kind != Kind.COMMITTED or tier not in self._commits:
            return False
        self._commits[tier].append(event.fields["duration_s"])
        if save is not None:
            self._committed.append((tier, save))
        if not self._steps_s:
            self._learn()
        return True

    def _step(self, duration_s: float) -> bool:
        self._steps_s.append(duration_s)
        if not self._was_saving:
            self._quiet_s.append(duration_s)
        elif self._usual_s < math.inf:
            self._slowed_s += duration_s - self._usual_s
        self._was_saving = bool(self._on_its_way)
        return self._learn()

    def _learn(self) -> bool:
        for tier, save in self._committed:
            self._stalls[tier].append(save.stall_s)
            self._slowed[tier, save.alone].append(self._slowed_s - save.slowed_before_s)
        learned = bool(self._committed)
        self._committed.clear()
        return learned
