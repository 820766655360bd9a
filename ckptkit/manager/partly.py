"""Steps of stock Orbax where its own manager cannot restore them as asked: in part, or without their devices."""

from __future__ import annotations

from typing import Any

import jax

from ckptkit.durable.newer import NEWER_HANDLER
from ckptkit.durable.partial import elsewhere, read_item, read_leaves
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.arrays import read_arrays
from ckptkit.inspection.directories import STEP_METADATA, item_kind, json_name, step_items
from ckptkit.inspection.places import Place, readable
from ckptkit.manager.asked import Choose
from ckptkit.manifest import LeafRecord

_TIMEOUT_S = 60.0


def choose_of_stock(step_url: str, choose: Choose) -> dict[str, Any]:
    """What `choose` picks of a step (or of one item's own directory), by item; nothing else of it is read.

    The bytes cannot be proven: stock Orbax keeps no digests.
    """
    items = _array_items(step_url)
    chosen = choose({name: stock_records(place) for name, place in items.items()})
    found = {}
    for name, tree in chosen.items():
        if name not in items:
            raise CorruptCheckpointError(f"{step_url} has no array item {name!r}, only {sorted(items)}", path=step_url)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        wanted = {tuple(str(key.key) for key in path): leaf for path, leaf in flat}
        leaves = read_leaves(items[name].url, wanted) if wanted else {}
        found[name] = jax.tree_util.tree_unflatten(treedef, [leaves[path] for path in wanted])
    return found


def whole_step(step_url: str) -> dict[str, Any] | None:
    """Every item of a step that Orbax's manager does not restore by itself: one was saved on devices that are not
    there today, or by Orbax's newer API. None for any other step. Locks no item to a handler."""
    arrays = _array_items(step_url)
    moved = {name: elsewhere(place.url) for name, place in arrays.items()}
    step = Place.open(step_url, timeout_s=_TIMEOUT_S)
    if not any(moved.values()) and not _by_newer_api(step):
        return None
    files = {name: json_name(step.below(name)) for name in step_items(step)}
    small = {name: step.below(name).json(file) for name, file in files.items() if file == "metadata"}
    return {**small, **{name: read_item(place.url, moved[name]) for name, place in arrays.items()}}


def _by_newer_api(step: Place) -> bool:
    recorded = step.json(STEP_METADATA)
    with readable(f"{step.url}/{STEP_METADATA}"):
        handlers = (recorded or {}).get("item_handlers") or {}
        names = handlers.values() if isinstance(handlers, dict) else [handlers]
        return any(NEWER_HANDLER in str(name) for name in names)


def stock_records(place: Place) -> list[LeafRecord]:
    """The leaves of an item of stock Orbax, as records without boxes. Cost: a small read per leaf."""
    _, leaves, _ = read_arrays(place, timeout_s=_TIMEOUT_S)
    return [
        LeafRecord(
            path=leaf.path,
            keys="d" * len(leaf.path),
            kind="jax" if leaf.kind == "jax" else "numpy",
            shape=leaf.shape,
            dtype=leaf.dtype,
            cell=leaf.cell,
            extra={"key_impl": leaf.key_impl} if leaf.key_impl else {},
        )
        for leaf in leaves
        if leaf.shape is not None and leaf.dtype is not None and leaf.cell is not None
    ]


def _array_items(step_url: str) -> dict[str, Place]:
    place = Place.open(step_url, timeout_s=_TIMEOUT_S)
    if item_kind(place) == "arrays":  # an item's own directory, or a step that was saved without a manager
        return {"default": place}
    return {name: place.below(name) for name in step_items(place) if item_kind(place.below(name)) == "arrays"}
