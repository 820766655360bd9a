"""Private names of Orbax's newer API (v1): its arguments and checks of them, its active context and its handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental.v1._src.context import context as contexts
from orbax.checkpoint.experimental.v1._src.deletion import validation as deletion
from orbax.checkpoint.experimental.v1._src.handlers import (
    compatibility,
    json_handler,
    pytree_handler,
    registration,
    resolution,
)
from orbax.checkpoint.experimental.v1._src.loading import validation as loading
from orbax.checkpoint.experimental.v1._src.saving import validation as saving
from orbax.checkpoint.experimental.v1._src.serialization import options_resolution

NEWER_HANDLER = ".experimental.v1."  # in the names of the handlers that a step records


@dataclass
class TreeSave(ocp.args.PyTreeSave):
    """A tree that fast tiers hold as any other. `handler` writes it to the durable tier, with `by_handler` or where we
    cannot."""

    handler: Any = None
    by_handler: bool = True

    @property
    def checkpointable(self) -> Any:
        """The value that the handler saves."""
        return self.item


@dataclass
class TreeRestore(ocp.args.StandardRestore):
    """A tree into abstract leaves of the newer API: also types (`int`, `jax.Array`) and `...`; `handler` restores what
    stock Orbax wrote.

    `partial` restores the leaves of `item` alone. `strict` False leaves the whole restore to `handler`.
    """

    handler: Any = None
    partial: bool = False

    @property
    def checkpointable(self) -> Any:
        """The abstract value that the handler loads into."""
        return self.item


@dataclass
class HandledSave(ocp.args.CheckpointArgs):
    """A checkpointable that only `handler` can save."""

    checkpointable: Any
    handler: Any


@dataclass
class HandledRestore(ocp.args.CheckpointArgs):
    """A checkpointable that only `handler` can load."""

    checkpointable: Any
    handler: Any


_Carrier = TreeSave | TreeRestore | HandledSave | HandledRestore


@final
class CarriedHandlers(ocp.handlers.DefaultCheckpointHandlerRegistry):
    """Obeys the handler that an argument carries; any other argument has the handler that stock Orbax gives it."""

    def has(self, item: str | None, args: Any) -> bool:
        """Whether the argument carries a handler, or one was added for it."""
        return item is not None if isinstance(args, _Carrier) else super().has(item, args)

    def get(self, item: str | None, args: Any) -> Any:
        """The handler that the argument carries, or the one that was added for it."""
        if not isinstance(args, _Carrier):
            return super().get(item, args)
        if (item, HandledSave) not in self._registry:
            own = _ItemHandler(lambda: [found for (name, _), found in self._registry.items() if name == item])
            # In front: Orbax has the first handler of an item finalize what was saved.
            self._registry = {(item, HandledSave): own, **self._registry}
        return self._registry[item, HandledSave]


@final
class _ItemHandler(ocp.AsyncCheckpointHandler):
    """Saves and loads one item by the handlers that its arguments carry.

    An item may be saved by another handler once, and the next save is prepared while the last one is finalized: each
    directory is finalized by the handler that wrote it.
    """

    def __init__(self, of_item: Callable[[], Sequence[Any]]):
        self._of_item = of_item
        self._written: set[str] = set()  # directories that are not finalized yet
        self._last: Any = None

    async def async_save(self, directory: Any, args: Any) -> Any:
        """Has the carried handler begin the save."""
        self._last = compatibility.get_compatibility_handler(args.handler)
        self._written.add(str(directory))
        return await self._last.async_save(directory, args)

    def save(self, directory: Any, args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Has the carried handler save."""
        self._last = compatibility.get_compatibility_handler(args.handler)
        self._written.add(str(directory))
        self._last.save(directory, args)

    def restore(self, directory: Any, args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Has the carried handler load."""
        return compatibility.get_compatibility_handler(args.handler).restore(directory, args)

    def finalize(self, directory: Any) -> None:
        """The carried handlers have finalized what they wrote; what another handler wrote it finalizes."""
        if str(directory) in self._written:
            self._written.discard(str(directory))
            return
        for handler in self._of_item():
            if handler is not self:
                handler.finalize(directory)
                return

    def metadata(self, directory: Any) -> Any:
        """The metadata that the handler of the last save reads of an item; None before a save."""
        return None if self._last is None else self._last.metadata(directory)

    def typestr(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The name of the handler of the last save, for the step's metadata."""
        return type(self).__qualname__ if self._last is None else self._last.typestr()

    def close(self) -> None:
        """Nothing is held."""


def carry_handlers(manager: ocp.CheckpointManager) -> None:
    """Has a manager obey the handlers that arguments carry."""
    composite: Any = manager._checkpointer.handler
    composite._handler_registry = CarriedHandlers(composite._handler_registry)


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
