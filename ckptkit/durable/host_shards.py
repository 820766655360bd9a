"""A leaf that is what this process writes of one global array, and the Orbax handler that writes it.

The handler presents itself as `jax.Array`, so stock Orbax restores the result as an ordinary array on any mesh.
It launches no device work and no collective, and may run on any thread.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint import future as orbax_future
from orbax.checkpoint import type_handlers

from ckptkit import layout
from ckptkit.manifest import LeafRecord
from ckptkit.sharding import Box


@dataclass(eq=False, slots=True, kw_only=True)
class HostShards:
    """The boxes of one leaf that this process writes: disjoint over all processes, whole cells each.

    `blocks` are views of host memory that must not change until the save has finished. `sidecar` is what this
    process records of the whole item, and `on_written` is called once its bytes are written and before Orbax
    commits the item: the same two objects on every leaf of an item.
    """

    record: LeafRecord
    blocks: list[tuple[Box, np.ndarray]]
    sidecar: bytes
    on_written: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes of the leaf."""
        return sum(block.nbytes for _, block in self.blocks)


def has_host_shards(args: Any) -> bool:
    """Whether save arguments are a tree with `HostShards`, so that a sidecar is written with it."""
    return any(isinstance(leaf, HostShards) for leaf in jax.tree.leaves(getattr(args, "item", None)))


class HostShardsHandler(type_handlers.TypeHandler):
    """Writes `HostShards` as zarr arrays in one OCDBT transaction per process (so a bucket sees one commit)."""

    def typestr(self) -> str:
        """What stock Orbax takes the leaves for."""
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Any:
        """Metadata is read by stock Orbax's own handler, never through this one."""
        raise TypeError("HostShards are written, never read: restore through jax.Array")

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        """Arrays are read by `DurableReader` or stock Orbax's own handler, never through this one."""
        raise TypeError("HostShards are written, never read: restore through jax.Array")

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Any:
        """Starts the write; Orbax waits for the future before it commits the item."""
        write = self._write(values, infos, args or [None] * len(values))
        return [orbax_future.CommitFutureAwaitingContractedSignals(write, name="ckptkit_host_shards")]

    async def _write(self, values: Sequence[HostShards], infos: Sequence[Any], args: Sequence[Any]) -> None:
        for info in infos:
            await info.await_path_creation()
        directory = infos[0].parent_dir
        transaction = ts.Transaction(atomic=True)
        chunks = await asyncio.gather(
            *(_write_leaf(value, info, arg, transaction) for value, info, arg in zip(values, infos, args, strict=True))
        )
        await asyncio.to_thread(write_side_files, directory, values, infos, chunks)
        await transaction.commit_async()
        values[0].on_written()


async def _write_leaf(value: HostShards, info: Any, arg: Any, transaction: ts.Transaction) -> list[int]:
    record, process = value.record, jax.process_index()
    spec = type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=record.shape,
        local_shape=record.cell,
        dtype=np.dtype(record.dtype),
        process_index=process,
        arg=arg,
    )
    chunk = list(spec["metadata"]["chunks"])
    if tuple(chunk) != record.cell:
        raise ValueError(f"leaf {record.name}: Orbax chose chunks of {chunk} where cells of {record.cell} were given")
    opening = {"open": True, "context": info.ts_context, "transaction": transaction}
    if process == 0:  # only process 0 writes .zarray
        await ts.open(ts.Spec(spec), create=True, **opening)
    array = await ts.open(ts.Spec(spec), assume_metadata=True, **opening)
    for box, block in value.blocks:
        await array[box.slices()].write(block, can_reference_source_data_indefinitely=True)
    return chunk


def write_side_files(
    directory: Any, values: Sequence[HostShards], infos: Sequence[Any], chunks: Sequence[list[int]]
) -> None:
    """Two files of Orbax's own (without them typed keys and shardings are lost), and our sidecar.

    Of `infos` only the names are looked at.
    """
    process = jax.process_index()
    metadatas = [
        {
            "array_metadata": {
                "param_name": info.name,
                "write_shape": list(value.record.cell),
                "chunk_shape": chunk,
                "ext_metadata": {"random_key_impl": impl} if (impl := value.record.extra.get("key_impl")) else None,
            }
        }
        for value, info, chunk in zip(values, infos, chunks, strict=True)
    ]
    # Orbax reads the one key. The other says that a sidecar belongs to the item, wherever that is.
    written = {"array_metadatas": metadatas, layout.SIDECAR_SIGN: True}
    _write_text(directory / "array_metadatas", f"process_{process}", json.dumps(written))
    if process == 0:
        shardings = {
            base64.urlsafe_b64encode(info.name.encode()).decode(): value.record.extra["sharding"]
            for value, info in zip(values, infos, strict=True)
            if "sharding" in value.record.extra
        }
        if shardings:
            (directory / "_sharding").write_text(json.dumps(shardings))
    _write_text(directory / layout.SIDECAR_DIR, layout.sidecar_name(process), values[0].sidecar.decode())


def _write_text(directory: Any, name: str, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)  # every process: on a bucket there are no directories to wait for
    (directory / name).write_text(text)
