"""From one tier to the next: the background threads, and what they do with a committed slot."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

from ckptkit.job.coordination import Coordinator, LocalCoordinator
from ckptkit.save.disk_copy import DiskCopy
from ckptkit.save.protocol import Machinery, SaveProtocol, drive
from ckptkit.snapshot.staging import Stager
from ckptkit.util.notice import Notice

Job = Callable[[], SaveProtocol | None]


@final
class Worker:
    """One named thread that runs jobs in order, with room for `waiting_max` that wait. Jobs handle their own errors.

    A job that returns a protocol has it driven over `coordinator`. An exception that escapes a job is kept and raised
    by `drain`.
    """

    def __init__(self, name: str, *, waiting_max: int, coordinator: Coordinator | None = None):
        self._coordinator = coordinator or LocalCoordinator()
        self._jobs: deque[Job] = deque()  # the first one runs
        self._waiting_max = waiting_max
        self._stopping = False
        self._errors: deque[BaseException] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._notice = Notice()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._jobs

    def submit(self, job: Job) -> None:
        """Queues a job; waits while `waiting_max` jobs wait already."""
        self._notice.wait_for(lambda: len(self._jobs) <= self._waiting_max)
        if self._stopping:
            raise RuntimeError(f"{self._thread.name} was closed")
        try:
            self._jobs.append(job)
        finally:  # a signal may raise between the two, and a queued job has to be seen
            self._wake.put(None)

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until nothing runs or waits; False when `timeout_s` passed first."""
        if self._jobs:  # a debugger may have raised in `submit`, before it woke the thread
            self._wake.put(None)
        return self._notice.wait_for(lambda: not self._jobs, timeout_s)

    def drain(self) -> None:
        """Waits for every job, then raises the error that escaped one, once."""
        self.wait_idle(None)
        if self._errors:
            raise self._errors.popleft()

    def close(self, timeout_s: float | None = None) -> bool:
        """Runs what is queued, then ends and joins the thread; False where it still runs after `timeout_s`."""
        self._stopping = True
        self._wake.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._jobs or not self._stopping:
            self._wake.get()
            while self._jobs:
                try:
                    protocol = self._jobs[0]()
                    if protocol is not None:
                        drive(protocol, self._coordinator)
                    del protocol
                except BaseException as error:  # noqa: BLE001  the top of a thread: kept, and raised by drain
                    self._keep(error)
                self._jobs.popleft()  # a finished job must not keep arrays or slots alive
                self._notice.give()

    def _keep(self, error: BaseException) -> None:
        if not self._errors:
            self._errors.append(error)


def threads(coordinator: Coordinator, stager: Stager) -> Machinery:
    """Real threads and copies, over the job's coordinator."""
    return Machinery(
        make_worker=partial(Worker, coordinator=coordinator),
        make_disk_copy=DiskCopy,
        begin_staging=stager.begin,
    )
