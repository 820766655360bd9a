"""The values of an OCDBT tree, node by node, against TensorStore's own reads."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import google_crc32c
import pytest
import tensorstore as ts
import zstandard

from ckptkit.durable.cells import ocdbt
from ckptkit.durable.cells.ocdbt import files_of, places
from ckptkit.durable.cells.ocdbt_node import Child, Node, Placed, decoded_node


def result(future: Any) -> Any:
    """Of a future."""
    return future.result()


def make_tree(
    path: Path, node_bytes: int, inline_bytes: int = 20, groups: Sequence[str] = ("params", "opt.mu"), layers: int = 60
) -> tuple[Any, dict[str, bytes]]:
    """The key-value store below a tree, and what is in the tree: every seventh value is longer than `inline_bytes`."""
    config = {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": inline_bytes}
    url = f"file://{path}/"
    tree = ts.KvStore.open({"driver": "ocdbt", "base": url, "config": config}).result()
    values = {
        f"{group}.layer{i:03}.w/.zarray": b"value %d" % i * (1 + 9 * (i % 7 == 0))
        for i in range(layers)
        for group in groups
    }
    with ts.Transaction() as transaction:
        for key, value in values.items():
            tree.with_transaction(transaction)[key] = value
    return ts.KvStore.open(url).result(), values


def test_empty_tree_is_read(tmp_path: Path) -> None:
    """An item without leaves would be called damaged."""
    base, _ = make_tree(tmp_path, 1 << 20)
    tree = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    tree.delete_range(ts.KvStore.KeyRange()).result()
    assert places(base, result) == {}


def everything(base: Any) -> dict[str, Any]:
    """All values of a tree as TensorStore's own dump has them, in the words of `places`."""
    newest = ts.ocdbt.dump(base).result()["versions"][-1]
    found, waiting = {}, [(newest["root"]["location"], b"")]
    while waiting:
        location, prefix = waiting.pop()
        for entry in ts.ocdbt.dump(base, location).result()["entries"]:
            if "location" in entry:
                waiting.append((entry["location"], prefix + entry["subtree_common_prefix"]))
            elif "inline_value" in entry:
                found[(prefix + entry["key"]).decode()] = entry["inline_value"]
            else:
                _, directory, path, start, length = entry["indirect_value"].split(":")
                placed = Placed(unquote(directory) + unquote(path), int(start), int(length))
                found[(prefix + entry["key"]).decode()] = placed
    return found


@pytest.mark.parametrize("node_bytes", [200, 1000, 1 << 20])
@pytest.mark.parametrize("inline_bytes", [0, 20, 1000])
def test_places_are_those_of_tensorstore(tmp_path: Path, node_bytes: int, inline_bytes: int) -> None:
    """A cell would be read from another's place, or a leaf be shown with another's shape."""
    base, values = make_tree(tmp_path, node_bytes, inline_bytes)
    found = places(base, result)
    assert found == everything(base)
    assert found.keys() == values.keys()
    inline = {key: value for key, value in found.items() if isinstance(value, bytes)}
    assert inline == {key: value for key, value in values.items() if len(value) <= inline_bytes}


def test_tree_of_trees_has_paths_below_its_own_directory(tmp_path: Path) -> None:
    """Orbax joins the databases of its processes: the paths of a joined node count from where it lies."""
    base = joined_tree(tmp_path)
    found = places(base, result)
    assert found == everything(base)
    assert {each.path.split("/")[0] for each in found.values() if isinstance(each, Placed)} == {"one", "two"}


def test_files_of_a_tree_are_those_of_its_newest_version(tmp_path: Path) -> None:
    """`du --deep` would call a file dead that a reader needs."""
    base = joined_tree(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("d/*")}
    assert files_of(base, result) <= files
    named = {value.path for value in everything(base).values() if isinstance(value, Placed)}
    assert named < files_of(base, result), "the files of the nodes too"


def joined_tree(path: Path) -> Any:
    """The key-value store below a tree that is made of two others, which lie below it."""
    names = ("one", "two")
    for name in names:
        make_tree(path / name, 1000, groups=[name])
    one = ts.Context()  # TensorStore copies places within one context only
    tree = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}, context=one).result()
    with ts.Transaction(atomic=True) as transaction:
        for name in names:
            below = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/{name}/"}, context=one).result()
            below.experimental_copy_range_to(tree.with_transaction(transaction)).result()
    return ts.KvStore.open(f"file://{path}/").result()


def test_memory_of_a_tree_is_given_back(tmp_path: Path) -> None:
    """`du --deep` of 200 steps would need 1 GiB: TensorStore's own dump keeps every part of what it returns."""
    base, values = make_tree(tmp_path, 1 << 20, layers=2000)
    places(base, result)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(10):
        places(base, result)
        files_of(base, result)
    gc.collect()
    kept = (sys.getallocatedblocks() - before) / 20
    assert kept < len(values) / 2, "the small manifest alone, which TensorStore reads; a dump has five for each value"


def test_tree_with_repeated_nodes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile tree of a few nodes would be read without an end."""
    read = []

    def decode(data: bytes, at: Child) -> Node:
        read.append(at.placed.path)
        below = Child(Placed("below", 0, 1), b"", b"")
        return Node(9 if at.placed.path == "top" else 8, [below] * 1000, [])

    base = ts.KvStore.open("memory://").result()
    base["top"] = base["below"] = b"1"
    root = {"location": "btreenode::top:0:1"}
    monkeypatch.setattr(ocdbt.ts.ocdbt, "dump", lambda _: Dumped({"versions": [{"root": root, "root_height": 9}]}))
    monkeypatch.setattr(ocdbt, "decoded_node", decode)
    assert places(base, result) == {}
    assert read == ["top", "below"]


class Dumped:
    """A future of a dump."""

    def __init__(self, value: Any):
        self._value = value

    def result(self) -> Any:
        return self._value


def node_of(path: Path, compressed: bool) -> tuple[bytes, Child]:
    """The bytes of the root of a tree, and their place."""
    config: dict[str, Any] = {"max_inline_value_bytes": 20}
    tree = ts.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{path}/", "config": config | ({} if compressed else {"compression": None})}
    ).result()
    with ts.Transaction() as transaction:
        for i in range(12):
            tree.with_transaction(transaction)[f"params.w{i}/0.0"] = b"value" * (1 + 9 * (i % 3 == 0))
    at = ocdbt._root(ts.KvStore.open(f"file://{path}/").result(), result, None)
    assert at is not None
    placed = at[0].placed
    data = (path / placed.path).read_bytes()[placed.start : placed.start + placed.length]
    return data, at[0]


def test_damaged_node_is_no_node(tmp_path: Path) -> None:
    """A flipped bit would name another place, and bytes of another leaf be read from it."""
    data, at = node_of(tmp_path, compressed=True)
    assert len(decoded_node(data, at).values) == 12
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="node"):
            decoded_node(bytes(damaged), at)
    for length in range(len(data)):
        with pytest.raises(ValueError, match="node"):
            decoded_node(data[:length], at)


def test_hostile_node_ends_in_a_value_error(tmp_path: Path) -> None:
    """A hostile writer makes the checksum fit: an IndexError, or memory without a limit, would end the
    command."""
    data, at = node_of(tmp_path, compressed=False)
    chance = random.Random(0)
    refused = 0
    for _ in range(3000):
        hostile = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 5])):
            hostile[chance.randrange(12, len(data) - 4)] = chance.choice(
                [0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)]
            )
        hostile[-4:] = google_crc32c.value(bytes(hostile[:-4])).to_bytes(4, "little")
        try:
            node = decoded_node(bytes(hostile), at)
        except ValueError:
            refused += 1
        else:
            assert len(node.values) + len(node.children) <= 1 << 20
    assert refused > 1000


def varint(number: int) -> bytes:
    """As the format has it."""
    return (bytes([number & 0x7F | 0x80]) + varint(number >> 7)) if number > 0x7F else bytes([number])


def columns(*numbers: Iterable[int]) -> bytes:
    """Each column, number by number."""
    return b"".join(varint(number) for column in numbers for number in column)


def leaf_node(files: Sequence[bytes], values: dict[bytes, tuple[int, int, int]]) -> bytes:
    """A node without compression and shared prefixes, with `values`: the number of a file, the start, the length."""
    table = columns([len(files)], [0] * (len(files) - 1), map(len, files), [0] * len(files)) + b"".join(files)
    keys = columns([len(values)], [0] * (len(values) - 1), map(len, values)) + b"".join(values)
    numbers, starts, lengths = zip(*values.values(), strict=True)
    body = b"\0\0\0" + table + keys + columns(lengths) + b"\1" * len(values) + columns(numbers, starts)
    made = bytes.fromhex("0cdb20de") + (len(body) + 16).to_bytes(8, "little") + body
    return made + google_crc32c.value(made).to_bytes(4, "little")


def test_tree_that_names_outside_files_is_not_followed() -> None:
    """A step that somebody prepared would have any file of the host read."""
    files = [b"d/abc", b"../../etc/passwd", b"/etc/passwd", b"", b"d/../../x", b"p_1/d/abc"]
    values = {
        b"a": (0, 12, 34),
        b"b": (5, 0, 5),
        b"c": (1, 0, 5),
        b"d": (2, 0, 5),
        b"e": (3, 0, 5),
        b"f": (4, 0, 5),
        b"i": (0, (1 << 64) - 1, 5),
        b"j": (0, (1 << 63) - 5, 5),
    }
    node = decoded_node(leaf_node(files, values), Child(Placed("top", 0, 1), b"w/", b""))
    assert node.values == [(b"w/a", Placed("d/abc", 12, 34)), (b"w/b", Placed("p_1/d/abc", 0, 5))]
    below = decoded_node(leaf_node([b"d/abc"], {b"a": (0, 1, 2)}), Child(Placed("top", 0, 1), b"", b"p_1/"))
    assert below.values == [(b"a", Placed("p_1/d/abc", 1, 2))]


def test_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes that decompress to many gigabytes."""
    monkeypatch.setattr("ckptkit.durable.cells.ocdbt_node.NODE_BYTES_MAX", 1 << 22)
    data, at = node_of(tmp_path, compressed=True)
    bomb = bytearray(data[:14] + zstandard.compress(bytes(1 << 26)) + data[-4:])
    bomb[4:12] = len(bomb).to_bytes(8, "little")
    bomb[-4:] = google_crc32c.value(bytes(bomb[:-4])).to_bytes(4, "little")
    with pytest.raises(ValueError, match="a node of more than"):
        decoded_node(bytes(bomb), at)


def test_names_and_values_of_a_hostile_node_are_bounded() -> None:
    """A node of a few kilobytes would become a terabyte of names."""
    at = Child(Placed("top", 0, 1), b"", b"")
    with pytest.raises(ValueError, match="names of 70000 bytes"):
        decoded_node(leaf_node([b"d/a"], {b"k" * 70_000: (0, 0, 1)}), at)
    prefix = Child(Placed("top", 0, 1), b"p" * 65_000, b"")
    with pytest.raises(ValueError, match="or too many"):
        decoded_node(leaf_node([b"d/a"], {b"%05d" % n: (0, 0, 1) for n in range(20_000)}), prefix)
