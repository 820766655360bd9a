"""A store that tries again: the one place where a failed operation of a store is repeated."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import final

from typing_extensions import override

from ckptkit.errors import TransientStoreError
from ckptkit.store.base import PutMode, Store, StoreOperation, T, WrapperStore
from ckptkit.util.clock import Deadline

_TRY_S_MIN = 1.0  # what a try needs at least: with less left, the last error is the better answer
_deadline: ContextVar[Deadline | None] = ContextVar("ckptkit-store-deadline", default=None)
_jitter = random.Random()  # its own: a job that seeds `random` gets the same numbers with us in the background


@final
class RetryStore(WrapperStore):
    """Repeats operations that raised `TransientStoreError` until `deadline_s`, with full jitter.

    A `create` that is repeated may find its own first try committed: the content is compared, and equal is success.
    """

    def __init__(self, inner: Store, *, deadline_s: float = 60.0, first_delay_s: float = 0.1):
        super().__init__(inner)
        self._deadline_s = deadline_s
        self._first_delay_s = first_delay_s

    @override
    def _run(self, operation: StoreOperation, key: str, request: Callable[[], T]) -> T:
        return retried(request, deadline_s=self._deadline_s, first_delay_s=self._first_delay_s)

    @override
    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        self._retry_create(
            key,
            lambda: self._inner.put(key, data, mode=mode),
            lambda: self._inner.get(key) == data,
        )

    @override
    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        self._retry_create(
            target,
            lambda: self._inner.copy(source, target, mode=mode, replaces=replaces),
            lambda: self._inner.get(target) == self._inner.get(source),
        )

    def _retry_create(self, key: str, create: Callable[[], None], is_own: Callable[[], bool]) -> None:
        """Repeats `create`. A later try succeeds if it finds the object of an earlier one (`is_own`), which reported an
        error."""
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            try:
                create()
            except FileExistsError:
                if tries == 1 or not is_own():
                    raise

        self._run("put", key, attempt)


def retried(
    operation: Callable[[], T], *, deadline_s: float = 60.0, first_delay_s: float = 0.1, tries_min: int = 1
) -> T:
    """Returns the result of `operation`, and repeats it on `TransientStoreError` until `deadline_s`.

    Waits between tries, with full jitter, at most 5 s. No try goes beyond the deadline (see `within_deadline`), but
    there are `tries_min` of them. Raises what the last try raised, at once what is not transient.
    """
    deadline, delay_s, tries = Deadline(deadline_s), first_delay_s, 0
    shortest_s = min(_TRY_S_MIN, deadline_s / 10)
    while True:
        tries += 1
        token = _deadline.set(deadline)
        try:
            return operation()
        except TransientStoreError:
            if deadline.left_s < shortest_s and tries >= tries_min:
                raise
        finally:
            _deadline.reset(token)
        pause_s = _jitter.uniform(0, delay_s)
        time.sleep(pause_s if deadline.passed else max(0.0, min(pause_s, deadline.left_s - shortest_s)))
        delay_s = min(delay_s * 2, 5.0)


def within_deadline(timeout_s: float) -> float:
    """The limit of time of one try: `timeout_s`, or what is left of the deadline of `retried` that calls it."""
    deadline = _deadline.get()
    return timeout_s if deadline is None or deadline.passed else min(timeout_s, deadline.left_s)
