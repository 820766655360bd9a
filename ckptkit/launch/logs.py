"""The output of a job's workers: on the screen, and a file for each process and attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, final


@final
class LogFiles:
    """Passes each line on, and appends it to `attempt-<a>-process-<p>.log` in a directory.

    Raises OSError for a directory that cannot be made or written. A full disk later loses lines of the files alone.
    """

    def __init__(self, directory: Path, show: Callable[[int, str], None]):
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
        with self._lock, suppress(OSError):
            if process not in self._files:
                path = self._directory / f"attempt-{self._attempt}-process-{process}.log"
                self._files[process] = path.open("a", buffering=1, encoding="utf-8", errors="replace")
            self._files[process].write(f"{line}\n")
        self._show(process, line)

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for file in self._files.values():
                with suppress(OSError):
                    file.close()
            self._files.clear()
