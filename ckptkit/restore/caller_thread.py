"""The thread that launches a job's collectives, lent to a restore that is under way on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

from ckptkit.errors import CheckpointError
from ckptkit.job.coordination import Coordinator
from ckptkit.util.clock import Deadline

_T = TypeVar("_T")
_LOOK_S = 10.0  # how often waiting processes learn which ones are missing; a latecomer does not wait for this


@final
class CallerThread:
    """Lets a background thread run functions on its caller's thread, while that thread waits in `serve`.

    The caller may enter and leave `serve` until `come` has found it there; then it stays until `release`.
    """

    def __init__(self) -> None:
        self.is_all_that_is_missing = False  # the restore waits for the caller only
        self._changed = threading.Condition()
        self._present = False
        self._kept = False
        self._gone = False
        self._act: Callable[[], Any] | None = None
        self._outcome: list[Any] = []  # what the last act gave, and its error

    # Called by the caller's thread.

    def serve(self, over: Callable[[], bool], timeout_s: float | None) -> None:
        """Runs requested functions until `over()` (see `wake`), or leaves after `timeout_s` unless it is kept."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        with self._changed:
            self._present = True
            self._changed.notify_all()
            try:
                while not over():
                    if self._act is not None:
                        self._do()
                    elif deadline is None or not deadline.passed:
                        self._changed.wait(None if deadline is None else deadline.left_s)
                    elif self._kept:
                        self._present = False  # it is not found there again
                        self._changed.wait()
                    else:
                        return
            finally:
                self._present = False
                self._gone |= self._kept and not over()  # it was interrupted
                self._changed.notify_all()

    def leave(self) -> None:
        """The caller does not enter `serve` again."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    # Called by the background thread.

    def come(self, wait_s: float) -> str:
        """`here` once the caller is in `serve`, and keeps it; `later` if it is not in time, `gone` if it has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._present or self._gone, wait_s)
            if self._gone:
                return "gone"
            self._kept = self._present
            return "here" if self._present else "later"

    def release(self) -> None:
        """The caller may leave `serve`."""
        with self._changed:
            self._kept = False
            self._changed.notify_all()

    def run(self, act: Callable[[], _T]) -> _T:
        """The result or error of `act`, run on the caller's thread. Raises `CheckpointError` if it was interrupted."""
        with self._changed:
            self._outcome = []
            self._act = act
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._outcome or self._gone)
            if not self._outcome:
                self._act = None
                raise CheckpointError("the thread that launches collectives was interrupted")
            result, error = self._outcome
        if error is not None:
            raise error
        return result

    def wake(self) -> None:
        """Makes the caller check whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def _do(self) -> None:
        act, self._act = self._act, None
        assert act is not None
        self._changed.release()  # others may look meanwhile
        try:
            outcome = [act(), None]
        except Exception as error:  # noqa: BLE001  raised where it was asked for
            outcome = [None, error]
        finally:
            self._changed.acquire()
        self._outcome = outcome
        self._changed.notify_all()


def all_come(caller: CallerThread, coordinator: Coordinator) -> str | None:
    """Waits until the callers of all processes have arrived, and holds them; or returns the reason for not waiting.

    It does not wait if one process ended, or if one arrives the coordinator's `timeout_s` later than the first: that
    one may wait for something that the first does after the restore. The result is the same on all processes.
    """
    timeout_s = coordinator.timeout_s
    first: list[Deadline] = []  # on process 0, since the first caller has come

    def verdict(words: list[str]) -> list[Any]:
        late = [str(process) for process, word in enumerate(words) if word == "later"]
        if "gone" in words:
            return [False, f"process {words.index('gone')} gave the restore up"]
        if not late:
            return [False, None]
        if "here" in words and not first:
            first.append(Deadline(timeout_s))
        if first and first[0].passed:
            return [False, f"process {', '.join(late[:20])} did not call result within {timeout_s:g} s"]
        return [True, None]

    while True:
        word = caller.come(min(_LOOK_S, timeout_s / 4))
        waits, why = coordinator.agree("broadcast-callers", word, verdict)
        if waits or why is not None:
            caller.release()
        if not waits:
            return why
