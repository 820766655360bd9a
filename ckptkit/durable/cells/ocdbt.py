"""Reads an OCDBT tree node by node: the values in it, and the places of the others.

TensorStore's time to find a key grows with the size of its node, and Orbax's nodes may have 100 MB. Reading 100,000
keys one by one took 37 s of processor time, the nodes themselves 0.3 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from ckptkit.durable.cells.ocdbt_node import NODE_BYTES_MAX, Child, Node, Placed, decoded_node

Finished = Callable[[Any], Any]  # what a future gives, or an error

_NODES_AT_ONCE = 4  # each may take some 100 MB


def places(base: Any, finished: Finished, *, keys_max: int | None = None) -> dict[str, Placed | bytes]:
    """The place of every key's value in the tree at the key-value store `base`: in a file, or (bytes) in the tree
    itself. Values that can be read as neither, or are in a part that no writer would write, are left out. Empty for a
    tree that claims more than `keys_max` keys.

    Cost: every node is read once. Raises the errors of `finished`; ValueError, KeyError and similar errors if it is not
    a tree.
    """
    nodes = _nodes(base, finished, keys_max)
    return {key.decode(errors="replace"): value for _, node in nodes for key, value in node.values}


def files_of(base: Any, finished: Finished) -> set[str]:
    """The data files that the newest version of a tree is made of, by their paths below `base`: those of its nodes and
    of its values. Cost and errors: as `places`."""
    found = set[str]()
    for at, node in _nodes(base, finished):
        found.add(at.placed.path)
        found |= {value.path for _, value in node.values if isinstance(value, Placed)}
    return found


def _root(base: Any, finished: Finished, keys_max: int | None) -> tuple[Child, int] | None:
    """The topmost node of the newest version, and its height. None for an empty tree, and one of too many keys."""
    versions = finished(ts.ocdbt.dump(base)).get("versions")
    if not versions or "location" not in versions[-1]["root"]:
        return None
    root = versions[-1]["root"]
    if keys_max is not None and root["statistics"]["num_keys"] > keys_max:
        return None
    # As TensorStore prints it: `btreenode`, a directory, a path below it (both percent-encoded), offset and length.
    _, directory, path, start, length = root["location"].split(":")
    placed = Placed(unquote(directory) + unquote(path), int(start), int(length))
    return Child(placed, b"", unquote(directory).encode()), versions[-1]["root_height"]


def _nodes(base: Any, finished: Finished, keys_max: int | None = None) -> Iterator[tuple[Child, Node]]:
    """Each node with its place, level by level, and once: a hostile tree may name one a thousand times.

    Raises ValueError where the tree itself holds more than `NODE_BYTES_MAX` of values.
    """
    root = _root(base, finished, keys_max)
    level, height = ([root[0]], root[1]) if root else ([], 0)
    seen, held_bytes = set[Placed](), 0
    while level:
        below: list[Child] = []
        for start in range(0, len(level), _NODES_AT_ONCE):
            some = level[start : start + _NODES_AT_ONCE]
            if any(child.placed.length > NODE_BYTES_MAX for child in some):
                raise ValueError(f"the database names a node of more than {NODE_BYTES_MAX} bytes")
            reads = [base.read(place.path, byte_range=_range(place)) for place in (child.placed for child in some)]
            for child, read in zip(some, reads, strict=True):
                found = finished(read)
                if found.state != "value":
                    raise ValueError(f"{child.placed.path}, which holds a node of the database, is not there")
                node = decoded_node(found.value, child)
                if node.height != height:
                    continue
                held_bytes += sum(len(value) for _, value in node.values if isinstance(value, bytes))
                if held_bytes > NODE_BYTES_MAX:
                    raise ValueError(f"the database itself holds more than {NODE_BYTES_MAX} bytes")
                yield child, node
                for each in node.children:
                    if each.placed not in seen:
                        seen.add(each.placed)
                        below.append(each)
        level, height = below, height - 1


def _range(placed: Placed) -> slice:
    return slice(placed.start, placed.start + placed.length)
