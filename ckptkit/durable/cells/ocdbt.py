"""Reads an OCDBT tree node by node: the values in it, and the places of the others.

TensorStore's time to find a key grows with the size of its node, and Orbax's nodes may have 100 MB. Reading 100,000
keys one by one took 37 s of processor time, the nodes themselves 0.3 s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

import tensorstore as ts

Finished = Callable[[Any], Any]  # what a future gives, or an error

_FILE_BYTES_MAX = 1 << 63  # a tree may hold 64 bits; the system allows 63
_NODES_AT_ONCE = 4  # each may take some 100 MB


def inline_values(base: Any, keys: Collection[str], finished: Finished) -> dict[str, bytes]:
    """The values of those `keys` that are stored in the nodes of the tree at the key-value store `base`.

    A value outside of the tree, or in a part of it that no writer would write, is left out. Cost: every node is read
    once. Raises the errors of `finished`; KeyError, TypeError and similar errors if it is not a tree.
    """
    wanted = {key.encode(): key for key in keys}
    found: dict[str, bytes] = {}
    for prefix, entries in _leaves(base, finished):
        for entry in entries:
            key = wanted.get(prefix + entry["key"])
            if key is not None and "inline_value" in entry:
                found[key] = entry["inline_value"]
    return found


class Placed(NamedTuple):
    """The place of a value: bytes `[start, start + length)` of a file, by its path below the tree's directory."""

    path: str
    start: int
    length: int


def places(base: Any, finished: Finished, *, keys_max: int | None = None) -> dict[str, Placed | bytes]:
    """The place of every key's value: in a file, or (bytes) in the tree itself. Values that can be read as neither are
    left out. Empty for a tree that claims more than `keys_max` keys. Cost and errors: as `inline_values`.
    """
    found: dict[str, Placed | bytes] = {}
    for prefix, entries in _leaves(base, finished, keys_max):
        for entry in entries:
            key = (prefix + entry["key"]).decode(errors="replace")
            if "inline_value" in entry:
                found[key] = entry["inline_value"]
            elif (placed := _placed(entry["indirect_value"])) is not None:
                found[key] = placed
    return found


def _placed(location: str) -> Placed | None:
    """`value:`, a directory, a path below it (both percent-encoded), offset and length, as TensorStore prints them."""
    parts = location.split(":")
    if len(parts) != 5 or parts[0] != "value" or not (parts[3].isdecimal() and parts[4].isdecimal()):
        return None
    path = unquote(parts[1]) + unquote(parts[2])
    placed = Placed(path, int(parts[3]), int(parts[4]))
    within_a_file = placed.start + placed.length < _FILE_BYTES_MAX
    if not path or path.startswith("/") or ".." in path.split("/") or not within_a_file:
        return None
    return placed


def _leaves(base: Any, finished: Finished, keys_max: int | None = None) -> Iterator[tuple[bytes, Any]]:
    """The prefix and the entries of each node that has values, level by level."""
    manifest = finished(ts.ocdbt.dump(base))
    versions = manifest.get("versions")
    if not versions or "location" not in versions[-1]["root"]:
        return
    if keys_max is not None and versions[-1]["root"]["statistics"]["num_keys"] > keys_max:
        return
    level = [(versions[-1]["root"]["location"], b"")]
    height, seen = versions[-1]["root_height"], set[str]()
    while level:
        below: list[tuple[str, bytes]] = []
        for start in range(0, len(level), _NODES_AT_ONCE):
            some = level[start : start + _NODES_AT_ONCE]
            dumps = [ts.ocdbt.dump(base, location) for location, _ in some]
            for (_, prefix), dump in zip(some, dumps, strict=True):
                node = finished(dump)
                if node["height"] != height:
                    continue
                if height:
                    below += _children(node, prefix, seen)
                else:
                    yield prefix, node["entries"]
        level, height = below, height - 1


def _children(node: Any, prefix: bytes, seen: set[str]) -> list[tuple[str, bytes]]:
    """The nodes below one, each once: a hostile tree may name one a thousand times."""
    found = []
    for entry in node["entries"]:
        if entry["location"] not in seen:
            seen.add(entry["location"])
            found.append((entry["location"], prefix + entry["subtree_common_prefix"]))
    return found
