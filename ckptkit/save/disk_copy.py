"""The copy of a staging slot into an arena on a disk, begun while the slot is still being filled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import numpy as np

from ckptkit.errors import StoreFullError
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import UNKNOWN, Contents, Slot
from ckptkit.snapshot.describe import SlotExtent
from ckptkit.util.disk_file import PIECE_BYTES
from ckptkit.util.pages import PAGE_BYTES

SLOT_WAIT_S = 60.0  # of a disk thread, for a slot that is being made: the step loop does not wait with it
_WRITERS = 2  # two pieces in flight keep a local SSD busy
KEPT_BYTES_MIN = 256 << 10  # of neighbouring cells: leaving out less makes two writes of one and saves no time
# In a row: then a damaged block is written again. Until then every save with it is found damaged.
KEPT_SAVES_MAX = 32


@final
class DiskCopy:
    """A copy of a staging slot into an arena on a disk. It begins while the slot is still being filled.

    The written bytes are a committed slot only after `Arena.commit`: until the save's fate is decided, it may be for
    nothing. Pieces are written as soon as all of their boxes are there, in any order. Cells that the slot has already,
    from the save that it held before, are not written (`kept_bytes`).
    """

    def __init__(
        self,
        source: Slot,
        extents: Sequence[SlotExtent],
        size_bytes: int,
        arena: Arena,
        digests: Mapping[tuple[int, int], str] | None = None,
    ):
        """`digests` are those of the cells that are in the source already, by their byte range."""
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
        self._digests = dict(digests or {})
        self._cells: list[list[tuple[int, int]]] = [[] for _ in self._missing_bytes]  # with a digest, by piece
        for start, stop in self._digests:
            self._note(start, stop)
        self._held = UNKNOWN  # what the slot had when the copy began
        self.kept_bytes = 0

    def filled(self, start: int, stop: int, digest: str) -> None:
        """Announces that the bytes `[start, stop)` of the source are final, a whole cell; called once for each."""
        with self._changed:
            self._digests[start, stop] = digest
            self._note(start, stop)
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
        self._held, slot.contents = slot.contents, UNKNOWN
        if self._held.kept_saves >= KEPT_SAVES_MAX:
            self._held = UNKNOWN
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
        slot.contents = Contents(self._digests, self._held.kept_saves + 1 if self.kept_bytes else 0)
        return slot

    def _write(self, slot: Slot) -> None:
        while (piece := self._next()) is not None:
            try:
                for start, stop in self._changed_runs(piece):
                    self._arena.write(slot, self._source.memory[start:stop], start)
            except BaseException:
                self.abandon()  # the other writers must not wait: the copy is of no use any more
                raise

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._abandoned or not self._unwritten)
            if self._abandoned or not self._ready:
                return None
            self._unwritten -= 1
            self._changed.notify_all()
            return self._ready.popleft()

    def _note(self, start: int, stop: int) -> None:
        for piece, _ in _pieces(start, stop):
            self._cells[piece].append((start, stop))

    def _changed_runs(self, piece: int) -> list[tuple[int, int]]:
        """The parts of a piece that have to be written: all pages but those of cells that the slot has already."""
        begin = piece * PIECE_BYTES
        end = min(begin + PIECE_BYTES, self._size_bytes)
        same, other = list[tuple[int, int]](), list[tuple[int, int]]()
        for cell in self._cells[piece]:
            (same if self._held.digests.get(cell) == self._digests[cell] else other).append(cell)
        if not same:
            return [(begin, end)]
        changed = np.ones(-(-(end - begin) // PAGE_BYTES), bool)
        for cells, value in ((same, False), (other, True)):  # a page with a part of a changed cell is written
            for start, stop in cells:
                changed[max(start - begin, 0) // PAGE_BYTES : -(-(stop - begin) // PAGE_BYTES)] = value
        runs = list[tuple[int, int]]()
        edges = np.flatnonzero(np.diff(changed, prepend=False, append=False)).reshape(-1, 2) * PAGE_BYTES + begin
        for start, stop in edges.tolist():
            if runs and start - runs[-1][1] < KEPT_BYTES_MIN:
                runs[-1] = (runs[-1][0], min(stop, end))
            else:
                runs.append((start, min(stop, end)))
        with self._changed:
            self.kept_bytes += end - begin - sum(stop - start for start, stop in runs)
        return runs


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The pieces that `[start, stop)` touches, and how many of its bytes lie in each."""
    while start < stop:
        piece = start // PIECE_BYTES
        end = min(stop, (piece + 1) * PIECE_BYTES)
        yield piece, end - start
        start = end
