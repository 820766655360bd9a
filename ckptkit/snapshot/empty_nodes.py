"""The nodes without leaves of a tree: text, and the empty ones (None, `()`, `{}`, an empty optimizer state). Orbax
keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax

from ckptkit.durable.orbax.host_shards import TextLeaf
from ckptkit.snapshot.describe import leaf_path

_VALUES: dict[str, Any] = {"dict": {}, "list": [], "tuple": (), "none": None}
_TEXT = "text"
Empty = tuple[tuple[str, ...], str, Any]  # path, letters of its levels, the node


@lru_cache(maxsize=64)
def empty_nodes(treedef: Any) -> list[list[Any]]:
    """Every node without leaves as `[path, letters, kind]`, in the words of Orbax's metadata; a text follows its kind.
    Remembered per tree."""
    tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]
    return [
        [*map(list, leaf_path(path)[:1]), leaf_path(path)[1], *_words(node)] for path, node in flat if _is_empty(node)
    ]


def empties_of(stored: Sequence[Any]) -> list[Empty]:
    """The records of `empty_nodes`, read back: fresh nodes. Raises KeyError for an unknown kind."""
    return [(tuple(path), letters, _node(*words)) for path, letters, *words in stored]


def _node(kind: str, *text: str) -> Any:
    if kind == _TEXT:
        return TextLeaf(*text)
    value = _VALUES[kind]
    return type(value)() if value is not None else None


def _is_empty(node: Any) -> bool:
    """Whether a node has no children: a dictionary of empty ones is not empty itself."""
    if isinstance(node, int):
        return False
    structure = jax.tree_util.tree_structure(node)
    return structure.num_leaves == 0 and structure.num_nodes == 1


def _words(node: Any) -> tuple[str, ...]:
    """Orbax keeps text and the three plain containers; every other empty node comes back as None."""
    if isinstance(node, TextLeaf):
        return _TEXT, node.value
    return ({dict: "dict", list: "list", tuple: "tuple"}.get(type(node), "none"),)
