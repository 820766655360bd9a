"""From checkpointables, and abstract ones, to the arguments of `CheckpointManager`: as Orbax's v1 resolves handlers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1 as orbax_v1

from ckptkit.durable.orbax.v1 import HandledRestore, HandledSave, TreeRestore, TreeSave
from ckptkit.manager.catalog import RecordedItems
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.v1 import orbax_private
from ckptkit.v1.context import restored_by_orbax, saved_by_orbax

METRICS = "metrics"  # a checkpointable that Orbax keeps for itself
_GRAIN = "grain."  # in the name of the handler of Grain's iterators


def save_args(context: orbax_v1.Context, checkpointables: Mapping[str, Any], profile: DurableProfile) -> Any:
    """The arguments that save them. Raises what Orbax raises for what no handler takes, with what to do."""
    by_orbax = saved_by_orbax(context, profile)
    with context:  # handlers take it from there
        found = {name: _save_arg(context, name, value, by_orbax) for name, value in checkpointables.items()}
    return ocp.args.Composite(**found)


def restore_args(
    context: orbax_v1.Context, abstract: Mapping[str, Any] | None, recorded: RecordedItems, profile: DurableProfile
) -> Any:
    """The arguments that restore them, or None where the manager restores all that the step has by itself."""
    handlers = recorded.handlers
    by_orbax = restored_by_orbax(context, profile)
    with context:
        if abstract is None:
            if not by_orbax and all(_is_common(context, name, handler) for name, handler in handlers.items()):
                return None
            abstract = dict.fromkeys(name for name in recorded.items if name != METRICS)
        found = {
            name: _restore_arg(context, name, value, handlers.get(name), by_orbax) for name, value in abstract.items()
        }
    return ocp.args.Composite(**found)


def _save_arg(context: orbax_v1.Context, name: str, value: Any, by_orbax: bool) -> Any:
    if _is_grain(value) and not orbax_private.is_registered(context, name):
        from grain import checkpoint

        return checkpoint.CheckpointSave(value)
    try:
        handler = orbax_private.handler_to_save(context, name, value)
    except (KeyError, ValueError) as error:
        error.add_note(
            f"checkpointable {name!r} is a {type(value).__name__}; give a tree of arrays, numbers and text, a Grain "
            "iterator, a StatefulCheckpointable, or register a CheckpointableHandler: context.checkpointables.registry"
        )
        raise
    if orbax_private.is_json_handler(handler):
        return ocp.args.JsonSave(value)  # pyright: ignore[reportCallIssue]
    if not orbax_private.is_tree_handler(handler):
        return HandledSave(value, handler)  # pyright: ignore[reportCallIssue]
    chunk_bytes = context.array.saving.storage_options.chunk_byte_size
    stored_as = orbax_private.stored_as(context, value) if by_orbax or chunk_bytes is not None else None
    if not by_orbax and _is_standard(value):
        return ocp.args.StandardSave(value, stored_as)
    return TreeSave(value, stored_as, handler=handler, by_handler=by_orbax)  # pyright: ignore[reportCallIssue]


def _restore_arg(context: orbax_v1.Context, name: str, value: Any, recorded: str | None, by_orbax: bool) -> Any:
    of_grain = recorded is None or recorded.startswith(_GRAIN)
    if _is_grain(value) and of_grain and not orbax_private.is_registered(context, name):
        from grain import checkpoint

        return checkpoint.CheckpointRestore(value)
    handler = orbax_private.handler_to_load(context, name, value, recorded)
    if orbax_private.is_json_handler(handler):
        return ocp.args.JsonRestore()  # pyright: ignore[reportCallIssue]
    if not orbax_private.is_tree_handler(handler):
        return HandledRestore(value, handler)  # pyright: ignore[reportCallIssue]
    partial = context.pytree.loading.partial_load
    return TreeRestore(value, strict=not by_orbax, handler=handler, partial=partial)  # pyright: ignore[reportCallIssue]


def _is_standard(tree: Any) -> bool:
    """Whether Orbax's handler of v0 for standard trees takes it: no text, and no leaf that is the whole tree."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    return treedef.num_nodes > 1 and not any(isinstance(leaf, str) for leaf in leaves)


def _is_common(context: orbax_v1.Context, name: str, recorded: str) -> bool:
    """Whether the manager restores an item without being asked for it by name."""
    if recorded.startswith(_GRAIN):
        return True
    handler = orbax_private.handler_to_load(context, name, None, recorded)
    return orbax_private.is_tree_handler(handler) or orbax_private.is_json_handler(handler)


def _is_grain(value: Any) -> bool:
    """Whether a value is an iterator of Grain's, or derived from one, like `ElasticBatches`."""
    is_iterator = hasattr(value, "get_state") and hasattr(value, "set_state")
    return is_iterator and any(base.__module__.split(".")[0] == "grain" for base in type(value).__mro__)
