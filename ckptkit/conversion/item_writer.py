"""Array items of an Orbax step, written block by block within a budget: read ahead, digested, committed in portions.
Orbax's own files are made by the durable tier's writer, and a sidecar holds the digests of the cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import jax
import numpy as np

from ckptkit.conversion.destination import Destination
from ckptkit.conversion.journal import LOCK_SUFFIX, Noted, data_prefix
from ckptkit.conversion.mapping import Tensors
from ckptkit.conversion.passes import BytesProgress, block_shape, counted, read_ahead
from ckptkit.durable.cells.writer import CellStream, can_hold
from ckptkit.durable.orbax.files import process_files, tree_files
from ckptkit.durable.orbax.host_shards import HostShards, shards_of
from ckptkit.durable.orbax.shardings import sharding_text
from ckptkit.errors import CheckpointError
from ckptkit.formats.tensors import CELL_SHARE, Tensor, block_bytes
from ckptkit.model import paths
from ckptkit.model.boxes import Box, blocks_of, boxes_of_cells, cell_shape, cells_of, pieces_of
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.restore.tree import put_at
from ckptkit.store import open_store
from ckptkit.store.backends import properties_of
from ckptkit.store.local import sync_tree

Cells = list[tuple[Box, np.ndarray, str]]

_COMMIT_SHARE = 8  # of the budget: what one commit has, and what is read ahead of it
_AHEAD_MAX = 16  # blocks
_LISTED_FILES = 256  # that are listed after each commit; of more, after one commit for each so many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A block of one leaf: a whole number of the cells of `record`, which has the cells of the target and no boxes.

    `pieces` are the parts in which it is read.
    """

    tensor: Tensor
    record: LeafRecord
    block: Box
    pieces: tuple[Box, ...]


@final
class ItemWriter:
    """The part of one item that one process writes. Cells that the journal lists as written are not written again.

    Memory: half of the budget is what waits for its commit and what is read ahead meanwhile, the rest what is being
    read.
    """

    def __init__(
        self, target: Destination, prefix: str, item: str, noted: Sequence[Any], memory_bytes: int, *, describes: bool
    ):
        """`prefix` is what the keys of the database begin with below the target."""
        self._item = item
        self._prefix = prefix
        self._directory = directory = f"{target.url}/{prefix}".rstrip("/")
        self._ahead_bytes = memory_bytes // _COMMIT_SHARE
        self._journal = target.journal
        self._known: dict[str, Noted] = {}  # files that are noted
        self._commits = 0  # since they were listed
        self._fresh: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        self._digests: dict[str, dict[tuple[int, ...], str]] = {}
        # A commit that waits for its own sync leaves the disk idle while the next cells are read.
        self._syncing = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-sync")
        self._synced: set[tuple[int, ...]] = set()
        self._notes: list[Future[None]] = []
        self._stream = CellStream(
            directory,
            memory_bytes // _COMMIT_SHARE,
            on_commit=self._note,
            describes=describes,
            synced=False,
            continues=bool(noted),
            data_prefix=data_prefix(target.journal.work),
        )
        for entry in noted:
            if entry["item"] == item:
                for name, cells in entry["cells"].items():
                    self._digests.setdefault(name, {}).update((tuple(start), digest) for start, digest in cells)

    def write(self, records: Iterable[LeafRecord], works: Sequence[Work], progress: Callable[[int], None]) -> None:
        """Describes all `records`, writes `works`, and syncs; `progress` is told the bytes of each."""
        # As much as a commit takes is read while it is under way.
        ahead = self._ahead_bytes // max(1, *map(_bytes, works), self._ahead_bytes // _AHEAD_MAX)
        try:
            for record in records:
                self._stream.create(record)
            for work, cells in read_ahead(_read, self._left(works, progress), max(1, ahead)):
                for cell, block, digest in cells:
                    self._fresh.setdefault(work.record.name, []).append((cell.start, digest))
                    self._stream.write(work.record, cell, block)
                progress(_bytes(work))
            self._stream.finish()
        finally:
            self._syncing.shutdown()
        for note in self._notes:
            note.result()

    def written(self, record: LeafRecord, blocks: Iterable[Box]) -> LeafRecord:
        """The record with the boxes that this process wrote, and their digests."""
        known = self._digests.get(record.name, {})
        whole = Box.whole(record.shape)
        areas = [whole] if len(known) == len(cells_of(whole, record.cell)) else blocks
        found = [
            BoxRecord(box=box, offset=-1, digests=tuple(known[cell.start] for cell in cells_of(box, record.cell)))
            for area in areas
            for box in boxes_of_cells(area, record.cell)
        ]
        return dataclasses.replace(record, boxes=tuple(found))

    def _left(self, works: Iterable[Work], progress: Callable[[int], None]) -> Iterator[Work]:
        for work in works:
            known = self._digests.get(work.record.name, {})
            if known and all(cell.start in known for cell in cells_of(work.block, work.record.cell)):
                progress(_bytes(work))
            else:
                yield work

    def _note(self) -> None:
        """After a commit: what it holds is noted once it is synced, in the background."""
        for name, cells in self._fresh.items():
            self._digests.setdefault(name, {}).update(cells)
        self._notes.append(self._syncing.submit(self._safe, self._fresh))
        self._fresh = {}

    def _safe(self, cells: Mapping[str, Any]) -> None:
        if properties_of(self._directory).file_system:
            sync_tree(self._directory, self._synced)
        if cells:
            self._journal.add({"item": self._item, "cells": cells, "files": self._new_files()})

    def _new_files(self) -> dict[str, Any]:
        """The files of the database that are new or changed since the last time: names with sizes and versions.

        With many files they are listed less often, so that the cost is linear.
        """
        self._commits += 1
        if self._commits <= len(self._known) // _LISTED_FILES:
            return {}
        self._commits = 0
        stats = open_store(self._directory).stat_all("")
        found = {
            f"{self._prefix}{key}": Noted(size=stat.size_bytes, version=stat.version)
            for key, stat in stats.items()
            if key.startswith(data_prefix(self._journal.work)) and not key.endswith(LOCK_SUFFIX)
        }
        new = {key: dataclasses.asdict(each) for key, each in found.items() if self._known.get(key) != each}
        self._known = found
        return new


def _read(work: Work) -> Cells:
    """The cells of a block, each contiguous, with its digest."""
    cells = cells_of(work.block, work.record.cell)
    if len(work.pieces) == 1:
        data = work.tensor.read(work.block)
        found = [(cells[0], data)]
        if len(cells) > 1:  # whole rows of the block are not copied
            found = [(cell, np.ascontiguousarray(data[cell.slices(work.block.start)])) for cell in cells]
    else:
        found = [(cell, np.empty(cell.shape, work.tensor.dtype)) for cell in cells]
        for piece in work.pieces:
            data = work.tensor.read(piece)
            for cell, block in found:
                common = cell.intersect(piece)
                if common is not None:
                    block[common.slices(cell.start)] = data[common.slices(piece.start)]
    return [(cell, block, digest_of(block.reshape(-1).view(np.uint8))) for cell, block in found]


def _bytes(work: Work) -> int:
    return work.block.size * work.record.itemsize


HOST = "ckptkit-convert"  # in the sidecar, where a job has the name of its host


def write_step(
    tensors: Tensors,
    target: Destination,
    *,
    memory_bytes: int,
    progress: BytesProgress | None = None,
) -> None:
    """An item directory that stock Orbax restores as a tree of the names, split at dots, and that `verify` proves.

    Every leaf is an array: sequences become mappings from "0", "1", ..., numbers become arrays without dimensions.
    Cost: every tensor is read once if the cells match its own chunks. Cells that the journal lists are not written
    again.
    """
    item = target.url.rpartition("/")[2]
    records = {name: _record(tensor, name, memory_bytes) for name, tensor in tensors.items()}
    works = [
        work for name, record in records.items() for work in works_of(tensors[name], record, memory_bytes=memory_bytes)
    ]
    count = counted(sum(tensor.nbytes for tensor in tensors.values()), progress)
    cells = ItemWriter(target, "", item, list(target.journal.entries()), memory_bytes, describes=True)
    cells.write(records.values(), works, count)
    proven = [cells.written(record, ()) for record in records.values()]
    save_id = SaveId(0, paths.step_of_name(item) or 0, 0)
    writer = Writer(process=0, count=1, host=HOST)
    sidecar = Manifest(save_id=save_id, writer=writer, slot="", arrays={item: tuple(proven)}, inline={})
    tree = _tree(proven)
    files = process_files(shards_of(tree), 0, sidecar.to_bytes()) | tree_files(tree)
    target.put(files.items())


def works_of(
    tensor: Tensor, record: LeafRecord, *, memory_bytes: int, block: tuple[int, ...] | None = None
) -> list[Work]:
    """The blocks in which a tensor becomes the cells of `record`; `block` where their shape is known already."""
    size = tensor.widest_bytes
    source = tuple(max(1, rows) for rows in tensor.leaf.cell) if tensor.leaf.cell else (1,) * len(record.shape)
    budget, handy = memory_bytes // CELL_SHARE // size, block_bytes(memory_bytes) // size
    if block is None:
        block = block_shape(record.shape, source, record.cell, budget, handy)
    return [
        Work(tensor=tensor, record=record, block=each, pieces=tuple(pieces_of(each, source, handy)))
        for each in blocks_of(record.shape, block)
    ]


def _tree(records: list[LeafRecord]) -> Any:
    tree: dict[str, Any] = {}
    for record in records:
        shards = HostShards(record=record, blocks=[])
        if not record.path:  # the tree is one array: `require_tree` allows no other leaf then
            return shards
        put_at(tree, record.path, shards)
    return tree


def require_tree(tensors: Tensors) -> None:
    """Raises `CheckpointError` for names that do not form a tree, and for dtypes that zarr lacks."""
    paths = {name: _path(tensor, name) for name, tensor in tensors.items()}
    leaves = set(paths.values())
    for name, path in paths.items():
        if "" in path or any(path[:depth] in leaves for depth in range(len(path))):
            raise CheckpointError(f"{name} cannot be a leaf of a tree: a part of its name is empty, or names a leaf")
        dtype = tensors[name].dtype
        if not can_hold(dtype.name):
            raise CheckpointError(
                f"{name} is {dtype}, which TensorStore's zarr cannot hold; give --dtype or another --to"
            )


def _path(tensor: Tensor, name: str) -> tuple[str, ...]:
    return tensor.leaf.path if ".".join(tensor.leaf.path) == name else tuple(name.split("."))


def _record(tensor: Tensor, name: str, memory_bytes: int) -> LeafRecord:
    path = _path(tensor, name)
    key = {"key_impl": tensor.leaf.key_impl} if tensor.leaf.key_impl else {}
    # Without one stock Orbax refuses to restore unless it is told where to.
    sharding = sharding_text(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return LeafRecord(
        path=path,
        keys="d" * len(path),
        kind="jax",
        shape=tensor.shape,
        dtype=tensor.dtype.name,
        cell=cell_shape(tensor.shape, tensor.shape, tensor.dtype.itemsize, block_bytes(memory_bytes)),
        extra={**key, **({} if sharding is None else {"sharding": sharding})},
    )
