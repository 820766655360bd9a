"""Values from one thread to another: bounded, and the sender never waits."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

from ckptkit.util import clock

T = TypeVar("T")
_log = logging.getLogger("ckptkit")
_BATCH_S = 0.1  # between two looks, so that a burst does not wake the thread for each
# A thread that computes keeps the interpreter for 5 ms from one that woke up. The step loop waits for one turn at most.
_TURN_S = _PAUSE_S = 2e-4


@final
class HandOver(Generic[T]):
    """Calls `take` with each value that `put` was given, in order, in a thread of its own.

    At most `waiting_max` values wait: later ones are dropped and counted. An exception of `take` is logged, once for
    each type. Cost of `put`: below a microsecond; no lock, no wake-up. The thread pauses after each 0.2 ms of work, so
    that it does not keep the interpreter from the sender.
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
        turn_s = clock.monotonic_s()
        while self._values:
            self._hand(self._values.popleft())
            if clock.monotonic_s() - turn_s > _TURN_S:
                self._ended.wait(_PAUSE_S)
                turn_s = clock.monotonic_s()

    def _hand(self, value: T) -> None:
        try:
            self._take(value)
        except Exception as error:  # noqa: BLE001  it is of the user: training goes on
            if type(error).__name__ not in self._failed:
                self._failed.add(type(error).__name__)
                _log.exception("%s failed; more like this are not logged", self._thread.name)
