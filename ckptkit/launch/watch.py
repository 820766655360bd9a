"""Reads the beats of an attempt's workers: which worker hangs, and how long the job took to recover from a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from ckptkit.launch.policy import HangPolicy
from ckptkit.util.clock import monotonic_s, time_text
from ckptkit.util.heartbeat import Beats


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
        again = f"steps {self.step} to {self.reached} again" if self.repeated else "no step was lost"
        return f"attempt {self.attempt}: step {self.step} is done {time_text(self.seconds)} after the loss; {again}"

    @property
    def repeated(self) -> int:
        """The steps that were done before the loss and are done again."""
        return 0 if self.reached is None else max(0, self.reached - self.step + 1)


@final
class Watch:
    """Follows one attempt after another."""

    def __init__(self, hang: HangPolicy | None):
        self._hang = hang
        self._longest_s = 0.0  # of the job
        self._reached: int | None = None
        self._lost_at_s: float | None = None
        self._failed_at: int | None = None
        self.attempt = 0
        self._is_back = False
        self.has_stepped = False
        self.fails_again = False

    def begin(self, attempt: int) -> None:
        """An attempt begins."""
        self.attempt, self._is_back, self.has_stepped = attempt, False, False

    def lost(self, at_s: float, *, failed: bool) -> None:
        """The attempt was lost at this time of the monotonic clock. `failed`: a process ended itself with an error; if
        that was after the same step as the last time, the attempt `fails_again`, and a restart at once would too."""
        self._lost_at_s = at_s
        failed_at = self._reached if failed and self.has_stepped else None
        self.fails_again = failed_at is not None and failed_at == self._failed_at
        self._failed_at = failed_at

    @property
    def reached(self) -> int | None:
        """The newest step of process 0, in all attempts."""
        return self._reached

    def look(self, beats: Mapping[int, Beats | None]) -> tuple[int, float] | None:
        """Takes the newest beats; returns a process that hangs, and for how many seconds it has made no step.

        Of several, the one that stopped first: the others wait for it.
        """
        known = {process: each for process, each in beats.items() if each is not None}
        if not known:
            return None
        self.has_stepped = True
        self._longest_s = max([self._longest_s, *(each.longest_s for each in known.values())])
        if self._is_back or self._lost_at_s is None:
            self._reached = known[min(known)].step
        process = min(known, key=lambda each: (known[each].count, known[each].at_s))
        pause_s = monotonic_s() - max(each.at_s for each in known.values())
        is_hung = self._hang is not None and pause_s > self._hang.limit_after(self._longest_s)
        return (process, pause_s) if is_hung else None

    def recovery(self, beats: Mapping[int, Beats | None]) -> Recovery | None:
        """The return from the last loss, once: when process 0 has made a step."""
        first = beats[min(beats)] if beats else None
        if self._lost_at_s is None or self._is_back or first is None:
            return None
        found = Recovery(
            attempt=self.attempt,
            seconds=round(max(0.0, first.first_s - self._lost_at_s), 3),
            step=first.first_step,
            reached=self._reached,
        )
        self._is_back = True
        return found
