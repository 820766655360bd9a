"""Values from one thread to another: bounded, and the sender never waits."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

T = TypeVar("T")
_log = logging.getLogger("ckptkit")
_BATCH_S = 0.1  # between two looks, so that a burst does not wake the thread for each


@final
class HandOver(Generic[T]):
    """Calls `take` with each value that `put` was given, in order, in a thread of its own.

    At most `waiting_max` values wait: later ones are dropped and counted. An exception of `take` is logged, once for
    each type. Cost of `put`: below a microsecond; no lock, no wake-up.
    """

    def __init__(self, take: Callable[[T], None], *, name: str, waiting_max: int = 10_000):
        self._take = take
        self._values: deque[T] = deque()
        self._waiting_max = waiting_max
        self.dropped = 0
        self._failed: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, value: T) -> None:
        """Hands a value over, or drops it where too many wait."""
        if len(self._values) < self._waiting_max:
            self._values.append(value)
        else:
            self.dropped += 1

    def close(self) -> None:
        """Takes what waits, and joins the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_BATCH_S):
            self._drain()
        self._drain()
        if self.dropped:
            _log.warning("%s: %d values were dropped: too many waited", self._thread.name, self.dropped)

    def _drain(self) -> None:
        while self._values:
            value = self._values.popleft()
            try:
                self._take(value)
            except Exception as error:  # noqa: BLE001  it is of the user: training goes on
                if type(error).__name__ not in self._failed:
                    self._failed.add(type(error).__name__)
                    _log.exception("%s failed; more like this are not logged", self._thread.name)
