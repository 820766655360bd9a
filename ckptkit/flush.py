"""From one tier to the next: the background threads, and what they do with a committed slot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from ckptkit.arena import Arena, Slot
from ckptkit.clock import Deadline
from ckptkit.disk_file import PIECE_BYTES
from ckptkit.errors import StoreFullError
from ckptkit.snapshot import Extent

Job = Callable[[], None]
SLOT_WAIT_S = 60.0  # of a disk thread, for a slot that is being made: the step loop does not wait with it
_WRITERS = 2  # two pieces on their way keep a local SSD busy


@final
class Worker:
    """One named thread that runs jobs in order, with room for `waiting_max` that wait. Jobs handle their own errors.

    The order of jobs is the order of `submit`: the same on every process, so that the meetings that jobs hold
    meet. An exception that escapes a job is kept and raised by `drain`.
    """

    def __init__(self, name: str, *, waiting_max: int):
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


@final
class DiskCopy:
    """A copy of a staging slot into an arena on a disk. It begins while the slot is still being filled.

    What is written is a committed slot only after `Arena.commit`: until the save's fate is decided, it may be for
    nothing. Pieces are written as soon as all of their boxes are there, in any order.
    """

    def __init__(self, source: Slot, extents: Sequence[Extent], size_bytes: int, arena: Arena):
        self._source = source
        self._size_bytes = size_bytes
        self._arena = arena
        self._changed = threading.Condition()
        self._missing_bytes = [0] * -(-size_bytes // PIECE_BYTES)
        for extent in extents:
            for piece, part_bytes in _pieces(extent.offset, extent.stop):
                self._missing_bytes[piece] += part_bytes
        self._ready = deque(piece for piece, missing_bytes in enumerate(self._missing_bytes) if not missing_bytes)
        self._unwritten = len(self._missing_bytes)
        self._abandoned = False

    def filled(self, start: int, stop: int) -> None:
        """Says that the bytes `[start, stop)` of the source are final; called once for each byte of a box."""
        with self._changed:
            for piece, part_bytes in _pieces(start, stop):
                self._missing_bytes[piece] -= part_bytes
                if not self._missing_bytes[piece]:
                    self._ready.append(piece)
                    self._changed.notify_all()

    def abandon(self) -> None:
        """Says that the source will not be filled: `run` ends soon, for nothing."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def run(self) -> Slot | None:
        """Writes every piece; returns the leased slot, not yet synced. None where the copy was abandoned.

        Raises `StoreFullError` where the arena has no free slot or no room on its disk.
        """
        slot = self._arena.acquire(self._size_bytes, timeout_s=SLOT_WAIT_S)  # early on they may still be being made
        if slot is None:
            raise StoreFullError(f"no free slot in {self._arena.directory} within {SLOT_WAIT_S:g} s")
        try:
            with ThreadPoolExecutor(_WRITERS, thread_name_prefix="ckptkit-disk-write") as pool:
                for writer in [pool.submit(self._write, slot) for _ in range(_WRITERS)]:
                    writer.result()
        except BaseException:
            self._arena.release(slot)
            raise
        if self._unwritten:
            self._arena.release(slot)
            return None
        return slot

    def _write(self, slot: Slot) -> None:
        while (piece := self._next()) is not None:
            start = piece * PIECE_BYTES
            try:
                self._arena.write(slot, self._source.memory[start : min(start + PIECE_BYTES, self._size_bytes)], start)
            except BaseException:
                self.abandon()  # the other writers must not wait for what nobody needs any more
                raise

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._abandoned or not self._unwritten)
            if self._abandoned or not self._ready:
                return None
            self._unwritten -= 1
            self._changed.notify_all()
            return self._ready.popleft()


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The pieces that `[start, stop)` touches, and how many of its bytes lie in each."""
    while start < stop:
        piece = start // PIECE_BYTES
        end = min(stop, (piece + 1) * PIECE_BYTES)
        yield piece, end - start
        start = end
