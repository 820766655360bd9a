"""What a durable save will cost, from shapes and a profile alone. Pure: the numbers come from how steps are written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptkit.manifest import LeafRecord
from ckptkit.sharding import cells_of
from ckptkit.tuning.profile import HELD_IN_FLIGHT, DurableProfile

_STEP_FILES = 2  # the step's metadata and its marker
_ITEM_FILES = 4  # of an item of arrays: the tree's metadata, shardings, marker, database manifest
_PROCESS_FILES = 2  # for each process and item: array metadata, sidecar
_JSON_FILES = 2  # of an item of JSON
# Beside the files: the epoch before and after, intents, what was left there (2), the attempt's own intent (2).
_LOOKS = 7
_FIXED_BYTES = 1000  # of a step's own small files
_LEAF_BYTES = 750  # in the small files of an item, measured with names of 10 characters
_CELL_BYTES = 60  # a digest, and an entry in the tree
_COPY_FACTOR = 1.3  # of small cells in memory: the value, its key, its place in the transaction (measured 1.25)
_LEAF_MEMORY_BYTES = 6000  # of the texts and records of a leaf, while they are made
_BASE_MEMORY_BYTES = 8 << 20  # threads, connections, what TensorStore allocates once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveForecast:
    """What one durable save takes. Of several processes: together, except `peak_bytes`, which is of the largest one.

    `files` are files or objects that stay, `requests` what a bucket is asked (0 on a disk), `written_bytes` includes
    padding and small files, `peak_bytes` is host memory beside the snapshot. With compression both are what they are
    at most: nobody has looked at the bytes. The bytes of small files are right to about 10 %; of several pieces there
    may be one more or less.
    """

    leaves: int
    pieces: int
    data_files: int
    files: int
    requests: int
    written_bytes: int
    peak_bytes: int

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
) -> SaveForecast:
    """The cost of a save of these array items; each leaf's `boxes` are all that is written of it, by whom ever.

    Cost: about 5 microseconds per leaf, and one per cell.
    """
    parts = [_Item.of(leaves, profile, processes) for leaves in items.values()]
    files = _STEP_FILES + _JSON_FILES * json_items + sum(part.files(processes) for part in parts)
    merged = (processes > 1) * sum(2 + 3 * processes for _ in parts)  # reads of each part, the joined node and manifest
    return SaveForecast(
        leaves=sum(part.leaves for part in parts),
        pieces=sum(part.pieces for part in parts),
        data_files=sum(part.data_files for part in parts),
        files=files,
        requests=(files + _LOOKS + merged) if remote else 0,
        written_bytes=_FIXED_BYTES + sum(part.stored_bytes + part.small_bytes for part in parts),
        peak_bytes=_BASE_MEMORY_BYTES + max((part.peak_bytes for part in parts), default=0),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    leaves: int
    pieces: int
    data_files: int
    stored_bytes: int
    small_bytes: int
    peak_bytes: int

    @classmethod
    def of(cls, leaves: Sequence[LeafRecord], profile: DurableProfile, processes: int) -> _Item:
        stored_bytes, held_bytes, padded_bytes, cells = 0, 0, 0, 0
        for leaf in leaves:
            cell_bytes = math.prod(leaf.cell) * leaf.itemsize
            for record in leaf.boxes:
                count, box_bytes = len(cells_of(record.box, leaf.cell)), record.box.size * leaf.itemsize
                cells += count
                stored_bytes += count * cell_bytes
                if profile.holds(cell_bytes, box_bytes):
                    held_bytes += count * cell_bytes
                elif count * cell_bytes > box_bytes:
                    padded_bytes += cell_bytes
        # Each process writes about as much as the others: boxes are balanced over those that hold them.
        share_bytes, held_bytes = -(-stored_bytes // processes), -(-held_bytes // processes)
        held_piece_bytes = profile.held_piece_bytes(held_bytes)
        pieces = max(1, math.ceil(share_bytes / profile.piece_bytes), math.ceil(held_bytes / held_piece_bytes))
        a_piece = share_bytes / pieces
        last = int(a_piece // profile.data_file_bytes) + 1  # the tree of all stands after the cells of the last piece
        held = min(held_bytes, profile.in_flight_bytes, (1 + HELD_IN_FLIGHT) * held_piece_bytes) * _COPY_FACTOR
        return cls(
            leaves=len(leaves),
            pieces=pieces * processes,
            data_files=processes * ((pieces - 1) * math.ceil(a_piece / profile.data_file_bytes) + last),
            stored_bytes=stored_bytes,
            small_bytes=_LEAF_BYTES * len(leaves) + _CELL_BYTES * cells,
            peak_bytes=int(held + min(padded_bytes, profile.in_flight_bytes) + _LEAF_MEMORY_BYTES * len(leaves)),
        )

    def files(self, processes: int) -> int:
        """Files of the item."""
        databases = 2 * processes if processes > 1 else 0  # each process's manifest, and the node that joins them
        return _ITEM_FILES + _PROCESS_FILES * processes + self.data_files + databases
