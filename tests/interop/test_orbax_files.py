"""The files that are written by hand, against those of stock Orbax: this fails if its private names move.

To repair it: find the new place of the name in `ckptkit/durable/orbax/files.py` and `manager.py`, and run it again.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.orbax.files import tree_text
from tests.states import make_state


class Pair(NamedTuple):
    """A node of attributes."""

    mu: Any
    nu: Any


TREES = {
    "every kind of leaf": lambda: make_state(3),
    "nodes of every kind": lambda: {
        "pair": Pair(jnp.ones((3, 5)), [jnp.zeros(2), (jnp.ones(()), None)]),
        "empty": {"dict": {}, "list": [], "none": None, "state": optax.EmptyState()},
        "deep": {"a.b": {"c/d": jnp.arange(4.0)}},
    },
    "an optimizer": lambda: optax.adam(1e-3).init({"w": jnp.ones((4, 4))}),
}


@pytest.mark.parametrize("tree", TREES)
def test_metadata_files_equal_those_of_orbax(tree: str, tmp_path: Path) -> None:
    """Stock Orbax would read another tree than was saved, or none."""
    state = TREES[tree]()
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(state, custom_metadata={"of": "the tree"}),  # pyright: ignore[reportCallIssue]
        data=ocp.args.JsonSave({"position": 7}),  # pyright: ignore[reportCallIssue]
    )
    for name, kind in (("ours", ckptkit.CheckpointManager), ("stock", ocp.CheckpointManager)):
        with kind(tmp_path / name, options=ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"])) as manager:
            assert manager.save(4, args=args, metrics={"loss": 0.5}, custom_metadata={"by": "hand"})
            manager.wait_until_finished()
    ours, stock = tmp_path / "ours" / "4", tmp_path / "stock" / "4"
    for name in ("state/_METADATA", "data/metadata", "metrics/metrics"):
        assert _without_write_shapes(_read(ours / name)) == _without_write_shapes(_read(stock / name)), name
    # Of a typed key Orbax writes down how its data is split, and we how the key is: both are restored.
    found, expected = (_read(each / "state/_sharding") for each in (ours, stock))
    keys = {base64.urlsafe_b64encode(name).decode() for name in (b"key", b"keys")}
    assert set(found) == set(expected)
    assert {name: found[name] for name in set(found) - keys} == {name: expected[name] for name in set(found) - keys}
    found, expected = (_by_leaf(each / "state/array_metadatas/process_0") for each in (ours, stock))
    assert found == expected
    found, expected = (_read(each / "_CHECKPOINT_METADATA") for each in (ours, stock))
    for recorded in (found, expected):
        assert recorded.pop("init_timestamp_nsecs") <= recorded.pop("commit_timestamp_nsecs")
    assert found == expected
    listed, wanted = (_names(each) - {"d"} for each in (ours / "state", stock / "state"))
    assert listed - {"_ckptkit"} == wanted - {"ocdbt.process_0"}
    assert all((ours / item / "commit_success.txt").is_file() for item in ("", "state", "data", "metrics"))


def test_every_cell_has_its_zarr_position(tmp_path: Path) -> None:
    """Partial cells, dtypes of few bits and leaves without an axis would come back moved, or not at all."""
    state = {
        "partial": jnp.arange(5 * 7, dtype=jnp.float32).reshape(5, 7),
        "bf16": jnp.arange(9, dtype=jnp.bfloat16),
        "int4": jnp.arange(-8, 8, dtype=jnp.int4),
        "float8": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "complex": jnp.arange(3) * (1 + 2j),
        "bool": jnp.arange(5) % 2 == 0,
        "scalar": jnp.float32(2.5),
        "large": jnp.arange(300_000, dtype=jnp.float32),  # above DurableProfile.copied_bytes
        "host": np.arange(6, dtype=np.uint16).reshape(2, 3),
    }
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    with ocp.CheckpointManager(tmp_path) as stock:
        found = stock.restore(0, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    for name, leaf in state.items():
        assert found[name].dtype == leaf.dtype, name
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), name


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _without_write_shapes(recorded: Any) -> Any:
    """Orbax shares replicated leaves out over devices in pieces of its own."""
    for leaf in recorded.get("tree_metadata", {}).values():
        leaf["value_metadata"].pop("write_shape", None)
    return recorded


def _by_leaf(path: Path) -> dict[str, Any]:
    """Orbax writes them in the order in which they were ready, and some with a shape where all was written at once."""
    entries = [each["array_metadata"] for each in _read(path)["array_metadatas"]]
    return {each["param_name"]: each["ext_metadata"] for each in entries}


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@jax.tree_util.register_pytree_node_class
class Odd:
    """A node whose own data has no hash."""

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten(self) -> Any:
        return (self.value,), {"of": "a dict"}

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Odd:
        return cls(*children)


def test_cached_tree_metadata_distinguishes_structures() -> None:
    """The metadata of one tree would be written for another, or a node without a hash end the save."""
    numbers, text = {"a": 1, "b": np.ones(2)}, {"a": np.ones(2), "b": 1}
    assert tree_text(numbers) == tree_text(dict(numbers)) != tree_text(text)
    assert tree_text(numbers, {"of": 1}) != tree_text(numbers, {"of": 2})
    odd = json.loads(tree_text({"odd": Odd(np.ones(2))}))
    assert len(odd["tree_metadata"]) == 1
