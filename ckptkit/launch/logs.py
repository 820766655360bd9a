"""The output of a job's workers: on the screen, and a file for each process and attempt."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO, final


@final
class LogFiles:
    """Passes each line on, and appends it to `attempt-<a>-process-<p>.log` in a directory, if one is given.

    Raises OSError for a directory that cannot be made or written. A full disk later loses lines of the files alone.
    """

    def __init__(self, directory: Path | None, show: Callable[[int, str], None]):
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._show = show
        self._lock = threading.Lock()
        self._attempt = 0
        self._files: dict[int, IO[str]] = {}

    def begin(self, attempt: int) -> None:
        """The lines that come now are of this attempt."""
        self.close()
        self._attempt = attempt

    def __call__(self, process: int, line: str) -> None:
        """Takes one line of a process."""
        if self._directory is not None:
            self._write(self._directory, process, line)
        self._show(process, line)

    def _write(self, directory: Path, process: int, line: str) -> None:
        with self._lock, suppress(OSError):
            if process not in self._files:
                path = directory / f"attempt-{self._attempt}-process-{process}.log"
                self._files[process] = path.open("a", buffering=1, encoding="utf-8", errors="replace")
            self._files[process].write(f"{line}\n")

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for file in self._files.values():
                with suppress(OSError):
                    file.close()
            self._files.clear()


class OncePrinter:
    """Prints lines with their process, and an equal line of several processes only once.

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
