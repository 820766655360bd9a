"""Divides the reading among replicas: boxes that several processes want, cut into pieces, and distributed. Pure.

Processes that want the same boxes of a leaf form a *group*; a leaf whose groups have one size and include every process
can be shared. The reads of one process for its group are a *stream*: pieces one after the other. Streams are sent in
windows of equal width, one window of every process in each round.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from ckptkit.model.boxes import Box
from ckptkit.restore.plan import Key, Piece, pieces_of

Groups = tuple[tuple[int, ...], ...]  # each ascending, in order of their first

CARRIED_BYTES = 16 << 20  # leaves of coarser groups, up to so much of them, go with the others: no rounds of their own
DROPPED_BYTES = 1 << 20  # what cannot be carried and is less than this each process reads for itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """A leaf that can be shared: the `boxes` of it that this process wants, and all of its group."""

    key: Key
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    cell: tuple[int, ...]
    itemsize: int
    groups: Groups

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole leaf: the same on every process."""
        return math.prod(self.shape) * self.itemsize


def groups_of(holders: Mapping[Box, tuple[int, ...]], count: int) -> Groups | None:
    """The groups of a leaf: each has the processes that hold the same box, out of `count` processes.

    None if the leaf cannot be shared: groups of one process, of several sizes, that overlap, or that lack a process.
    """
    groups = sorted(set(holders.values()))
    members = [process for group in groups for process in group]
    alike = len({len(group) for group in groups}) == 1 and len(groups[0]) > 1
    return tuple(groups) if alike and sorted(members) == list(range(count)) else None


def by_groups(leaves: Iterable[Common]) -> dict[Groups, list[Common]]:
    """The leaves by the groups that share them, those of most bytes first: one series of rounds for each entry.

    A few bytes of coarser groups are carried by the finest ones (then each of these reads them); few bytes that cannot
    be carried are left out. The same on every process.
    """
    found: dict[Groups, list[Common]] = {}
    for leaf in leaves:
        found.setdefault(leaf.groups, []).append(leaf)
    sizes = {groups: sum(leaf.global_bytes for leaf in found[groups]) for groups in found}
    ordered = sorted(found, key=lambda groups: (-sizes[groups], groups))
    kept: dict[Groups, list[Common]] = {}
    for groups in ordered:
        carrier = next((each for each in kept if sizes[groups] <= CARRIED_BYTES and _divides(each, groups)), None)
        if carrier is not None:
            kept[carrier] += found[groups]
        elif not kept or sizes[groups] >= DROPPED_BYTES:
            kept[groups] = found[groups]
    return kept


def share_out(
    leaves: Iterable[Common], group: Sequence[int], needs: Callable[[Key, int], bool]
) -> dict[int, list[Piece]]:
    """The reads of each process of a group for all of it, each piece once, in the order of the leaves.

    A piece is read by a process that has it nearer than the durable tier, if one does: `needs` returns False for it.
    Processes that can read the same pieces take equal parts, each a run of neighbours: a store joins their reads. Every
    process of the group computes the same.
    """
    by_readers: dict[tuple[int, ...], list[Piece]] = {}
    for leaf in leaves:
        readers = tuple(process for process in group if not needs(leaf.key, process)) or tuple(group)
        by_readers.setdefault(readers, []).extend(
            Piece(leaf.key, wanted, box, box.size * leaf.itemsize)
            for wanted in leaf.boxes
            for box in pieces_of(wanted, leaf.cell)
        )
    streams: dict[int, list[Piece]] = {process: [] for process in group}
    for readers, pieces in by_readers.items():
        total = sum(piece.nbytes for piece in pieces)
        start = 0
        for piece in pieces:  # to the reader in whose part its middle is
            at = (2 * start + piece.nbytes) * len(readers) // (2 * total)
            streams[readers[min(at, len(readers) - 1)]].append(piece)
            start += piece.nbytes
    return streams


@final
class Stream:
    """The `pieces` of one process one after the other, seen through windows of `width` bytes."""

    def __init__(self, pieces: Sequence[Piece], width: int):
        self.pieces = [piece for piece in pieces if piece.nbytes]
        self._starts = list(accumulate((piece.nbytes for piece in self.pieces), initial=0))
        self._width = width

    def in_window(self, number: int) -> list[tuple[Piece, int, int, int]]:
        """The content of a window: each piece, its range of bytes, and the offset of that range in the window."""
        low, high = number * self._width, (number + 1) * self._width
        shown = []
        for index in range(max(0, bisect_right(self._starts, low) - 1), len(self.pieces)):
            start, stop = self._starts[index], self._starts[index + 1]
            if start >= high:
                break
            begin, end = max(start, low), min(stop, high)
            shown.append((self.pieces[index], begin - start, end - start, begin - low))
        return shown

    def begins_in(self, number: int) -> list[Piece]:
        """The pieces whose first byte a window shows: what has to be read for it that was not read before."""
        return [piece for piece, start, _, _ in self.in_window(number) if start == 0]

    def filled(self, number: int) -> int:
        """How many bytes of a window are used."""
        return max(0, min(self._width, self._starts[-1] - number * self._width))


def _divides(fine: Groups, coarse: Groups) -> bool:
    """Whether each group of `fine` lies in one of `coarse`."""
    of = {process: number for number, group in enumerate(coarse) for process in group}
    return all(len({of[process] for process in group}) == 1 for group in fine)
