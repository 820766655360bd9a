"""Waits for other threads that hold no lock: a signal handler may save and wait in the middle of each line here.

A handler runs on the main thread, between two lines of whatever that does. If these lines held a lock, a thread that
the handler waits for could need it. `threading.Condition`, `threading.Event` and `Future` hold one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, final

from ckptkit.util import clock

T = TypeVar("T")


@final
class Notice:
    """Threads wait until a condition holds; who changes it gives notice.

    The condition is asked in the thread that waits, without a lock: it reads what one atomic operation changes.
    """

    def __init__(self) -> None:
        self._asleep: dict[threading.Lock, None] = {}

    def give(self) -> None:
        """The threads that wait ask again. Called after the change."""
        for each in list(self._asleep):
            with suppress(RuntimeError):  # another thread has woken it
                each.release()

    def wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until `holds()`; False when `timeout_s` passed first."""
        end_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        while not holds():
            left_s = -1.0 if end_s is None else min(end_s - clock.monotonic_s(), threading.TIMEOUT_MAX)
            if (end_s is not None and left_s <= 0) or not self._sleep(holds, left_s):
                return holds()
        return True

    def _sleep(self, holds: Callable[[], bool], left_s: float) -> bool:
        """False where no notice came in `left_s`."""
        bed = threading.Lock()
        bed.acquire()
        self._asleep[bed] = None
        try:
            return holds() or bed.acquire(timeout=left_s)  # asked again: a notice before wakes no thread
        finally:
            self._asleep.pop(bed, None)


@final
class Promise(Generic[T]):
    """A value, or an error, that another thread will have."""

    def __init__(self) -> None:
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._notice = Notice()

    def done(self) -> bool:
        """Whether the value or the error is there."""
        return self._outcome is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the value or the error; False when `timeout_s` passed first."""
        return self._notice.wait_for(self.done, timeout_s)

    def set_result(self, value: T) -> None:
        """Ends the waits with a value."""
        self._outcome = value, None
        self._notice.give()

    def set_exception(self, error: BaseException) -> None:
        """Ends the waits with an error."""
        self._outcome = None, error
        self._notice.give()

    def result(self, timeout_s: float | None = None) -> T:
        """Waits for the value, or raises the error; raises `TimeoutError` when `timeout_s` passed first."""
        if not self.wait(timeout_s):
            raise TimeoutError
        assert self._outcome is not None
        value, error = self._outcome
        try:
            if error is not None:
                raise error
            return value  # pyright: ignore[reportReturnType]
        finally:
            del error, self  # the error's traceback holds this frame
