"""Steps of stock Orbax where its own manager cannot restore them as asked: in part, or without their devices."""

from __future__ import annotations

from typing import Any

import jax
import orbax.checkpoint as ocp

from ckptkit.durable.partial import elsewhere, read_leaves
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.arrays import read_arrays
from ckptkit.inspection.directories import item_kind, step_items
from ckptkit.inspection.places import Place
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


def moved_items(step_url: str) -> dict[str, Any]:
    """Orbax's arguments for the items of a step, if one was saved on devices that are not there today; else empty."""
    moved = {name: elsewhere(place.url) for name, place in _array_items(step_url).items()}
    if not any(moved.values()):
        return {}
    step = Place.open(step_url, timeout_s=_TIMEOUT_S)
    small = {name: ocp.args.JsonRestore() for name in step_items(step) if item_kind(step.below(name)) == "json"}
    return {**small, **{name: arg or ocp.args.PyTreeRestore() for name, arg in moved.items()}}


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
