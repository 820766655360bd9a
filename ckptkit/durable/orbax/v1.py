"""Arguments that carry a handler of Orbax's newer API (v1), and what has a manager obey them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import orbax.checkpoint as ocp
from orbax.checkpoint.experimental.v1._src.handlers import compatibility

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
