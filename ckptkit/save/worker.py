"""From one tier to the next: the background threads, and what they do with a committed slot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import final

from ckptkit.job.coordination import Coordinator, LocalCoordinator
from ckptkit.save.disk_copy import DiskCopy
from ckptkit.save.protocol import Machinery, SaveProtocol, drive
from ckptkit.snapshot.staging import Stager
from ckptkit.util.clock import Deadline

Job = Callable[[], SaveProtocol | None]


@final
class Worker:
    """One named thread that runs jobs in order, with room for `waiting_max` that wait. Jobs handle their own errors.

    A job that returns a protocol has it driven over `coordinator`. An exception that escapes a job is kept and raised
    by `drain`.
    """

    def __init__(self, name: str, *, waiting_max: int, coordinator: Coordinator | None = None):
        self._coordinator = coordinator or LocalCoordinator()
        self._jobs: deque[Job] = deque()
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

    def submit(self, job: Job) -> None:
        """Queues a job; waits while `waiting_max` jobs wait already."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._jobs) < self._waiting_max)
            if self._stopping:
                raise RuntimeError(f"{self._thread.name} was closed")
            self._changed.notify_all()  # first: a signal may raise between the two, and a queued job has to be seen
            self._jobs.append(job)

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

    def close(self, timeout_s: float | None = None) -> bool:
        """Runs what is queued, then ends and joins the thread; False where it still runs after `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
                protocol = job()
                if protocol is not None:
                    drive(protocol, self._coordinator)
                del protocol
            except BaseException as caught:  # noqa: BLE001  the top of a thread: kept, and raised by drain
                error = caught
            del job  # a finished job must not keep arrays or slots alive
            with self._changed:
                self._error = self._error or error
                self._running = False
                self._changed.notify_all()


def threads(coordinator: Coordinator, stager: Stager) -> Machinery:
    """Real threads and copies, over the job's coordinator."""
    return Machinery(
        make_worker=partial(Worker, coordinator=coordinator),
        make_disk_copy=DiskCopy,
        begin_staging=stager.begin,
    )
