"""The result of an asynchronous call: `orbax.checkpoint.v1.AsyncResponse`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Response(Generic[T]):
    """The result of `work`, which runs in a thread of its own (`ckptkit-response`) from now on."""

    def __init__(self, work: Callable[[], T]):
        self._future: Future[T] = Future()
        self._thread = Thread(target=self._run, args=(work,), name="ckptkit-response", daemon=True)
        self._thread.start()

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result; raises what the work raised, TimeoutError after `timeout` seconds."""
        return self._future.result(timeout=timeout)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Calls `callback` with the result once it is there; not where the work has failed."""

        def call(future: Future[T]) -> None:
            if future.exception() is None:
                callback(future.result())

        self._future.add_done_callback(call)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001  the top of a thread: raised by `result`
            self._future.set_exception(error)
        else:
            self._future.set_result(found)
