"""Reads of arrays that stock Orbax wrote: every chunk that has to be there, and nothing that is not stored.

A damaged shape may claim any number of chunks. So chunks are counted by the keys that are stored, never by the shape,
and what is found is counted where it is more than a person reads.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from operator import add
from typing import Literal, final

import numpy as np
import tensorstore as ts
import zstandard

from ckptkit.durable.cells.placed import PlacedCells, Places
from ckptkit.durable.cells.tensorstore_wait import finished
from ckptkit.durable.lifecycle.classify import json_name_in
from ckptkit.durable.lifecycle.places import Place, item_kind, json_value
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.stored_arrays import ChunkGrid, StoredArray, open_kvstore, read_arrays, stores_all
from ckptkit.model import paths
from ckptkit.model.boxes import Box, blocks_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.leaf_info import LeafInfo
from ckptkit.model.paths import array_prefix
from ckptkit.verification.pool import CellCheck
from ckptkit.verification.records import Finding

_ARRAY_HANDLERS = frozenset(
    {
        "PyTreeCheckpointHandler",
        "StandardCheckpointHandler",
        "ArrayCheckpointHandler",
        "PyTreeHandler",
        "StandardHandler",
    }
)
_JSON_HANDLERS = frozenset({"JsonCheckpointHandler", "JsonHandler", "MetricsHandler"})
_NAMED_MAX = 8  # missing chunks of a leaf that are named; the others are counted
_SMALL_BYTES = 1 << 20
_DAMAGED_MAX = 100  # chunks of a leaf that cannot be read before the rest of it is left out

_Index = tuple[int, ...]


Undigested = Literal["arrays", "small", "unknown"]  # what an item is of which no digests were kept


@final
class _SmallChunks:
    """The small chunks of an item on a disk, decoded from where its database has them. Declines all others: large ones,
    those of other places and codecs, and all that it cannot decode.

    TensorStore needs a millisecond of processor time to open and read each array, whatever its size.
    """

    def __init__(self, item: Place, timeout_s: float):
        step, _, self._item = item.url.rpartition("/")
        known = item.store.properties.file_system and paths.OCDBT_MANIFEST in item.names()
        self._places = Places(step, DurableProfile(operation_timeout_s=timeout_s)) if known else None
        self._cells = PlacedCells(self._places) if self._places else None

    def inline(self) -> Mapping[str, bytes]:
        """The values that are in the database itself, by key."""
        return self._places.inline(self._item) if self._places else {}

    def decodes(self, leaf: LeafInfo, box: Box) -> bool:
        """Whether a chunk is small, there, and decodes to as many bytes as it has to."""
        if self._cells is None or leaf.cell is None:
            return False
        prefix, size_bytes = array_prefix(leaf.name), math.prod(leaf.cell) * np.dtype(leaf.dtype).itemsize
        document = self._cells.stored(self._item, f"{prefix}.zarray", _SMALL_BYTES)
        if size_bytes > _SMALL_BYTES or document is None or (codec := _codec(document)) is None:
            return False
        index = [start // rows for start, rows in zip(box.start, leaf.cell, strict=True)]
        key = prefix + (".".join(map(str, index)) or "0")
        value = self._cells.stored(self._item, key, 2 * _SMALL_BYTES)
        return (
            value is not None and (_unpacked_bytes(value, size_bytes) if codec == "zstd" else len(value)) == size_bytes
        )


@lru_cache(maxsize=256)  # many leaves, few different documents
def _codec(document: bytes) -> Literal["plain", "zstd"] | None:
    """How the chunks of an array with this metadata in zarr 2 are stored; None for any other way, or other keys."""
    with suppress(ValueError, RecursionError):
        zarr = json.loads(document)
        if isinstance(zarr, dict) and not zarr.get("filters") and zarr.get("dimension_separator", ".") == ".":
            codec = zarr.get("compressor", {})
            if codec is None:
                return "plain"
            return "zstd" if isinstance(codec, dict) and codec.get("id") == "zstd" else None
    return None


def _unpacked_bytes(value: bytes, bytes_max: int) -> int:
    """The size of one frame of zstd when it is decompressed; -1 for anything else, and for a larger one."""
    with suppress(zstandard.ZstdError):
        if zstandard.frame_content_size(value) <= bytes_max:
            return len(zstandard.ZstdDecompressor().decompress(value, bytes_max, allow_extra_data=False))
    return -1


@final
class StockLeaf:
    """The reads of one array. `checks` are made one by one, while they are read."""

    def __init__(
        self, item: Place, name: str, leaf: LeafInfo, chunks: Sequence[Box], array: StoredArray, small: _SmallChunks
    ):
        assert leaf.cell is not None
        self._item, self._name, self._leaf, self._cell, self._chunks = item, name, leaf, leaf.cell, chunks
        self._array, self._small = array, small
        self._itemsize = np.dtype(leaf.dtype).itemsize
        self._lock = threading.Lock()
        self._damaged = 0
        self.name = f"{name}:{leaf.name}"
        self.count = sum(
            math.prod(-(-size // rows) for size, rows in zip(chunk.shape, leaf.cell, strict=True)) for chunk in chunks
        )
        self.size_bytes = sum(chunk.size for chunk in chunks) * self._itemsize
        # As stored, decoded, and the part that was asked for.
        self.memory_bytes = 3 * math.prod(leaf.cell) * self._itemsize

    def checks(self) -> Iterator[CellCheck]:
        """A read of each cell of the chunks that are stored."""
        left = self.count
        for box in (box for chunk in self._chunks for box in _cells(chunk, self._cell)):
            if self._damaged >= _DAMAGED_MAX:
                yield self._check(box, 0, f"{left} more chunks were not read, after {_DAMAGED_MAX} damaged ones")
                return
            left -= 1
            yield self._check(box, box.size * self._itemsize)

    def _check(self, box: Box, size_bytes: int, left_out: str | None = None) -> CellCheck:
        return CellCheck(
            path=self._item.url,
            item=self._name,
            leaf=self._leaf.name,
            box=box,
            size_bytes=size_bytes,
            memory_bytes=self.memory_bytes,
            expected=None,
            read=lambda: self._read(box, left_out),
        )

    def _read(self, box: Box, left_out: str | None) -> None:
        where = f"{self._item.url}: leaf {self._leaf.name}"
        if left_out is not None:
            raise CorruptCheckpointError(f"{where}: {left_out}", path=self._item.url)
        if self._small.decodes(self._leaf, box):
            return
        try:
            self._array.read(box)
        except CorruptCheckpointError:
            with self._lock:
                self._damaged += 1
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class StockReads:
    """The reads for items of stock Orbax, their damage, and the parts that a restart does not need.

    `checks` are of arrays in an item's one file, of which all has been read and decoded: they only count them.
    """

    timeout_s: float
    leaves: list[StockLeaf] = field(default_factory=list)
    checks: list[CellCheck] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, item: Place, name: str, handler: str = "") -> Undigested:
        """Adds the item `name` of a step, for which the step names `handler`.

        An item that consists of items (random keys) is each of them. One of a caller's own handler is not understood,
        and never damaged. Raises `CorruptCheckpointError` where nothing of the item is known, `StoreError` where it
        cannot be reached.
        """
        kind, orbax = item_kind(item), handler.rpartition(".")[2] if handler.startswith("orbax.") else ""
        if kind == "arrays" or (kind is None and orbax in _ARRAY_HANDLERS):
            self.leaves.extend(_stock_leaves(item, name, self))
            return "arrays"
        if kind is not None:
            return "small"
        if orbax in _JSON_HANDLERS and set(item.names()) <= {paths.COMMIT_MARK}:
            raise CorruptCheckpointError(f"{item.url}: its file is missing", path=item.url)
        parts = [item.below(each) for each in item.directories()]
        files = {each for each in item.names() if not each.endswith("/")}
        if parts and files <= {paths.COMMIT_MARK, paths.STEP_METADATA} and all(map(item_kind, parts)):
            kinds = {self.add(part, f"{name}/{part.name}") for part in parts}
            for part in parts:
                if (file := json_name_in(part.names())) is not None:
                    json_value(part, file)
            return "arrays" if "arrays" in kinds else "small"
        of = f" (of {handler})" if handler else ""
        self.notes.append(f"{item.url}: not understood{of}, and so unproven")
        return "unknown"


def _stock_leaves(item: Place, name: str, reads: StockReads) -> list[StockLeaf]:
    """The arrays of an item that are stored in chunks. Cost: the metadata, and a listing of the item's keys."""
    timeout_s, findings = reads.timeout_s, reads.findings
    small = _SmallChunks(item, timeout_s)
    stored = read_arrays(item, timeout_s=timeout_s, inline=small.inline())
    findings += [Finding(path=item.url, problem=problem) for problem in stored.problems]
    reads.notes.extend(stored.notes)
    ocdbt, all_stored = paths.OCDBT_MANIFEST in item.names(), stores_all(item)
    listed = finished(open_kvstore(item, ocdbt, timeout_s).list(), item.url, timeout_s)
    keys = sorted(key.decode(errors="replace") for key in listed)
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})  # every chunk is read once
    limits_s = {"open_timeout_s": timeout_s, "read_timeout_s": timeout_s}
    made: list[StockLeaf] = []
    for leaf in stored.leaves:
        if leaf.shape is None or 0 in leaf.shape:
            continue
        if leaf.path in stored.held:
            check = CellCheck(
                path=item.url,
                item=name,
                leaf=leaf.name,
                box=Box.whole(leaf.shape),
                size_bytes=leaf.array_bytes,
                memory_bytes=0,  # it was read, and is held, with its file
                expected=None,
                read=lambda: None,
            )
            reads.checks.append(check)
            continue
        grid = stored.grids[leaf.name]
        counts = tuple(-(-size // rows) for size, rows in zip(leaf.shape, grid.chunk, strict=True))
        found = _stored(keys, array_prefix(leaf.name), grid, counts)
        chunks = [_box(index, grid, leaf) for index in sorted(found)]
        if all_stored:
            findings += _missing(item, name, leaf, grid, math.prod(counts), chunks)
        array = StoredArray(item, leaf, stored.layout, context, fill_missing=not all_stored, **limits_s)
        made.append(StockLeaf(item, name, leaf, chunks, array, small))
    return made


def _stored(keys: Sequence[str], prefix: str, grid: ChunkGrid, counts: _Index) -> set[_Index]:
    """The chunks of an array that have a key, of those that its shape has."""
    found: set[_Index] = set()
    before = prefix + grid.before + (grid.between if grid.before and counts else "")
    for at in range(bisect_left(keys, before), len(keys)):
        if not keys[at].startswith(before):
            break
        parts = keys[at][len(before) :].split(grid.between)
        if not counts:
            found |= {()} if parts == ([""] if grid.before else ["0"]) else set()
        elif len(parts) == len(counts) and all(part.isdecimal() and len(part) <= 18 for part in parts):
            index = tuple(map(int, parts))
            found |= {index} if all(each < count for each, count in zip(index, counts, strict=True)) else set()
    return found


def _missing(
    item: Place, name: str, leaf: LeafInfo, grid: ChunkGrid, count: int, chunks: Sequence[Box]
) -> Iterator[Finding]:
    """The first of `count` chunks that are not stored, by name, and how many others there are."""
    missing = count - len(chunks)
    if missing <= 0:
        return
    assert leaf.shape is not None
    found = set(chunks)
    absent = (box for box in blocks_of(leaf.shape, grid.chunk) if box not in found)
    for box in itertools.islice(absent, _NAMED_MAX):
        yield Finding(path=item.url, problem="the chunk is not there", item=name, leaf=leaf.name, box=box)
    if missing > _NAMED_MAX:
        problem = f"{missing - _NAMED_MAX} more chunks are not there: of {count} {len(found)} are stored"
        yield Finding(path=item.url, problem=problem, item=name, leaf=leaf.name)


def _box(index: _Index, grid: ChunkGrid, leaf: LeafInfo) -> Box:
    assert leaf.shape is not None
    start = tuple(i * rows for i, rows in zip(index, grid.chunk, strict=True))
    stop = tuple(min(a + rows, size) for a, rows, size in zip(start, grid.chunk, leaf.shape, strict=True))
    return Box(start, stop)


def _cells(chunk: Box, cell: _Index) -> Iterator[Box]:
    """The parts of a chunk that are read whole: itself, or the chunks in a shard."""
    for part in blocks_of(chunk.shape, cell):
        yield Box(tuple(map(add, chunk.start, part.start)), tuple(map(add, chunk.start, part.stop)))
