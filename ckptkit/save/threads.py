"""The threads that run a save, and the waits for them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from ckptkit.errors import CheckpointError
from ckptkit.job.coordination import Coordinator, LocalCoordinator
from ckptkit.save.agreement.protocol import Idle, Machinery, SaveProtocol, drive
from ckptkit.save.agreement.protocol import Worker as AnyWorker
from ckptkit.save.book.under_way import SavesUnderWay, StallWatch
from ckptkit.save.disk_copy import DiskCopy
from ckptkit.save.tiers import DurableTier, SlowerTier
from ckptkit.snapshot.staging import Stager
from ckptkit.util.clock import Deadline
from ckptkit.util.notice import Notice

VOTES_WAITING_MAX = 1024  # of saves that came too early: a few hundred bytes each
_LOOK_S = 0.2  # how often a save that waits for the durable tier looks whether that is failing

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
                        drive(protocol, self._coordinator, raised_within=BaseException)  # no signal comes here
                    del protocol
                except BaseException as error:  # noqa: BLE001  the top of a thread: kept, and raised by drain
                    self._keep(error)
                self._jobs.popleft()  # a finished job must not keep arrays or slots alive
                self._notice.give()

    def _keep(self, error: BaseException) -> None:
        if not self._errors:
            self._errors.append(error)


@final
class SaveThreads:
    """The threads of saves: one that stages, one that writes what was staged, and one for each slower tier."""

    def __init__(self, slower: Sequence[SlowerTier], durable: DurableTier, under_way: SavesUnderWay, means: Machinery):
        self.stager = means.make_worker("ckptkit-stage", waiting_max=1)
        self.writer = means.make_worker("ckptkit-writer", waiting_max=VOTES_WAITING_MAX)
        self._durable, self._under_way = durable, under_way
        self._fast: list[AnyWorker] = [tier.worker for tier in slower if tier is not durable]
        self._workers: list[AnyWorker] = [self.stager, self.writer, *self._fast, durable.worker]  # as a save passes
        self._counting = threading.Lock()  # not taken by the step loop
        self.in_flight = 0  # slots of saves that are not yet committed, or dropped, by all
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether no save is in flight."""
        return all(worker.idle for worker in self._workers)

    def count(self, in_flight: int) -> None:
        """Counts slots on or off."""
        with self._counting:
            self.in_flight += in_flight

    def wait(self) -> None:
        """Waits until every save that was taken is in all the tiers it was due in, or has failed; raises what escaped a
        thread."""
        for worker in self._workers:
            worker.drain()
        self._durable.wait_until_pruned()

    def wait_or_stall(self, limit_s: float) -> SaveProtocol:
        """Waits as `wait` does, for as long as saves advance; False where nothing did for `limit_s`."""
        watch = StallWatch(self._under_way, limit_s)
        while not (yield from self.settle(watch.look())):
            if watch.stalled:
                return False
        return True

    def settle(self, deadline: Deadline) -> SaveProtocol:
        """Waits for every tier as `wait` does, but until `deadline`; False where some are not done. Raises nothing."""
        return (
            (yield from self.wait_decided(deadline))
            and (yield from self.wait_fast(deadline))
            and (yield from self.wait_durable(deadline))
        )

    def wait_decided(self, deadline: Deadline) -> SaveProtocol:
        """Waits until all processes have taken every save so far, or dropped it; False where time ran out first."""
        return (yield Idle(self.stager, deadline.left_s)) and (yield Idle(self.writer, deadline.left_s))

    def wait_fast(self, deadline: Deadline) -> SaveProtocol:
        """Waits for the copies to other hosts and to the disk; False where time ran out first."""
        done = True
        for worker in self._fast:
            done = (yield Idle(worker, deadline.left_s)) and done
        return done

    def wait_durable(self, deadline: Deadline, *, patient: bool = True) -> SaveProtocol:
        """Waits for the durable save in flight; False where time ran out first, or, unless `patient`, where the
        durable tier turns out to be failing."""
        durable = self._durable
        while not (yield Idle(durable.worker, deadline.left_s if patient else min(_LOOK_S, deadline.left_s))):
            if deadline.passed or (not patient and durable.failing):
                return False
        return True

    def raise_if_closed(self) -> None:
        """Raises `CheckpointError` after `close`: the slots may be another run's by now."""
        if self._closed:
            raise CheckpointError("the manager was closed and saves nothing any more; make another one")

    def close(self, deadline: Deadline) -> bool:
        """Finishes what is under way and joins the threads; False where some still run at the deadline."""
        self._closed = True
        ended = [worker.close(deadline.left_s) for worker in self._workers]
        return all(ended)


def machinery(coordinator: Coordinator, stager: Stager) -> Machinery:
    """Real threads and copies, over the job's coordinator."""
    return Machinery(
        make_worker=partial(Worker, coordinator=coordinator),
        make_disk_copy=DiskCopy,
        begin_staging=stager.begin,
    )
