"""A restore that is under way while its caller does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from ckptkit.errors import plainly
from ckptkit.restore.caller_thread import CallerThread
from ckptkit.restore.records import Restored


@final
class RestoreHandle:
    """The handle of `CheckpointManager.restore_async`: a thread of its own reads the items.

    The thread reads, verifies and places bytes, and agrees with the other processes through the coordination service.
    It launches no device collective: if replicas share their reads, it waits for `result`, whose thread sends and
    receives. The handle keeps the restored items: drop it once the run has them.
    """

    def __init__(
        self,
        restore: Callable[[CallerThread], Restored],
        adopt: Callable[[Restored], Any],
        settled: Callable[[RestoreHandle], None],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._waiting = waiting  # what `result` waits for is accounted for
        self._adopt = adopt
        self._settled = settled
        self._caller = CallerThread()
        self._restored: Future[Restored] = Future()
        self._lock = threading.Lock()
        self._items: Any = None
        self._is_adopted = False
        self._thread = threading.Thread(target=self._run, args=(restore,), name="ckptkit-restore", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether `result` would return, or raise, without a wait for storage: at once, or once replicas have sent each
        other what they have read. Processes may get different answers, so a job must not base a decision on it."""
        return self._restored.done() or self._caller.is_all_that_is_missing

    @plainly
    def result(self, timeout: float | None = None) -> Any:
        """Returns or raises the same as `restore`. Waits at most `timeout` seconds (None: without limit).

        The run resumes from the restored step when this returns. Until it has returned or raised, the manager neither
        saves nor restores anything else. All processes call it at the same point, on the thread that saves. Replicas
        exchange their reads there, once all processes have called it; `timeout` does not bound that exchange. If a
        process calls it more than the manager's `timeout_s` after the first, each process reads for itself. Raises
        `TimeoutError` if the time is up first; the restore continues.
        """
        with self._waiting():
            self._caller.serve(self._restored.done, timeout)
            if not self._restored.done():
                raise TimeoutError(f"the restore is not finished after {timeout:g} s; it continues")
            with self._lock:
                self._settled(self)
                if not self._is_adopted:
                    self._items = self._adopt(self._restored.result())
                    self._is_adopted = True
        return self._items

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end, after which the caller does not wait in `result` again; raises nothing."""
        self._caller.leave()
        self._thread.join(timeout_s)

    def _run(self, restore: Callable[[CallerThread], Restored]) -> None:
        try:
            self._restored.set_result(restore(self._caller))
        except BaseException as error:  # noqa: BLE001  the top of a thread: kept, and raised by `result`
            self._restored.set_exception(error)
        self._caller.wake()
