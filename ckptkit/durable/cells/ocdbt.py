"""Reads an OCDBT tree node by node: the values in it, and the places of the others.

TensorStore's time to find a key grows with the size of its node, and Orbax's nodes may have 100 MB. Reading 100,000
keys one by one took 37 s of processor time, the nodes themselves 0.3 s.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache
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
                _release(node)
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


def _release(node: dict[str, Any]) -> None:
    """Takes back the reference too many that TensorStore (0.1.86) keeps to each part of a dump: a look at 200 steps of
    4,000 leaves grew by 800 MiB. Cost: 2 microseconds for each part."""
    if not _keeps_too_many():
        return
    for part in (*node, *node.values()):
        if type(part) is list and sys.getrefcount(part) == _HELD + 1:
            _let_go(part)
    for entry in node["entries"]:
        for part in (*entry, *entry.values()):
            if type(part) in (str, bytes) and sys.getrefcount(part) == _HELD + 1:
                _let_go(part)


_let_go = ctypes.pythonapi.Py_DecRef
_let_go.argtypes, _let_go.restype = [ctypes.py_object], None


def _counts(holder: dict[str, Any]) -> list[int]:
    counts: list[int] = []
    for part in (*holder, *holder.values()):  # a loop as in `_release`: a comprehension may hold one reference more
        counts.append(sys.getrefcount(part))
    return counts


_HELD = _counts({"".join(["ke", "y"]): bytes(bytearray(9))})[1]  # references to a part that nobody else has


@cache
def _keeps_too_many() -> bool:
    """Whether this TensorStore does: in a dump of two entries their list, and every part of them, none of which is
    shared, has one too many."""
    with suppress(Exception):  # another form of dumps
        return _sample_keeps_too_many()
    return False


def _sample_keeps_too_many() -> bool:
    context = ts.Context()
    base = ts.KvStore.open("memory://", context=context).result()
    tree = ts.KvStore.open({"driver": "ocdbt", "base": "memory://"}, context=context).result()
    for key in ("one", "two"):
        tree.write(key, b"some value").result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    node = ts.ocdbt.dump(base, root).result()
    of_parts, of_list = {count for each in node["entries"] for count in _counts(each)}, _counts(node)
    return (
        len(node["entries"]) == 2
        and of_parts == {_HELD + 1}
        and of_list[len(node) + list(node).index("entries")] == _HELD + 1
    )
