"""Two clocks with one meaning each, `wall_s` for timestamps, `monotonic_s` for durations; and how a duration reads."""

from __future__ import annotations

import time

wall_s = time.time
monotonic_s = time.monotonic


def time_text(seconds: float) -> str:
    """A length of time to three figures, in the unit that fits: `12.5 ms`, `45 s`, `3.2 h`."""
    if seconds < 1:
        return "0 s" if seconds <= 0 else f"{1e3 * seconds:.3g} ms"
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


class Deadline:
    """A point in monotonic time that waits are measured against, so that retries share one budget."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._end_s = monotonic_s() + timeout_s

    def begin_again(self) -> None:
        """Sets the point anew, as long after now as at first."""
        self._end_s = monotonic_s() + self._timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0.0 once the deadline has passed."""
        return max(0.0, self._end_s - monotonic_s())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s == 0.0
