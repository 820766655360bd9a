"""The steps of a worker of `ckptkit run`, marked in a shared file that its agent reads."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, replace

from ckptkit.util.clock import monotonic_s

BYTES = 128
# Beats, step; seconds of the newest beat and of the longest pause; first step and when.
_BEAT = struct.Struct("<qqddqd")
_SAVES = struct.Struct("<qdd")  # behind it: written by another thread
_BEHIND = struct.Struct("<qq")  # behind them: the newest step that is not durable and the newest durable one, both + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """The saves of a worker, in sums: `own_s` for its part of staging, `computing_s` for waits until the devices had
    computed the state."""

    count: int = 0
    own_s: float = 0.0
    computing_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A run has ended, and the durable tier has `durable` (None: no step) and not `step`."""

    step: int
    durable: int | None

    def __str__(self) -> str:
        there = "no step" if self.durable is None else f"step {self.durable}"
        return f"the durable tier does not have step {self.step}: it has {there}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beats:
    """The marks of a worker. Times are of this machine's monotonic clock."""

    count: int
    step: int
    at_s: float
    longest_s: float  # between two beats
    first_step: int
    first_s: float
    saves: Saves = Saves()
    behind: Behind | None = None

    def moved(self, by_s: float) -> Beats:
        """These marks, with `by_s` added to their times: those of another clock."""
        return replace(self, at_s=self.at_s + by_s, first_s=self.first_s + by_s)


_marker: _Marker | None = None


def start(fd: int) -> None:
    """From now on `beat` writes to the file `fd`, of `BYTES` bytes, which is closed here."""
    global _marker
    _marker = _Marker(mmap.mmap(fd, BYTES))
    os.close(fd)


def beat(step: int, *, done: bool = False) -> None:
    """Marks that the step loop has reached `step`. Cost: 1 microsecond in a worker of `ckptkit run`, else nothing.

    `done`: the loop itself tells that it has made this step. From then on only such marks have a number that counts:
    a loop may count its steps from 0, and give a save the number of steps that are made.
    """
    if _marker is not None:
        _marker.mark(step, done)


def staged(own_s: float, computing_s: float) -> None:
    """Notes that this process has staged its part of a save. One thread calls it at a time."""
    if _marker is not None:
        _marker.staged(own_s, computing_s)


def resumed(step: int) -> None:
    """The loop continues after the restored `step`: the next step is the first that it makes again."""
    if _marker is not None:
        _marker.resumed = step


def ended(behind: Behind | None) -> None:
    """The run has ended without a step in the durable tier: the agent reports it at the end of the job. None: with."""
    if _marker is not None:
        _marker.ended(behind)


class _Marker:
    def __init__(self, shared: mmap.mmap):
        self._shared = shared
        self._process = os.getpid()
        self._newest: tuple[int, bool] | None = None
        self._count, self._at_s, self._longest_s = 0, 0.0, 0.0
        self._step, self._first_step, self._first_s = -1, -1, 0.0
        self._loop_counts = False
        self._saves = (0, 0.0, 0.0)
        self.resumed: int | None = None

    def mark(self, step: int, done: bool) -> None:
        if (step, done) == self._newest or os.getpid() != self._process:  # again, or a data worker's copy of this
            return
        now_s = monotonic_s()
        if self._count:
            self._longest_s = max(self._longest_s, now_s - self._at_s)
        else:
            after_restore = self.resumed is not None and self.resumed < step
            self._first_step, self._first_s = (self.resumed or 0) + 1 if after_restore else step, now_s
        if done and not self._loop_counts:
            self._loop_counts, self._first_step, self._first_s = True, step, now_s
        if done or not self._loop_counts:
            self._step = step
        self._newest, self._count, self._at_s = (step, done), self._count + 1, now_s
        values = (self._count, self._step, now_s, self._longest_s, self._first_step, self._first_s)
        _BEAT.pack_into(self._shared, 0, *values)

    def staged(self, own_s: float, computing_s: float) -> None:
        if os.getpid() == self._process:
            count, own_before_s, computing_before_s = self._saves
            self._saves = (count + 1, own_before_s + own_s, computing_before_s + computing_s)
            _SAVES.pack_into(self._shared, _BEAT.size, *self._saves)

    def ended(self, behind: Behind | None) -> None:
        if os.getpid() == self._process:
            steps = (None, None) if behind is None else (behind.step, behind.durable)
            values = [0 if step is None else step + 1 for step in steps]
            _BEHIND.pack_into(self._shared, _BEAT.size + _SAVES.size, *values)


def read(shared: mmap.mmap) -> Beats | None:
    """The newest beat in a file; None before the first. A read during a write may mix two beats."""
    count, step, at_s, longest_s, first_step, first_s = _BEAT.unpack_from(shared, 0)
    if not count:
        return None
    saves, own_s, computing_s = _SAVES.unpack_from(shared, _BEAT.size)
    step_after, durable_after = _BEHIND.unpack_from(shared, _BEAT.size + _SAVES.size)
    behind = Behind(step=step_after - 1, durable=durable_after - 1 if durable_after else None) if step_after else None
    return Beats(
        count=count,
        step=step,
        at_s=at_s,
        longest_s=longest_s,
        first_step=first_step,
        first_s=first_s,
        saves=Saves(count=saves, own_s=own_s, computing_s=computing_s),
        behind=behind,
    )
