"""Waits that may be long: what they wait for is logged, and on a terminal how far it has come is shown."""

from __future__ import annotations

import _thread
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from ckptkit.util import clock
from ckptkit.util.clock import time_text
from ckptkit.util.notice import Promise
from ckptkit.util.words import size_text

_log = logging.getLogger("ckptkit")
_LOGGED_EVERY_S = 10.0
_SHOWN_AFTER_S = 5.0
_SHOWN_EVERY_S = 0.5


@final
class Meter:
    """How many bytes of how many are done. Safe from several threads; one lock for each `add`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.begin(0)

    def begin(self, total_bytes: int) -> None:
        """Counts anew; `total_bytes` 0: not known."""
        with self._lock:
            self._total_bytes, self._done_bytes, self._begun_s = total_bytes, 0, clock.monotonic_s()

    def add(self, nbytes: int) -> None:
        """More is done."""
        with self._lock:
            self._done_bytes += nbytes

    def at(self, done_bytes: int) -> None:
        """So much is done by now."""
        with self._lock:
            self._done_bytes = done_bytes

    def text(self) -> str:
        """Bytes, rate, and the time that is left at this rate; empty as long as nothing is done."""
        with self._lock:
            total, done, took_s = self._total_bytes, self._done_bytes, clock.monotonic_s() - self._begun_s
        if done <= 0 or took_s <= 0:
            return ""
        rate = done / took_s
        said = f"{size_text(done)} of {size_text(total)}" if total else size_text(done)
        left = f", {time_text((total - done) / rate)} left" if total > done else ""
        return f"{said}, {size_text(int(rate))}/s{left}"


@contextmanager
def told(what: Callable[[], str], *, show: bool = False) -> Iterator[None]:
    """The block waits for `what()`, which is logged at INFO every 10 s.

    With `show`, a terminal or a notebook gets one line instead, after 5 s and twice a second. Cost: a thread for the
    time of the block.
    """
    ended: Promise[None] = Promise()
    left: Promise[None] = Promise()
    run = _show if show and is_watched() else _tell

    def tell() -> None:
        try:
            run(what, ended)
        finally:
            left.set_result(None)

    # Not `threading.Thread`: its `start` holds a lock of all threads, and a signal handler may save in the middle.
    _thread.start_new_thread(tell, ())
    try:
        yield
    finally:
        ended.set_result(None)
        left.wait()


def is_watched() -> bool:
    """Whether a person sees stderr as it is written: a terminal, or a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


def _tell(what: Callable[[], str], ended: Promise[None]) -> None:
    begun_s = clock.monotonic_s()
    while not ended.wait(_LOGGED_EVERY_S):
        _log.info("%s (for %s so far)", what(), time_text(clock.monotonic_s() - begun_s))


def _show(what: Callable[[], str], ended: Promise[None]) -> None:
    if ended.wait(_SHOWN_AFTER_S):
        return
    width = 0
    while True:
        line = what()
        width = max(width, len(line))
        print(f"\r{line:<{width}}", end="", file=sys.stderr, flush=True)  # noqa: T201  where a person looks
        if ended.wait(_SHOWN_EVERY_S):
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)  # noqa: T201
            return
