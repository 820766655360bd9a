"""The part of a checkpoint of stock Orbax that a surgery takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.orbax.partial import read_leaves
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.stored_arrays import read_arrays
from ckptkit.model.manifest import LeafRecord
from ckptkit.restore.stock_restore import array_items

_TIMEOUT_S = 60.0

Choose = Callable[[Mapping[str, Sequence[LeafRecord]]], Mapping[str, Any]]  # as `Choice.choose`


def read_chosen(step_url: str, choose: Choose) -> dict[str, Any]:
    """The part that `choose` picks of a step (or of one item's own directory), by item; nothing else is read.

    The bytes cannot be proven: stock Orbax keeps no digests.
    """
    items = array_items(step_url)
    chosen = choose({name: _records(place) for name, place in items.items()})
    found = {}
    for name, tree in chosen.items():
        if name not in items:
            raise CorruptCheckpointError(f"{step_url} has no array item {name!r}, only {sorted(items)}", path=step_url)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        wanted = {tuple(str(key.key) for key in path): leaf for path, leaf in flat}
        leaves = read_leaves(items[name].url, wanted) if wanted else {}
        found[name] = jax.tree_util.tree_unflatten(treedef, [leaves[path] for path in wanted])
    return found


def _records(place: Place) -> list[LeafRecord]:
    """The leaves of an item of stock Orbax, as records without boxes. Cost: a small read per leaf."""
    leaves = read_arrays(place, timeout_s=_TIMEOUT_S).leaves
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
