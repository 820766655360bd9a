"""From Orbax's save and restore arguments to items, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp

from ckptkit.durable.steps import DEFAULT_ITEM, FrozenIterator
from ckptkit.manifest import LeafRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveItems:
    """What one save holds: trees of arrays, and small items that are stored inline, captured now."""

    trees: Mapping[str, Any]
    inline: Mapping[str, Mapping[str, Any]]
    durable: Mapping[str, Any]  # Orbax arguments of the inline items, frozen
    default_item: bool


def save_items(args: Any) -> SaveItems:
    """The items of `args`; raises TypeError for a kind that is not supported, naming those that are."""
    default_item = not isinstance(args, ocp.args.Composite)
    by_name = {DEFAULT_ITEM: args} if default_item else dict(args.items())
    trees: dict[str, Any] = {}
    inline: dict[str, Mapping[str, Any]] = {}
    durable: dict[str, Any] = {}
    for name, arg in by_name.items():
        if isinstance(arg, ocp.args.StandardSave | ocp.args.PyTreeSave):
            if arg.save_args is not None:
                raise TypeError(f"item {name!r}: save_args are not supported; leave them out")
            trees[name] = arg.item
        elif isinstance(arg, ocp.args.JsonSave):
            value = json.loads(json.dumps(arg.item))  # captured now: the caller may change it while it is written
            inline[name] = {"kind": "json", "value": value}
            durable[name] = ocp.args.JsonSave(value)
        elif _is_grain(arg):
            state = _iterator_state(arg.item)
            inline[name] = {"kind": "grain", "value": state.decode()}
            durable[name] = type(arg)(FrozenIterator(state))
        else:
            raise TypeError(
                f"item {name!r} is saved with {type(arg).__name__}; supported are StandardSave, PyTreeSave, JsonSave "
                "and Grain's CheckpointSave, alone or in Composite"
            )
    return SaveItems(trees=trees, inline=inline, durable=durable, default_item=default_item)


# From the stored leaves, by item, to nested dicts of those that are wanted: the same answer whenever it is asked.
Choose = Callable[[Mapping[str, Sequence[LeafRecord]]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreItems:
    """What is asked for. `abstract` None means every item, as it was saved, or what `choose` picks of it."""

    abstract: Mapping[str, Any] | None  # array items -> abstract tree (None: as it was saved)
    inline: Mapping[str, Any]  # small items -> the iterator to set, or None for JSON
    default_item: bool | None  # None: as the step was saved
    choose: Choose | None = None

    def asked(self, stored: Mapping[str, Sequence[LeafRecord]]) -> Mapping[str, Any]:
        """The abstract trees by item, given what is stored; None for an item as it was saved."""
        if self.choose is not None:
            return self.choose(stored)
        return dict.fromkeys(stored) if self.abstract is None else self.abstract


def restore_items(args: Any) -> RestoreItems:
    """The items of `args`; raises TypeError for a kind that is not supported."""
    if args is None:
        return RestoreItems(abstract=None, inline={}, default_item=None)
    default_item = not isinstance(args, ocp.args.Composite)
    by_name = {DEFAULT_ITEM: args} if default_item else dict(args.items())
    abstract: dict[str, Any] = {}
    inline: dict[str, Any] = {}
    for name, arg in by_name.items():
        if isinstance(arg, ocp.args.StandardRestore | ocp.args.PyTreeRestore):
            if getattr(arg, "restore_args", None) is not None:
                raise TypeError(f"item {name!r}: restore_args are not supported; put shardings into the abstract tree")
            abstract[name] = arg.item
        elif isinstance(arg, ocp.args.JsonRestore):
            inline[name] = None
        elif _is_grain(arg):
            inline[name] = arg.item
        else:
            raise TypeError(
                f"item {name!r} is restored with {type(arg).__name__}; supported are StandardRestore, PyTreeRestore, "
                "JsonRestore and Grain's CheckpointRestore, alone or in Composite"
            )
    return RestoreItems(abstract=abstract, inline=inline, default_item=default_item)


def restored_inline(name: str, stored: Mapping[str, Any], iterator: Any) -> Any:
    """A small item from its stored form; an iterator is set to its state and returned."""
    if stored["kind"] == "json":
        return stored["value"]
    if iterator is None:
        return stored["value"]
    text: str = stored["value"]
    try:
        iterator.set_state(json.loads(text))
    except (TypeError, ValueError):
        iterator.set_state(text.encode())  # Grain's older iterators keep their state as bytes
    if hasattr(iterator, "start_prefetch"):
        iterator.start_prefetch()
    return iterator


def _is_grain(arg: Any) -> bool:
    return type(arg).__module__.split(".")[0] == "grain" and hasattr(arg, "item")


def _iterator_state(iterator: Any) -> bytes:
    state = iterator.get_state()
    return state if isinstance(state, bytes) else json.dumps(state, indent=4).encode()
