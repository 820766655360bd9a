"""The cells of a stored box: their bytes, and copies of them that are compared with their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.boxes import Box, cells_of, in_rows
from ckptkit.model.digests import copy_digested, digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest


def cell_ranges(record: BoxRecord, leaf: LeafRecord) -> list[tuple[Box, int, int]]:
    """The cells of a held box with their byte range `[start, stop)` inside the box's bytes."""
    ranges, at = [], 0
    for cell in cells_of(record.box, leaf.cell):
        stop = at + cell.size * leaf.itemsize
        ranges.append((cell, at, stop))
        at = stop
    return ranges


class DigestedCell(NamedTuple):
    """A cell that a manifest describes: its byte range `[start, stop)` inside the box's bytes, and its digest."""

    item: str
    leaf: LeafRecord
    record: BoxRecord
    cell: Box
    start: int
    stop: int
    digest: str


def digested_cells(manifest: Manifest) -> Iterator[DigestedCell]:
    """Every cell of a manifest's arrays, in its order."""
    for item, leaves in manifest.arrays.items():
        for leaf in leaves:
            for record in leaf.boxes:
                for (cell, start, stop), digest in zip(cell_ranges(record, leaf), record.digests, strict=True):
                    yield DigestedCell(item, leaf, record, cell, start, stop, digest)


# A cell, its byte range in its box, and the flat bytes that it fills -> its elements, or those bytes, filled.
FetchCell = Callable[[Box, int, int, np.ndarray], np.ndarray]


def copy_proven(
    leaf: LeafRecord,
    record: BoxRecord,
    wanted: Box,
    into: np.ndarray,
    fetch: FetchCell,
    *,
    where: str,
) -> None:
    """Copies the part of `wanted` that `record.box` holds into `into` (of shape `wanted.shape`), proving each cell.

    The bytes whose digest is checked are the very bytes that are returned. Raises `CorruptCheckpointError` naming
    the leaf and the cell.
    """
    one_cell = len(record.digests) == 1 and record.box == wanted and into.flags.c_contiguous  # most boxes
    in_place = one_cell or (record.box == wanted and into.flags.c_contiguous and in_rows(wanted.shape, leaf.cell))
    whole = into.reshape(-1).view(np.uint8) if in_place else None
    ranges = [(record.box, 0, into.nbytes)] if one_cell else cell_ranges(record, leaf)
    for (cell, start, stop), digest in zip(ranges, record.digests, strict=True):
        common = cell if whole is not None else cell.intersect(wanted)
        if common is None:
            continue
        if whole is not None:
            data, direct = whole[start:stop], True
        else:
            part = into[common.slices(wanted.start)]
            direct = common == cell and part.flags.c_contiguous
            data = part.reshape(-1).view(np.uint8) if direct else np.empty(stop - start, np.uint8)
        source = fetch(cell, start, stop, data)
        if source.dtype != np.uint8 or source.ndim != 1:
            source = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        if source.nbytes != data.nbytes:
            raise CorruptCheckpointError(
                f"{where}: leaf {leaf.name}, cell {cell.start} to {cell.stop} has {source.nbytes} bytes, expected "
                f"{data.nbytes}",
                path=where,
            )
        if (found := _arrived(source, data)) != digest:
            raise CorruptCheckpointError(
                f"{where}: leaf {leaf.name}, cell {cell.start} to {cell.stop} has digest {found}, expected {digest}",
                path=where,
            )
        if not direct:
            block = data.view(np.dtype(leaf.dtype)).reshape(cell.shape)
            into[common.slices(wanted.start)] = block[common.slices(cell.start)]


def _arrived(source: np.ndarray, target: np.ndarray) -> str:
    """The digest of `target`, which `source` is copied to first where it is other memory. Of the target: a slot may be
    overwritten while it is read."""
    return digest_of(target) if source is target else copy_digested(source, target, of_target=True)
