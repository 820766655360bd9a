"""Writes an Orbax item from tensors that are read block by block. Each cell is digested before it is written. Orbax's
own files are made by the durable tier's writer, and a sidecar holds the digests of the cells."""

from __future__ import annotations

from typing import Any

import jax

from ckptkit.conversion.destination import Destination
from ckptkit.conversion.item_writer import ItemWriter, Work, side_files
from ckptkit.conversion.mapping import Tensors
from ckptkit.conversion.passes import BytesProgress, block_shape, blocks_of, counted, pieces_of
from ckptkit.durable.cells.writer import can_hold
from ckptkit.durable.orbax.files import tree_text
from ckptkit.durable.orbax.host_shards import HostShards
from ckptkit.durable.orbax.shardings import sharding_text
from ckptkit.errors import CheckpointError
from ckptkit.formats.tensors import CELL_SHARE, Tensor, block_bytes
from ckptkit.model import paths
from ckptkit.model.boxes import cell_shape
from ckptkit.model.manifest import LeafRecord, SaveId, Writer

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
    writer = ItemWriter(target, "", item, list(target.journal.entries()), memory_bytes, describes=True)
    writer.write(records.values(), works, count)
    proven = [writer.written(record, ()) for record in records.values()]
    save_id = SaveId(0, paths.step_of_name(item) or 0, 0)
    files = side_files(item, proven, save_id, Writer(process=0, count=1, host=HOST), {}, provable=True)
    files[paths.TREE_METADATA] = tree_text(_tree(proven))
    target.put((name, text.encode()) for name, text in files.items())


def works_of(
    tensor: Tensor, record: LeafRecord, *, memory_bytes: int, block: tuple[int, ...] | None = None
) -> list[Work]:
    """The blocks in which a tensor becomes the cells of `record`; `block` where their shape is known already."""
    size = record.itemsize
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
        shards = HostShards(record=record, blocks=[], sidecar=b"", on_written=lambda: None)
        if not record.path:  # the tree is one array: `require_tree` allows no other leaf then
            return shards
        *above, last = record.path
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = shards
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
