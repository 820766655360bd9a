"""The copy of a staging slot into an arena on a disk, begun while the slot is still being filled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from ckptkit.errors import StoreFullError
from ckptkit.slots.arena import Arena, Slot
from ckptkit.snapshot.describe import SlotExtent
from ckptkit.util.disk_file import PIECE_BYTES

SLOT_WAIT_S = 60.0  # of a disk thread, for a slot that is being made: the step loop does not wait with it
_WRITERS = 2  # two pieces in flight keep a local SSD busy


@final
class DiskCopy:
    """A copy of a staging slot into an arena on a disk. It begins while the slot is still being filled.

    The written bytes are a committed slot only after `Arena.commit`: until the save's fate is decided, it may be for
    nothing. Pieces are written as soon as all of their boxes are there, in any order.
    """

    def __init__(self, source: Slot, extents: Sequence[SlotExtent], size_bytes: int, arena: Arena):
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
        """Announces that the bytes `[start, stop)` of the source are final; called once for each byte of a box."""
        with self._changed:
            for piece, part_bytes in _pieces(start, stop):
                self._missing_bytes[piece] -= part_bytes
                if not self._missing_bytes[piece]:
                    self._ready.append(piece)
                    self._changed.notify_all()

    def abandon(self) -> None:
        """Announces that the source will not be filled: `run` ends soon, without a copy."""
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
