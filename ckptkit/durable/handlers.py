"""Orbax's handlers for our own steps: those that write where Orbax has to, and the names of those that read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from ckptkit.durable.host_shards import HostShardsHandler
from ckptkit.durable.host_tree import StandardTreeSave
from ckptkit.durable.shards import HostShards
from ckptkit.durable.stock import QuietLogger, delete_mark_first


class _StandardTreeHandler(ocp.PyTreeCheckpointHandler):
    """Writes what Orbax's handler for `StandardSave` writes, and goes by its name in the step's metadata."""

    @classmethod
    def typestr(cls) -> str:
        """The name of Orbax's own handler."""
        return ocp.StandardCheckpointHandler.typestr()


def handler_name(item: Any) -> str:
    """The handler of Orbax that reads an item, as the step's metadata names it."""
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
    writer = ocp.CheckpointManager(
        url, options=options, handler_registry=_handlers_of_writer(multiprocessing), logger=QuietLogger()
    )
    delete_mark_first(writer)
    return writer


def _handlers_of_writer(multiprocessing: Any) -> Any:
    """`HostShards` beside what Orbax knows."""
    types = type_handlers.create_type_handler_registry(
        (int, type_handlers.ScalarHandler()),
        (float, type_handlers.ScalarHandler()),
        (str, type_handlers.StringHandler()),
        (np.number, type_handlers.ScalarHandler()),
        (np.ndarray, type_handlers.NumpyHandler()),
        (HostShards, HostShardsHandler()),
        (jax.Array, type_handlers.get_type_handler(jax.Array)),  # last: restores, and write shapes in the metadata
    )
    settings: Any = {
        "multiprocessing_options": multiprocessing,
        "type_handler_registry": types,
        "use_compression": False,
    }
    json_handler = ocp.JsonCheckpointHandler(multiprocessing_options=multiprocessing)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(None, ocp.args.PyTreeSave, ocp.PyTreeCheckpointHandler(**settings))
    registry.add(None, StandardTreeSave, _StandardTreeHandler(**settings))
    registry.add(None, ocp.args.JsonSave, json_handler)
    registry.add(None, ocp.args.JsonRestore, json_handler)
    return registry
