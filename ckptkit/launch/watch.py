"""Reads the beats of an attempt's workers: which worker hangs, and how long the job took to recover from a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from ckptkit.launch.policy import HangPolicy
from ckptkit.util.clock import monotonic_s
from ckptkit.util.heartbeat import Beats


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A job that makes steps again: `seconds` after the loss was noticed it finished step `step`. Before the loss the
    newest step was `reached` (None: there was none)."""

    attempt: int
    seconds: float
    step: int
    reached: int | None

    @property
    def text(self) -> str:
        """One line for a person."""
        repeated = (
            "" if self.reached is None or self.reached < self.step else f"; steps {self.step} to {self.reached} again"
        )
        return f"attempt {self.attempt}: step {self.step} is done {self.seconds:.1f} s after the loss{repeated}"


@final
class Watch:
    """Follows one attempt after another."""

    def __init__(self, hang: HangPolicy | None):
        self._hang = hang
        self._longest_s = 0.0  # of the job
        self._reached: int | None = None
        self._lost_at_s: float | None = None
        self.attempt = 0
        self._is_back = False
        self.has_stepped = False

    def begin(self, attempt: int) -> None:
        """An attempt begins."""
        self.attempt, self._is_back, self.has_stepped = attempt, False, False

    def lost(self) -> None:
        """The attempt was lost, now."""
        self._lost_at_s = monotonic_s()

    @property
    def reached(self) -> int | None:
        """The newest step of all attempts."""
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
            self._reached = max(each.step for each in known.values())
        process = min(known, key=lambda each: (known[each].count, known[each].at_s))
        pause_s = monotonic_s() - max(each.at_s for each in known.values())
        is_hung = self._hang is not None and pause_s > self._hang.limit_after(self._longest_s)
        return (process, pause_s) if is_hung else None

    def recovery(self, beats: Mapping[int, Beats | None]) -> Recovery | None:
        """The return from the last loss, once: when every worker here has made a step."""
        if self._lost_at_s is None or self._is_back or not beats:
            return None
        known = [each for each in beats.values() if each is not None]
        if len(known) < len(beats):
            return None
        found = Recovery(
            attempt=self.attempt,
            seconds=max(each.first_s for each in known) - self._lost_at_s,
            step=min(each.first_step for each in known),
            reached=self._reached,
        )
        self._is_back = True
        return found
