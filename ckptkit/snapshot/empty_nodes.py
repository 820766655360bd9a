"""The empty nodes of a tree (None, `()`, `{}`, an empty optimizer state): no leaf names them; Orbax keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax

from ckptkit.snapshot.describe import leaf_path

_VALUES: dict[str, Any] = {"dict": {}, "list": [], "tuple": (), "none": None}
Empty = tuple[tuple[str, ...], str, str]  # path, letters of its levels, which kind


@lru_cache(maxsize=64)
def empty_nodes(treedef: Any) -> list[list[Any]]:
    """Every empty node of a tree as `[path, letters, kind]`, in the words of Orbax's metadata. Remembered per tree."""
    tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]
    return [
        [*map(list, leaf_path(path)[:1]), leaf_path(path)[1], _kind(node)] for path, node in flat if _is_empty(node)
    ]


def empty_value(kind: str) -> Any:
    """A fresh empty node of `kind`; raises KeyError for what is none."""
    value = _VALUES[kind]
    return type(value)() if value is not None else None


def empties_of(stored: Sequence[Any]) -> list[Empty]:
    """The records of `empty_nodes`, read back."""
    return [(tuple(path), letters, kind) for path, letters, kind in stored]


def _is_empty(node: Any) -> bool:
    """Whether a node has no children: a dictionary of empty ones is not empty itself."""
    if isinstance(node, int):
        return False
    structure = jax.tree_util.tree_structure(node)
    return structure.num_leaves == 0 and structure.num_nodes == 1


def _kind(node: Any) -> str:
    """Orbax keeps the three plain containers; every other empty node comes back as None."""
    return {dict: "dict", list: "list", tuple: "tuple"}.get(type(node), "none")
