"""Reads the beats of an attempt's workers: which one hangs or is slow, and how long a recovery from a loss took."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from ckptkit.launch.policy import HangPolicy
from ckptkit.util.clock import monotonic_s, time_text
from ckptkit.util.heartbeat import Beats, Saves
from ckptkit.util.stragglers import late, slow

_MARKS_MIN = 16  # calls beyond those that saved, before a loop is known to mark its steps
_SAMPLE_S = 1.0  # a host sends the beats of its workers so often
_SAMPLES_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A job that makes steps again: `seconds` after the loss its process 0 finished step `step`, the first one again.
    Before the loss its newest step was `reached` (None: there was none). `ckptkit goodput` counts both in this way."""

    attempt: int
    seconds: float
    step: int
    reached: int | None

    @property
    def text(self) -> str:
        """One line for a person."""
        again = "no step was lost"
        if self.repeated:
            again = f"steps {self.step} to {self.reached} again" if self.repeated > 1 else f"step {self.step} again"
        return f"attempt {self.attempt}: step {self.step} is done {time_text(self.seconds)} after the loss; {again}"

    @property
    def repeated(self) -> int:
        """The steps that were done before the loss and are done again."""
        return 0 if self.reached is None else max(0, self.reached - self.step + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A process that has made no step for `pause_s`. `limit_s`: what was allowed. `is_lost`: the job is to be ended;
    else it is only a suspicion, which is reported once."""

    process: int
    pause_s: float
    limit_s: float
    is_lost: bool


@final
class Watch:
    """Follows one attempt after another."""

    def __init__(self, hang: HangPolicy | None):
        self._hang = hang
        self._longest_s = 0.0  # pause between two steps, of the job
        self._longest_start_s: float | None = None  # to a first step, of the job
        self._started_s = 0.0
        self._marks_steps = False  # whether this job's loop is known to call far more often than it saves
        self._suspected = False
        self.pace = Pace()
        self.reached: int | None = None  # the newest step of process 0, in all attempts
        self._lost_at_s: float | None = None
        self._failed_at: int | None = None
        self.attempt = 0
        self._is_back = False
        self.has_stepped = False
        self.fails_again = False

    def begin(self, attempt: int) -> None:
        """The workers of an attempt have been started."""
        self.attempt, self._is_back, self.has_stepped = attempt, False, False
        self._started_s, self.pace, self._suspected = monotonic_s(), Pace(), False

    def lost(self, at_s: float, *, failed: bool) -> None:
        """The attempt was lost at this time of the monotonic clock. `failed`: a process ended itself with an error; if
        that was after the same step as the last time, the attempt `fails_again`, and a restart at once would too."""
        self._lost_at_s = at_s
        failed_at = self.reached if failed and self.has_stepped else None
        self.fails_again = failed_at is not None and failed_at == self._failed_at
        self._failed_at = failed_at

    def look(self, beats: Mapping[int, Beats | None]) -> Hang | None:
        """Takes the newest beats; returns a process that hangs, or seems to for the first time in a pause.

        Of several, the one that stopped first: the others wait for it.
        """
        if not beats:
            return None
        known = {process: each for process, each in beats.items() if each is not None}
        if known:
            self._learn(known)
        last = {
            process: (0, self._started_s) if each is None else (each.count, each.at_s)
            for process, each in beats.items()
        }
        process = min(last, key=lambda each: last[each])
        pause_s = monotonic_s() - max(at_s for _, at_s in last.values())
        longest_s = self._longest_s if known else self._longest_start_s
        return self._judged(process, pause_s, longest_s)

    def _judged(self, process: int, pause_s: float, longest_s: float | None) -> Hang | None:
        if self._hang is None or (self._hang.limit_s is None and not self._marks_steps):
            return None
        limit_s = self._hang.limit_after(longest_s)
        if pause_s <= limit_s:
            self._suspected = False
            return None
        is_lost = self._hang.limit_s is not None or pause_s > 2 * limit_s
        if self._suspected and not is_lost:
            return None
        self._suspected = True
        return Hang(process=process, pause_s=pause_s, limit_s=limit_s, is_lost=is_lost)

    def _learn(self, known: Mapping[int, Beats]) -> None:
        self.has_stepped = True
        self._marks_steps = self._marks_steps or all(map(_marks_steps, known.values()))
        self._longest_s = max([self._longest_s, *(each.longest_s for each in known.values())])
        first_s = max(each.first_s for each in known.values()) - self._started_s
        self._longest_start_s = max(self._longest_start_s or 0.0, first_s)
        if self._is_back or self._lost_at_s is None:
            self.reached = known[min(known)].step

    def recovery(self, beats: Mapping[int, Beats | None]) -> Recovery | None:
        """The return from the last loss, once: when process 0 has made a step."""
        first = beats[min(beats)] if beats else None
        if self._lost_at_s is None or self._is_back or first is None:
            return None
        found = Recovery(
            attempt=self.attempt,
            seconds=round(max(0.0, first.first_s - self._lost_at_s), 3),
            step=first.first_step,
            reached=self.reached,
        )
        self._is_back = True
        return found


def _marks_steps(beats: Beats) -> bool:
    """Whether most calls of this loop saved nothing: it calls in each step, whether it saves there or not."""
    return beats.count - beats.saves.count >= max(_MARKS_MIN, beats.saves.count)


@final
class Pace:
    """Follows the saves of one attempt. A sample of a process is the mean of its saves in a second or more."""

    def __init__(self) -> None:
        self._seen: dict[int, Saves] = {}
        self._own: dict[int, deque[float]] = {}
        self._waits: dict[int, deque[float]] = {}
        self._named: set[tuple[str, int]] = set()
        self._next_s = 0.0

    def look(self, beats: Mapping[int, Beats | None]) -> list[str]:
        """Takes the newest beats; returns a line for each process that is slow and was not named yet."""
        if monotonic_s() < self._next_s:
            return []
        self._next_s = monotonic_s() + _SAMPLE_S
        for process, each in beats.items():
            if each is not None:
                self._take(process, each.saves)
        found = {}
        for each in slow(self._own):
            text = (
                f"process {each.process} is slow: it takes {time_text(each.own_s)} for its part of a save, the others "
            )
            found["save", each.process] = text + f"{time_text(each.others_s)}; look at its host"
        if (last := late(self._waits)) is not None:
            text = f"process {last.process} is slow: it starts its steps last; at saves the others wait "
            text += f"{time_text(last.others_s)} or more for the devices, and it waits {time_text(last.own_s)}"
            found["step", last.process] = text + "; look at its host"
        new = {key: text for key, text in found.items() if key not in self._named}
        self._named.update(new)
        return list(new.values())

    def _take(self, process: int, saves: Saves) -> None:
        before = self._seen.get(process, Saves())
        if (count := saves.count - before.count) > 0:
            self._seen[process] = saves
            for kept, total_s in (
                (self._own, saves.own_s - before.own_s),
                (self._waits, saves.computing_s - before.computing_s),
            ):
                kept.setdefault(process, deque(maxlen=_SAMPLES_MAX)).append(total_s / count)
