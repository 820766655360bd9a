"""Private names of Orbax's newer API (v1): its checks of arguments, its active context, and its choice of handlers."""

from __future__ import annotations

from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental.v1._src.context import context as contexts
from orbax.checkpoint.experimental.v1._src.deletion import validation as deletion
from orbax.checkpoint.experimental.v1._src.handlers import json_handler, pytree_handler, registration, resolution
from orbax.checkpoint.experimental.v1._src.loading import validation as loading
from orbax.checkpoint.experimental.v1._src.saving import validation as saving
from orbax.checkpoint.experimental.v1._src.serialization import options_resolution

# Orbax's own checks of arguments: ValueError or TypeError for what it does not save, or does not load into.
check_state = saving.validate_state
check_checkpointables = saving.validate_save_checkpointables
check_abstract_state = loading.validate_abstract_state
check_abstract_checkpointables = loading.validate_abstract_checkpointables

# The context of the `with` block that the caller is in, else the argument.
active_context = contexts.get_context


def check_deletion(step: Any, checkpointable_name: Any, missing_ok: Any) -> None:
    """Raises TypeError or ValueError for what names no step or no checkpointable."""
    deletion.validate_step(step)
    deletion.validate_arguments(checkpointable_name, missing_ok)


def handler_to_save(context: contexts.Context, name: str, checkpointable: Any) -> Any:
    """The handler of Orbax that saves a checkpointable. Raises ValueError where no handler takes it."""
    registry = context.checkpointables_options.registry
    return registration.resolve_handler_for_save(registry, checkpointable, name=name)


def handler_to_load(context: contexts.Context, name: str, abstract: Any, recorded: str | None) -> Any:
    """The handler of Orbax that loads into `abstract`; `recorded` is the one that the step names."""
    registry = context.checkpointables_options.registry
    return resolution._resolve_single_handler_for_load(name, registry, abstract, recorded)


def is_tree_handler(handler: Any) -> bool:
    """Whether it is Orbax's own handler of trees."""
    return type(handler) is pytree_handler.PyTreeHandler


def is_json_handler(handler: Any) -> bool:
    """Whether it is Orbax's own handler of JSON, with its usual file."""
    return type(handler) is json_handler.JsonHandler and handler._filename == json_handler._DATA_FILENAME


def is_registered(context: contexts.Context, name: str) -> bool:
    """Whether the caller registered a handler for this name."""
    return context.checkpointables_options.registry.has(name)


def stored_as(context: contexts.Context, tree: Any) -> Any:
    """The `SaveArgs` of a tree with the dtypes and chunks that the context's storage options ask for."""

    def wish(path: Any, leaf: Any) -> ocp.SaveArgs:
        found = options_resolution.resolve_storage_options(path, leaf, context.array_options.saving)
        dtype = None if found.dtype is None else jax.numpy.dtype(found.dtype)
        return ocp.SaveArgs(dtype=dtype, chunk_byte_size=found.chunk_byte_size)

    return jax.tree_util.tree_map_with_path(wish, tree)
