"""How what one process writes of an item is cut into pieces, and how many are in flight at a time. Pure.

A piece is what is committed together. Of cells that are copied or encoded it takes host memory until it is written;
the others stay where the caller has them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, final

from ckptkit.model.boxes import Box, cells_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord

INLINE_BYTES = 1024  # values up to this size are in the tree itself, not in a data file
_HELD_PIECES = 18  # of all copied and encoded cells of an item: fewer take more memory, more take more requests
_HELD_BYTES_MIN = 3 << 20  # of such a piece: a request takes as long for less
_HELD_IN_FLIGHT = 2  # of such pieces, while the next is filled

Way = Literal["copied", "encoded", "referred to"]


class PiecePart(NamedTuple):
    """The unit that is added to a piece: a box of a leaf, and its bytes as stored before encoding, in whole cells."""

    box: Box
    nbytes: int
    way: Way


@dataclass(slots=True)
class _Load:
    all_bytes: int = 0
    held_bytes: int = 0  # of them, what takes host memory of its own

    def add(self, part: PiecePart, sign: int = 1) -> None:
        self.all_bytes += sign * part.nbytes
        if part.way != "referred to":
            self.held_bytes += sign * part.nbytes


@final
class Pieces:
    """Where one piece ends and the next begins, and which of those before it has to be written first.

    `expected` is what will be added, where that is known: its last piece is known then before it is filled
    (`is_last`), and ends with the item. Otherwise every piece may be the last one.
    """

    def __init__(self, profile: DurableProfile, expected: Iterable[tuple[LeafRecord, Iterable[Box]]] = ()):
        self._profile = profile
        self._left = _Load()
        for leaf, boxes in expected:
            for box in boxes:
                self._left.add(_whole(leaf, box, profile))
        self._piece_bytes = profile.piece_bytes
        self._held_piece_bytes = self._of_held_bytes()
        self._sent: deque[_Load] = deque()
        self._begin()

    def parts_of(self, leaf: LeafRecord, box: Box) -> list[PiecePart]:
        """A box as it is added: what is copied cell by cell, the rest in one unless that is more than a piece."""
        whole = _whole(leaf, box, self._profile)
        if whole.way == "referred to":
            most_bytes = self._piece_bytes
        else:
            most_bytes = leaf.cell_bytes if whole.way == "copied" else self._held_piece_bytes
        if whole.nbytes <= most_bytes:
            return [whole] if whole.nbytes else []
        return [PiecePart(cell, leaf.cell_bytes, whole.way) for cell in cells_of(box, leaf.cell)]

    def add(self, part: PiecePart) -> None:
        """It belongs to the piece that is being filled."""
        self._filled.add(part)
        self._left.add(part, -1)

    def add_text(self, nbytes: int) -> None:
        """So do `nbytes` of metadata, which are unexpected there."""
        self._filled.all_bytes += nbytes

    @property
    def is_full(self) -> bool:
        """Whether the piece has to be sent before more is added. The last one is sent at the end, unless more has come
        than was expected."""
        filled = self._filled
        full = filled.all_bytes >= self._piece_bytes or filled.held_bytes >= self._held_piece_bytes
        return full and (not self.is_last or self._left.all_bytes < 0)

    @property
    def must_wait(self) -> bool:
        """Whether the oldest piece in flight has to be written before this one is sent."""
        if not self._sent:
            return False
        held_bytes = sum(load.held_bytes for load in self._sent)
        all_bytes = self.sent_bytes + self._filled.all_bytes
        return all_bytes > self._profile.in_flight_bytes or held_bytes >= _HELD_IN_FLIGHT * self._held_piece_bytes

    def send(self) -> None:
        """The piece is in flight, and the next one begins."""
        self._sent.append(self._filled)
        self._begin()

    def finish_oldest(self) -> None:
        """The oldest piece in flight is written."""
        self._sent.popleft()

    def expect_no_more(self) -> None:
        """No more units follow: the next piece is the last one, if this one is not."""
        self._left = _Load()

    @property
    def filled_bytes(self) -> int:
        """Of the piece that is being filled."""
        return self._filled.all_bytes

    @property
    def sent_bytes(self) -> int:
        """Of the pieces that are in flight."""
        return sum(load.all_bytes for load in self._sent)

    @property
    def held_bytes(self) -> int:
        """The host memory of all of them, before encoding."""
        return self._filled.held_bytes + sum(load.held_bytes for load in self._sent)

    def _begin(self) -> None:
        self._filled = _Load()
        self.is_last = self._left.all_bytes <= self._piece_bytes and self._left.held_bytes <= self._held_piece_bytes

    def _of_held_bytes(self) -> int:
        """How much of a piece may be held: what is filled and what is in flight is a sixth of what is expected, and
        no more than may be in flight."""
        if not self._left.held_bytes:  # or not known
            return self._profile.in_flight_bytes
        share_bytes = max(_HELD_BYTES_MIN, self._left.held_bytes // _HELD_PIECES)
        in_flight_bytes = self._profile.in_flight_bytes // (1 + _HELD_IN_FLIGHT)
        return max(1, min(self._piece_bytes, in_flight_bytes, share_bytes))


def _whole(leaf: LeafRecord, box: Box, profile: DurableProfile) -> PiecePart:
    cell_bytes, box_bytes, nbytes = _sizes(box, leaf.cell, leaf.itemsize)
    if profile.codec_of(cell_bytes) is not None:
        way: Way = "encoded"
    else:
        way = "copied" if min(box_bytes, cell_bytes) < profile.copied_bytes else "referred to"
    return PiecePart(box, nbytes, way)


@lru_cache(maxsize=4096)  # a state has many leaves of few shapes
def _sizes(box: Box, cell: tuple[int, ...], itemsize: int) -> tuple[int, int, int]:
    """Bytes of a cell, of a box, and of the box in whole cells."""
    cell_bytes = math.prod(cell) * itemsize
    return cell_bytes, box.size * itemsize, len(cells_of(box, cell)) * cell_bytes
