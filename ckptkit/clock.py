"""Two clocks with one meaning each: `wall_s` for timestamps, `monotonic_s` for durations."""

from __future__ import annotations

import time

wall_s = time.time
monotonic_s = time.monotonic


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
