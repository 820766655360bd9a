"""How the lines of several processes are shown to one reader."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import TextIO


class OncePrinter:
    """Prints lines with their process, and a line that several processes print alike only once.

    The n-th time that a process prints a line is shown unless another process has already printed it n times.
    """

    LINES_KEPT = 10_000

    def __init__(self, file: TextIO | None = None):
        self._file = file  # None: stdout
        self._lock = threading.Lock()
        self._printed: Counter[tuple[int, str]] = Counter()
        self._shown: Counter[str] = Counter()

    def __call__(self, process: int, line: str) -> None:
        """Prints `line` unless it is a repetition."""
        with self._lock:
            if len(self._printed) > self.LINES_KEPT:
                self._printed.clear()
                self._shown.clear()
            self._printed[process, line] += 1
            if self._printed[process, line] > self._shown[line]:
                self._shown[line] += 1
                file = self._file or sys.stdout
                file.write(f"[{process}] {line}\n")
                file.flush()


def say_on_stderr(line: str) -> None:
    """A line of the agent's own."""
    sys.stderr.write(f"ckptkit run: {line}\n")
    sys.stderr.flush()
