"""The stacks of a process that hangs, without those of threads that only wait for work."""

from __future__ import annotations

import re

from ckptkit.util.words import count_text

_THREAD = re.compile(
    r"Thread 0x[0-9a-f]+ "
)  # as faulthandler begins a stack; that of the signal's thread has "Current"
_FRAME = re.compile(r'  File "(.+)", line [0-9]+ in ')
_WAITING = ("/threading.py", "/queue.py", "/concurrent/futures/thread.py", "/ckptkit/save/threads.py")


class BusyStacks:
    """Takes the lines of an output one by one, and leaves out each thread that is in no other file than `_WAITING`.

    A dump of faulthandler has every thread, and a hang is in one of two or three. A line waits here for the next one at
    most while the frames so far are those of an idle thread.
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # a stack with idle frames alone, so far
        self._idle = 0

    def taken(self, line: str) -> list[str]:
        """The lines that can be passed on now that `line` is there."""
        if self._held:
            frame = _FRAME.match(line)
            if line.startswith("  ") and (frame is None or frame[1].endswith(_WAITING)):
                self._held.append(line)
                return []
            held, self._held = self._held, []
            if frame is not None:
                return [*held, line]
            self._idle += 1
            if not line:
                return []
        if _THREAD.match(line):
            self._held = [line]
            return []
        if self._idle and line and not _FRAME.match(line):
            told, self._idle = f"({count_text(self._idle, 'idle thread')} left out)", 0
            return [told, line]
        return [line]

    def rest(self) -> list[str]:
        """The lines that wait for a next one, at the end of the output."""
        held, self._held = self._held, []
        told = [f"({count_text(self._idle, 'idle thread')} left out)"] * (self._idle > 0)
        self._idle = 0
        return [*told, *held]
