"""Orbax's handlers for our own steps: those that write where Orbax has to, and the names of those that read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import future as orbax_future
from orbax.checkpoint import type_handlers
from orbax.checkpoint.checkpoint_manager import CheckpointManager as OrbaxManager  # `patch_orbax` replaces `ocp`'s

from ckptkit.durable.orbax import files as orbax_files
from ckptkit.durable.orbax.file_items import FilesSave
from ckptkit.durable.orbax.host_shards import HostShards, HostTreeSave, StandardTreeSave, shards_of
from ckptkit.durable.orbax.manager import QuietLogger, delete_mark_first, strike_foreign
from ckptkit.model import paths


class HostShardsHandler(type_handlers.TypeHandler):
    """Writes `HostShards` as zarr arrays in one OCDBT transaction per process (so a bucket sees one commit)."""

    def typestr(self) -> str:
        """The kind of leaves as stock Orbax sees them."""
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
        await asyncio.gather(
            *(_write_leaf(value, info, arg, transaction) for value, info, arg in zip(values, infos, args, strict=True))
        )
        await asyncio.to_thread(write_side_files, directory, values, values[0].sidecar)
        await transaction.commit_async()
        values[0].on_written()


async def _write_leaf(value: HostShards, info: Any, arg: Any, transaction: ts.Transaction) -> None:
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


def write_side_files(directory: Any, values: Sequence[HostShards], sidecar: bytes) -> None:
    """Two files of Orbax's own (without them typed keys and shardings are lost), and our sidecar."""
    process = jax.process_index()
    array_metadatas = orbax_files.array_metadatas_text(values, has_sidecar=True)
    _write_text(directory / paths.ARRAY_METADATAS, f"process_{process}", array_metadatas)
    if process == 0 and (shardings := orbax_files.shardings_text(values)) is not None:
        (directory / paths.SHARDINGS).write_text(shardings)
    _write_sidecar(directory, sidecar)


def _write_sidecar(directory: Any, sidecar: bytes) -> None:
    _write_text(directory / paths.SIDECAR_DIR, paths.sidecar_name(jax.process_index()), sidecar.decode())


def _write_text(directory: Any, name: str, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)  # every process: a bucket has no directories to wait for
    (directory / name).write_text(text)


class HostTreeHandler(ocp.PyTreeCheckpointHandler):
    """Writes a tree of host memory (`HostTreeSave`), with sidecars. Plain leaves are Orbax's, and a tree of nothing
    else has a sidecar too."""

    def __init__(self, multiprocessing: Any):
        super().__init__(**_settings(multiprocessing))

    @classmethod
    def typestr(cls) -> str:
        """The name of Orbax's own handler, for the step's metadata."""
        return ocp.PyTreeCheckpointHandler.typestr()

    async def async_save(self, directory: Any, args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Starts the writes; Orbax waits for the futures before it commits the directory."""
        futures = list(await super().async_save(directory, args=args) or [])
        if not shards_of(args.item):
            write = asyncio.to_thread(_write_sidecar, directory, args.sidecar)
            futures.append(orbax_future.CommitFutureAwaitingContractedSignals(write, name="ckptkit_sidecar"))
        return futures

    def finalize(self, directory: Any) -> None:
        """On one process, before the directory is committed."""
        super().finalize(directory)
        write_sidecar_sign(directory)


class _StandardTreeHandler(HostTreeHandler):
    """The same for a tree that the caller saved with `StandardSave`."""

    @classmethod
    def typestr(cls) -> str:
        """The name of Orbax's own handler, for the step's metadata."""
        return ocp.StandardCheckpointHandler.typestr()


def write_sidecar_sign(directory: Any) -> None:
    """Marks a tree without jax arrays as one with sidecars, once Orbax has finished it. Orbax's own checks refuse the
    file with this mark in a tree without arrays."""
    if (directory / paths.SIDECAR_DIR).exists() and not (directory / paths.ARRAY_METADATAS).exists():
        sign = orbax_files.array_metadatas_text((), has_sidecar=True)
        _write_text(directory / paths.ARRAY_METADATAS, "process_0", sign)


def handler_name(item: Any) -> str:
    """The handler of Orbax that reads an item, as the step's metadata names it."""
    if isinstance(item, FilesSave):
        return item.handler
    if isinstance(item, StandardTreeSave):
        return ocp.StandardCheckpointHandler.typestr()
    return (ocp.JsonCheckpointHandler if isinstance(item, ocp.args.JsonSave) else ocp.PyTreeCheckpointHandler).typestr()


def make_writer(url: str, options: ocp.CheckpointManagerOptions, multiprocessing: Any) -> ocp.CheckpointManager:
    """A manager of Orbax's that writes our steps where Orbax has to: synchronous, on the thread that makes it."""
    options = dataclasses.replace(
        options,
        enable_async_checkpointing=False,
        async_options=dataclasses.replace(options.async_options, post_finalization_callback=None),  # pyright: ignore[reportArgumentType]
        cleanup_tmp_directories=False,
        save_root_metadata=False,
    )
    writer = OrbaxManager(
        url, options=options, handler_registry=_handlers_of_writer(multiprocessing), logger=QuietLogger()
    )
    delete_mark_first(writer)
    strike_foreign(writer)
    return writer


def _handlers_of_writer(multiprocessing: Any) -> Any:
    json_handler = ocp.JsonCheckpointHandler(multiprocessing_options=multiprocessing)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(None, HostTreeSave, HostTreeHandler(multiprocessing))
    registry.add(None, StandardTreeSave, _StandardTreeHandler(multiprocessing))
    registry.add(None, ocp.args.JsonSave, json_handler)
    registry.add(None, ocp.args.JsonRestore, json_handler)
    return registry


def _settings(multiprocessing: Any) -> dict[str, Any]:
    """For a handler that writes `HostShards` in addition to Orbax's types."""
    types = type_handlers.create_type_handler_registry(
        (int, type_handlers.ScalarHandler()),
        (float, type_handlers.ScalarHandler()),
        (str, type_handlers.StringHandler()),
        (np.number, type_handlers.ScalarHandler()),
        (np.ndarray, type_handlers.NumpyHandler()),
        (HostShards, HostShardsHandler()),
        (jax.Array, type_handlers.get_type_handler(jax.Array)),  # last: restores, and write shapes in the metadata
    )
    return {
        "multiprocessing_options": multiprocessing,
        "type_handler_registry": types,
        "use_compression": False,
    }
