"""The values of an OCDBT tree, node by node, against TensorStore's own reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts

from ckptkit.durable.cells import ocdbt
from ckptkit.durable.cells.ocdbt import inline_values


def make_tree(path: Path, node_bytes: int, inline_bytes: int = 20) -> tuple[Any, dict[str, bytes]]:
    """The key-value store below a tree, and what is in the tree: every seventh value is longer than `inline_bytes`."""
    config = {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": inline_bytes}
    url = f"file://{path}/"
    tree = ts.KvStore.open({"driver": "ocdbt", "base": url, "config": config}).result()
    values = {
        f"{group}.layer{i:03}.w/.zarray": b"value %d" % i * (1 + 9 * (i % 7 == 0))
        for i in range(60)
        for group in ("params", "opt.mu")
    }
    with ts.Transaction() as transaction:
        for key, value in values.items():
            tree.with_transaction(transaction)[key] = value
    return ts.KvStore.open(url).result(), values


@pytest.mark.parametrize("node_bytes", [200, 1000, 1 << 20])
def test_every_value_of_every_node_is_read(tmp_path: Path, node_bytes: int) -> None:
    """A leaf would be shown with another's shape, or not at all, once a tree has more than one node."""
    base, values = make_tree(tmp_path, node_bytes)
    wanted = [key for key in values if key.startswith("params")]
    found = inline_values(base, [*wanted, "not/there"], lambda future: future.result())
    assert found == {key: values[key] for key in wanted if len(values[key]) <= 20}
    assert len(found) < len(wanted), "some are outside of the tree"


def test_empty_tree_is_read(tmp_path: Path) -> None:
    """An item without leaves would be called damaged."""
    base, values = make_tree(tmp_path, 1 << 20)
    tree = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    tree.delete_range(ts.KvStore.KeyRange()).result()
    assert inline_values(base, values, lambda future: future.result()) == {}


def test_tree_with_repeated_nodes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile tree of a few nodes would be read without an end."""
    dumped = []
    entry = {"location": "below", "subtree_common_prefix": b"", "key": b""}

    def dump(base: object, location: str | None = None) -> Any:
        dumped.append(location)
        if location is None:
            return {"versions": [{"root": {"location": "top"}, "root_height": 9}]}
        return {"height": 9 if location == "top" else 8, "entries": [entry] * 1000}

    monkeypatch.setattr(ocdbt.ts.ocdbt, "dump", dump)
    assert inline_values(None, ["a"], lambda value: value) == {}
    assert dumped == [None, "top", "below"]
