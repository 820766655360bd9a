"""Forecasts the cost of a durable save, from shapes and a profile alone. Pure: derived from how steps are written."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, final

from ckptkit.durable.cells.pieces import INLINE_BYTES, PiecePart, Pieces
from ckptkit.durable.cells.unchanged import GROUP_BYTES_MIN, LEAF_BYTES_MIN
from ckptkit.model.boxes import Box, cells_of, cut_from_bytes, rows_between_cells
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord

_STEP_FILES = 2  # the step's metadata and its marker
_ITEM_FILES = 4  # of an item of arrays: the tree's metadata, shardings, marker, database manifest
_PROCESS_FILES = 2  # for each process and item: array metadata, sidecar
_JSON_FILES = 2  # of an item of JSON
# Besides the files: the epoch before and after, intents, leftovers (2), the attempt's own intent (2).
_LOOKS = 7
_FIXED_BYTES = 1000  # of a step's own small files
_LEAF_BYTES = 750  # in the small files of an item, measured with names of 10 characters
_CELL_BYTES = 60  # a digest, and an entry in the tree
_COPY_FACTOR = 1.3  # of small cells in memory: the value, its key, its place in the transaction (measured 1.25)
_LEAF_MEMORY_BYTES = 6000  # of the texts and records of a leaf, while they are made
_BASE_MEMORY_BYTES = 8 << 20  # threads, connections, what TensorStore allocates once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveForecast:
    """The cost of one durable save. For several processes: the sum, except `peak_bytes`, which is that of the largest
    one. `shared_bytes` are those of data files of the step before: `files` counts them, `written_bytes` does not.

    `files` are files or objects that stay, `requests` what a bucket is asked (0 on a disk), `written_bytes` includes
    padding and small files, `peak_bytes` is host memory besides the snapshot. With compression both are what they are
    at most: the bytes were not looked at. The bytes of small files are right to about 10 %; of several processes the
    pieces are those of boxes that are shared out evenly.
    """

    leaves: int
    pieces: int
    data_files: int
    files: int
    requests: int
    written_bytes: int
    peak_bytes: int
    shared_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The forecast as plain values."""
        return dataclasses.asdict(self)


def forecast(
    items: Mapping[str, Sequence[LeafRecord]],
    profile: DurableProfile,
    *,
    remote: bool,
    json_items: int = 0,
    processes: int = 1,
    unchanged: Sequence[str] = (),
) -> SaveForecast:
    """The cost of a save of these array items; each leaf's `boxes` are all that is written of it, by whom ever. Leaves
    with names that match one of the patterns `unchanged` have the bytes of the two saves before.

    Cost: about 10 microseconds per leaf, and as much for each further cell.
    """
    parts = [_Item.of(leaves, profile, processes, unchanged) for leaves in items.values()]
    files = _STEP_FILES + _JSON_FILES * json_items + sum(part.files(processes) for part in parts)
    # Of each process the manifest is looked for, the tree read, and the sidecar.
    merged = (processes > 1) * sum(2 * processes + part.databases for part in parts)
    return SaveForecast(
        leaves=sum(part.leaves for part in parts),
        pieces=sum(part.pieces for part in parts),
        data_files=sum(part.data_files for part in parts),
        files=files,
        requests=(files + _LOOKS + merged) if remote else 0,
        written_bytes=_FIXED_BYTES + sum(part.written_bytes for part in parts),
        peak_bytes=_BASE_MEMORY_BYTES + max((part.peak_bytes for part in parts), default=0),
        shared_bytes=sum(part.shared_bytes for part in parts),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    leaves: int
    databases: int  # one for each process that writes
    pieces: int
    data_files: int
    records: int  # of the data files that the next step may take over
    written_bytes: int
    peak_bytes: int
    shared_bytes: int

    @classmethod
    def of(
        cls, leaves: Sequence[LeafRecord], profile: DurableProfile, processes: int, unchanged: Sequence[str]
    ) -> _Item:
        shares = [_divided(share, profile, unchanged) for share in _shares(leaves, processes) if share]
        writes = [_Writing(written, profile) for written, _ in shares]
        groups = [_Writing(taken, profile) for _, taken in shares if taken]
        peaks = [
            int(each.held_bytes * _COPY_FACTOR) + min(each.padded_bytes, profile.in_flight_bytes) for each in writes
        ]
        return cls(
            leaves=len(leaves),
            databases=len(writes),
            pieces=sum(each.pieces for each in writes),
            data_files=sum(each.data_files for each in writes) + sum(each.files_of_cells for each in groups),
            records=len(groups),
            written_bytes=sum(each.stored_bytes for each in writes)
            + _LEAF_BYTES * len(leaves)
            + _CELL_BYTES * sum(each.cells for each in writes + groups),
            peak_bytes=max(peaks, default=0) + _LEAF_MEMORY_BYTES * len(leaves),
            shared_bytes=sum(each.stored_bytes for each in groups),
        )

    def files(self, processes: int) -> int:
        """Files of the item."""
        # Each process's manifest; the tree that joins them, and the joined sidecars.
        joined = self.databases + 2 if processes > 1 else 0
        return _ITEM_FILES + _PROCESS_FILES * processes + self.data_files + self.records + joined


_Share = list[tuple[LeafRecord, list[Box]]]  # what one process writes of an item


def _shares(leaves: Sequence[LeafRecord], processes: int) -> list[_Share]:
    """Each part goes to the process with the least bytes, as in `choose_writers`. The holders of a box are unknown
    here: a leaf of one box counts as replicated."""
    shares: list[_Share] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]
    all_bytes = sum(record.box.size * leaf.itemsize for leaf in leaves for record in leaf.boxes)
    least_bytes = cut_from_bytes(all_bytes, processes)
    for leaf in leaves:
        for record in leaf.boxes:
            is_cut = len(leaf.boxes) == 1 and record.box.size * leaf.itemsize > least_bytes
            for part in rows_between_cells(record.box, leaf.cell, processes) if is_cut else [record.box]:
                load_bytes, process = loads[0]
                heapq.heapreplace(loads, (load_bytes + part.size * leaf.itemsize, process))
                shares[process].append((leaf, [part]))
    return shares


def _divided(share: _Share, profile: DurableProfile, unchanged: Sequence[str]) -> tuple[_Share, _Share]:
    """The leaves that a process writes, and those that it shares with the step before, as in `UnchangedLeaves.plan`."""
    held: dict[str, int] = {}
    for leaf, boxes in share if profile.shared_steps_max > 1 else ():
        if "/" not in leaf.name and any(fnmatchcase(leaf.name, pattern) for pattern in unchanged):
            held[leaf.name] = held.get(leaf.name, 0) + sum(box.size for box in boxes) * leaf.itemsize
    held = {name: size for name, size in held.items() if size >= LEAF_BYTES_MIN}
    if sum(held.values()) < GROUP_BYTES_MIN:
        return share, []
    return (
        [(leaf, [] if leaf.name in held else boxes) for leaf, boxes in share],
        [(leaf, boxes) for leaf, boxes in share if leaf.name in held],
    )


@final
class _Writing:
    """How one process writes its share: as `CellWriter` does, without the bytes."""

    def __init__(self, share: _Share, profile: DurableProfile):
        self.pieces = self.data_files = 1  # the last: the tree that joins all is in its file, after the cells
        self.cells = self.stored_bytes = self.padded_bytes = 0
        self.held_bytes = 0  # at most, at a time
        self._open_bytes = 0  # of the data file that is being filled
        pieces = Pieces(profile, share)
        for leaf, boxes in share:
            for part in (part for box in boxes for part in pieces.parts_of(leaf, box)):
                pieces.add(part)
                self._add(leaf, part, profile.data_file_bytes)
                self.held_bytes = max(self.held_bytes, pieces.held_bytes)
                if pieces.is_full:
                    self._send(pieces)
        pieces.expect_no_more()
        if not pieces.is_last:
            self._send(pieces)

    @property
    def files_of_cells(self) -> int:
        """The data files if the last tree is in memory: without the one that has the tree and no cell."""
        return self.data_files - (not self._open_bytes)

    def _add(self, leaf: LeafRecord, part: PiecePart, data_file_bytes: int) -> None:
        cell_bytes, whole = leaf.cell_bytes, math.prod(leaf.cell)
        for cell in cells_of(part.box, leaf.cell):
            self.cells += 1
            self.stored_bytes += cell_bytes
            if part.way == "referred to" and cell.size < whole:
                self.padded_bytes += cell_bytes  # TensorStore makes a whole one of it
            if cell_bytes > INLINE_BYTES:
                self._open_bytes += cell_bytes
            if self._open_bytes >= data_file_bytes:
                self._close_file()

    def _send(self, pieces: Pieces) -> None:
        while pieces.must_wait:
            pieces.finish_oldest()
        pieces.send()
        self.pieces += 1
        if self._open_bytes:
            self._close_file()

    def _close_file(self) -> None:
        self.data_files, self._open_bytes = self.data_files + 1, 0
