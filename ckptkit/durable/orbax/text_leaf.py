"""Text in a tree. Orbax keeps all text of an item in one JSON file next to its arrays; a manifest keeps it among the
nodes without leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax

STRINGS_FILE = "_strings.json"
TEXT_TYPE = "string"  # in Orbax's `_METADATA`


@final
@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, slots=True)
class TextLeaf:
    """A text as a node without children, so that code for the arrays of a tree skips it."""

    value: str

    def tree_flatten(self) -> tuple[tuple[()], str]:
        """See `jax.tree_util.register_pytree_node_class`."""
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: str, _: Any) -> TextLeaf:
        """See `jax.tree_util.register_pytree_node_class`."""
        return cls(value)


def is_text_leaf(node: Any) -> bool:
    """For `is_leaf` of `jax.tree.map`."""
    return isinstance(node, TextLeaf)


def with_plain_text(tree: Any, of_leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A tree in which each `TextLeaf` is its text again, and other leaves are what `of_leaf` makes of them."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_text_leaf)  # half the time of a map
    return treedef.unflatten([node.value if is_text_leaf(node) else of_leaf(node) for node in nodes])


def can_be_stored(name: str) -> bool:
    """Whether Orbax finds a text by the name of its leaf: it is a pointer into JSON, in which two characters differ."""
    return "/" not in name and "~" not in name
