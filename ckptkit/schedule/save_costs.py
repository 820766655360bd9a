"""The cost of a save for the step loop: its stall, and the slowdown of steps until it is committed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ckptkit.events import Event, Kind
from ckptkit.model.tiers import DURABLE, PEER, SSD

_KEPT = 20  # saves that a cost is the mean of
_STEPS_KEPT = 200
_QUIET_MIN = 5  # steps that define the usual length of a step
_OUTLIER = 2.0  # times the median: a compilation, an evaluation
_OPEN_MAX = 8  # saves that may have no further events
_OVER = (Kind.COMMITTED, Kind.SKIPPED, Kind.FAILED, Kind.DEGRADED)
_DROPPED = (Kind.SKIPPED, Kind.FAILED)
_SLOWER = (SSD, PEER, DURABLE)  # than the slots that feed them: what is dropped there is dropped everywhere


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
        self._stalls: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in tiers}
        self._slowed: dict[tuple[str, bool], deque[float]] = {
            (name, alone): deque(maxlen=_KEPT) for name in tiers for alone in (True, False)
        }
        self._commits: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in tiers}
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
