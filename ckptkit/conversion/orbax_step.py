"""Writes an Orbax item from tensors that are read block by block: Orbax's own files by the durable tier's writer, then
the cells, each digested as it is written, then the sidecar that proves them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ckptkit.conversion.mapping import Tensors
from ckptkit.durable import HostShards
from ckptkit.durable.cells import CellStream
from ckptkit.durable.host_shards import write_side_files
from ckptkit.durable.orbax_files import TREE_METADATA, tree_text
from ckptkit.durable.shardings import sharding_text
from ckptkit.errors import CheckpointError
from ckptkit.formats.tensors import Tensor, block_bytes
from ckptkit.inspection.directories import step_of_name
from ckptkit.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer, digest_of
from ckptkit.sharding import Box, cell_shape, cells_of
from ckptkit.store.local import sync_directory

_DTYPES = frozenset(
    ["bool", "bfloat16", "complex64", "complex128", "int4", *(f"float{bits}" for bits in (16, 32, 64))]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz")]
)  # of TensorStore's zarr driver
HOST = "ckptkit-convert"  # in the sidecar, where a job has the name of its host


def write_step(
    tensors: Tensors,
    item: Path,
    *,
    memory_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """An item directory that stock Orbax restores as a tree of the names, split at dots, and that `verify` proves.

    Every leaf is an array: sequences become mappings from "0", "1", ..., numbers arrays of no dimensions. Cost: every
    tensor is read once where the cells lie along its own chunks. Nothing is synced until all is written.
    """
    records = {name: _record(tensor, name, memory_bytes) for name, tensor in tensors.items()}
    _check_names(records)
    item.mkdir(parents=True)
    writer = CellStream(str(item), memory_bytes // 4)
    total, written = sum(tensor.nbytes for tensor in tensors.values()), 0
    proven = []
    for name, tensor in tensors.items():
        proven.append(_written(writer, tensor, records[name]))
        written += tensor.nbytes
        if progress is not None:
            progress(written, total)
    writer.finish()
    _write_metadata(item, proven)
    _sync(item)
    return item


def _write_metadata(item: Path, records: list[LeafRecord]) -> None:
    """Orbax's description of the tree, and our sidecar."""
    manifest = Manifest(
        save_id=SaveId(0, step_of_name(item.name) or 0, 0),
        writer=Writer(process=0, count=1, host=HOST),
        slot="",
        arrays={item.name: tuple(records)},
        inline={},
    )
    values = [HostShards(record=r, blocks=[], sidecar=manifest.to_bytes(), on_written=_nothing) for r in records]
    (item / TREE_METADATA).write_text(tree_text(_tree(values)))
    write_side_files(item, values)


def _tree(values: list[HostShards]) -> Any:
    tree: dict[str, Any] = {}
    for value in values:
        *above, last = value.record.path
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _nothing() -> None:
    """Nobody waits for it."""


def _check_names(records: Mapping[str, LeafRecord]) -> None:
    paths = {record.path for record in records.values()}
    for name, record in records.items():
        above = [record.path[:depth] for depth in range(1, len(record.path)) if record.path[:depth] in paths]
        if above or "" in record.path:
            raise CheckpointError(f"{name} cannot be a leaf of a tree: a part of its name is empty, or names a leaf")


def _record(tensor: Tensor, name: str, memory_bytes: int) -> LeafRecord:
    path = tensor.leaf.path if ".".join(tensor.leaf.path) == name else tuple(name.split("."))
    if tensor.dtype.name not in _DTYPES:
        raise CheckpointError(f"{name} is {tensor.dtype}, which zarr has no word for; give --dtype, or another format")
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


def _written(writer: CellStream, tensor: Tensor, record: LeafRecord) -> LeafRecord:
    """The record with its digests. Blocks are read in the order of the cells, several cells at once where they fit."""
    writer.create(record)
    digests = []
    for cell in cells_of(Box.whole(record.shape), record.cell):
        block = tensor.read(cell)
        digests.append(digest_of(block.reshape(-1).view(np.uint8)))
        writer.write(record, cell, block)
    return dataclasses.replace(record, boxes=(_box(record, digests),))


def _box(record: LeafRecord, digests: list[str]) -> BoxRecord:
    return BoxRecord(box=Box.whole(record.shape), offset=-1, digests=tuple(digests))


def _sync(item: Path) -> None:
    for directory, _, files in os.walk(item):
        for name in files:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        sync_directory(directory)
