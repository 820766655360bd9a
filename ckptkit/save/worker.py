"""From one tier to the next: the background threads, and what they do with a committed slot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import final

from ckptkit.util.clock import Deadline

Task = Callable[[], None]


@final
class Worker:
    """One named thread that runs jobs in order, with room for `waiting_max` that wait. Jobs handle their own errors.

    The order of jobs is the order of `submit`: the same on every process, so that the meetings that jobs hold
    meet. An exception that escapes a job is kept and raised by `drain`.
    """

    def __init__(self, name: str, *, waiting_max: int):
        self._jobs: deque[Task] = deque()
        self._waiting_max = waiting_max
        self._running = False
        self._stopping = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        with self._changed:
            return not self._running and not self._jobs

    def submit(self, job: Task) -> None:
        """Queues a job; waits while `waiting_max` jobs wait already."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._jobs) < self._waiting_max)
            if self._stopping:
                raise RuntimeError(f"{self._thread.name} was closed")
            self._jobs.append(job)
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing runs or waits; False when `timeout_s` passed first."""
        deadline = Deadline(timeout_s)
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self._jobs, deadline.left_s)

    def drain(self) -> None:
        """Waits for every job, then raises the error that escaped one, once."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running and not self._jobs)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Runs what is queued, then ends and joins the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running = True
                self._changed.notify_all()
            error = None
            try:
                job()
            except BaseException as caught:  # noqa: BLE001  the top of a thread: kept, and raised by drain
                error = caught
            del job  # a finished job must not keep arrays or slots alive
            with self._changed:
                self._error = self._error or error
                self._running = False
                self._changed.notify_all()
