"""What can be said of an item that stock Orbax wrote: its structure, and that every chunk is there and decodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from ckptkit.inspection.arrays import finished, open_array, open_kvstore, read_arrays, stores_all
from ckptkit.inspection.places import Place
from ckptkit.inspection.records import LeafInfo
from ckptkit.model import paths
from ckptkit.model.boxes import Box, cells_of
from ckptkit.verification.pool import CellCheck
from ckptkit.verification.records import Finding


def stock_checks(item: Place, timeout_s: float, findings: list[Finding]) -> list[CellCheck]:
    """A read of every chunk of an item. What its metadata has wrong goes to `findings`.

    Raises `CorruptCheckpointError` where its leaves are not known, `StoreError` where it cannot be reached.
    """
    words, leaves, problems = read_arrays(item, timeout_s=timeout_s)
    findings += [Finding(path=item.url, problem=problem) for problem in problems]
    version = 3 if words.endswith("zarr3") else 2
    ocdbt = paths.OCDBT_MANIFEST in item.names()
    if version == 2 and stores_all(item):
        findings += _missing_chunks(item, leaves, ocdbt, timeout_s)
    # Without a cache: every chunk is read once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    return [
        check
        for leaf in leaves
        if leaf.shape is not None
        for check in _leaf_checks(item, leaf, words, context, timeout_s)
    ]


def _missing_chunks(item: Place, leaves: tuple[LeafInfo, ...], ocdbt: bool, timeout_s: float) -> Iterator[Finding]:
    keys = set(_keys(item, ocdbt, timeout_s))
    for leaf in leaves:
        for name, box in _chunk_names(leaf):
            if not {f"{leaf.name}/{name}", f"{leaf.name}/{name.replace('.', '/')}"} & keys:
                yield Finding(path=item.url, problem="the chunk is not there", item=item.name, leaf=leaf.name, box=box)


def _keys(item: Place, ocdbt: bool, timeout_s: float) -> Iterator[str]:
    listed = finished(open_kvstore(item, ocdbt, timeout_s).list(), item.url, timeout_s)
    return (key.decode(errors="replace") for key in listed)


def _chunk_names(leaf: LeafInfo) -> Iterator[tuple[str, Box]]:
    if leaf.shape is None or leaf.cell is None or 0 in leaf.shape:
        return
    counts = [-(-size // rows) for size, rows in zip(leaf.shape, leaf.cell, strict=True)]
    for index in itertools.product(*map(range, counts)):
        start = tuple(i * rows for i, rows in zip(index, leaf.cell, strict=True))
        stop = tuple(min(a + rows, size) for a, rows, size in zip(start, leaf.cell, leaf.shape, strict=True))
        yield ".".join(map(str, index)) or "0", Box(start, stop)


def _leaf_checks(item: Place, leaf: LeafInfo, words: str, context: Any, timeout_s: float) -> Iterator[CellCheck]:
    assert leaf.shape is not None
    assert leaf.cell is not None
    assert leaf.dtype is not None
    itemsize, opened = np.dtype(leaf.dtype).itemsize, []

    def read(box: Box) -> None:
        if not opened:
            opened.append(open_array(item, leaf, words, context, timeout_s))
        finished(opened[0][box.slices()].read(), f"{item.url}: leaf {leaf.name}", timeout_s)

    for box in cells_of(Box.whole(leaf.shape), leaf.cell):
        yield CellCheck(
            path=item.url,
            item=item.name,
            leaf=leaf.name,
            box=box,
            size_bytes=box.size * itemsize,
            memory_bytes=3 * math.prod(leaf.cell) * itemsize,  # as stored, decoded, and the part that was asked for
            expected=None,
            read=lambda box=box: read(box),
        )
