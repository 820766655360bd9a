"""Saves that Orbax refuses, or that stock Orbax could not read: `save` itself raises, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.snapshot.json_values import require_json

args: Any = ocp.args
state = {"w": jnp.ones(3)}
empty = np.zeros((2, 0), np.float32)
no_keys = jax.random.split(jax.random.key(0), 0)
circular: dict[str, Any] = {"a": 1}
circular["self"] = circular


def refused(root: Path, error: type[Exception], match: str, given: Any, **more: Any) -> None:
    """The save raises, leaves no step behind, and the manager then saves the same step without it."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ckptkit.CheckpointManager(root, options=options) as manager:
        with pytest.raises(error, match=match) as caught:
            manager.save(0, args=given, **more)
        assert not isinstance(caught.value, ckptkit.CheckpointError)
        manager.wait_until_finished()
        assert manager.all_steps() == []
        assert not [name for name in os.listdir(root) if name != "_ckptkit"]
        named = isinstance(given, args.Composite)
        good = args.Composite(state=args.StandardSave(state)) if named else type(given)(state)
        assert manager.save(0, args=good, metrics={"loss": 1.0})
    with ocp.CheckpointManager(root) as stock:
        assert stock.all_steps() == [0]


@pytest.mark.parametrize("kind", [args.StandardSave, args.PyTreeSave])
@pytest.mark.parametrize("leaf", [empty, jnp.zeros((0, 3)), no_keys], ids=["numpy", "jax", "keys"])
def test_leaf_without_elements_is_refused(tmp_path: Path, kind: Any, leaf: Any) -> None:
    """A step would be committed that stock Orbax cannot read."""
    refused(
        tmp_path, ValueError, "without elements cannot be saved to the durable tier: e$", kind({**state, "e": leaf})
    )


@pytest.mark.parametrize(
    "given",
    [
        args.ArraySave(empty),
        args.ArraySave(jnp.zeros(0)),
        args.JaxRandomKeySave(no_keys),
        args.NumpyRandomKeySave({"a": np.zeros(0, np.uint32), "b": np.ones(2, np.uint32)}),
    ],
    ids=["numpy", "jax", "keys", "numpy key"],
)
def test_small_item_without_elements_is_refused(tmp_path: Path, given: Any) -> None:
    """The save would fail in the background, after the copies."""
    named = args.Composite(state=args.StandardSave(state), small=given)
    refused(tmp_path, ValueError, "without elements cannot be saved to the durable tier: small$", named)


@pytest.mark.parametrize("kind", [args.StandardSave, args.PyTreeSave])
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_nodes_without_leaves_are_read_by_stock_orbax(tmp_path: Path, kind: Any) -> None:
    """Trees with empty lists, dicts and None would be refused, or be lost for stock Orbax."""
    tree = {**state, "list": [], "dict": {}, "none": None, "text": "", "tuple": ()}
    if kind is args.StandardSave:
        del tree["text"]  # as in Orbax
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=kind(tree))
    for restore in (args.StandardRestore, args.PyTreeRestore):
        with ocp.CheckpointManager(tmp_path) as stock:
            found = stock.restore(0, args=restore())
        assert jax.tree.structure(found) == jax.tree.structure(tree)


def test_save_of_no_item_is_refused(tmp_path: Path) -> None:
    """A step without items would be committed, and every restore would call it damaged."""
    refused(tmp_path, ValueError, r"step 0 has no item to save: give args an item", args.Composite())
    legacy = ckptkit.CheckpointManager(tmp_path / "legacy", {"state": ocp.PyTreeCheckpointer()})
    with legacy as manager, pytest.raises(ValueError, match="step 0 has no item"):
        manager.save(0, items={})


def test_step_of_metrics_alone_is_saved_as_in_orbax(tmp_path: Path) -> None:
    """A script that records metrics of steps without a state would stop."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    for number, library in enumerate((ocp, ckptkit)):
        with library.CheckpointManager(tmp_path / str(number), options=options) as manager:
            assert manager.save(0, args=args.Composite(), metrics={"loss": 1.0})
            manager.wait_until_finished()
            assert manager.restore(0)["metrics"] == {"loss": 1.0}


@pytest.mark.parametrize(
    ("error", "match", "given"),
    [
        (TypeError, r"^metrics\['loss'\] cannot .*ArrayImpl", {"metrics": {"loss": jnp.ones(())}}),
        (TypeError, r"^metrics\['a'\]\['b'\]\[1\] cannot .*set", {"metrics": {"a": {"b": [1, {2}]}, "loss": 1}}),
        (TypeError, r"^metrics\[\(1, 2\)\] cannot .*tuple", {"metrics": {(1, 2): 3, "loss": 1}}),
        (ValueError, r"^metrics\['self'\] cannot .*Circular", {"metrics": circular}),
        (TypeError, r"^custom_metadata\['a'\] cannot .*float32", {"custom_metadata": {"a": np.float32(1)}}),
        (TypeError, r"^custom_metadata\['a'\]\[\(1,\)\] cannot ", {"custom_metadata": {"a": {(1,): 2}}}),
        (ValueError, "^custom_metadata has the key 1, a int", {"custom_metadata": {1: 2}}),
        (ValueError, "^custom_metadata is a list, not a dict", {"custom_metadata": []}),
    ],
)
def test_values_that_json_cannot_hold_are_named(tmp_path: Path, error: Any, match: str, given: Any) -> None:
    """The save would fail in the background, and the message would not tell which value is wrong."""
    refused(tmp_path, error, match, args.StandardSave(state), **given)


def test_metadata_of_an_item_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    """The save would fail in the background."""
    given = args.StandardSave(state, custom_metadata={"x": {1}})
    refused(tmp_path, TypeError, r"^custom_metadata of item 'default'\['x'\] cannot be stored as JSON", given)


@pytest.mark.parametrize("metrics", [{"loss": float("nan")}, {1: 3, "loss": [1, None, True]}, {"loss": (1, 2)}])
def test_values_that_json_holds_are_accepted(tmp_path: Path, metrics: Any) -> None:
    """A save that Orbax takes would be refused."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda _: 1.0)
    with ckptkit.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.save(0, args=args.StandardSave(state), metrics=metrics, custom_metadata={"a": {1: (2, None)}})
        manager.wait_until_finished()
        assert manager.metadata(0).custom_metadata == {"a": {"1": [2, None]}}


def test_metrics_that_are_not_stored_may_be_anything(tmp_path: Path) -> None:
    """A script without `best_fn` would stop that passes its metrics as arrays."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.save(0, args=args.StandardSave(state), metrics={"loss": jnp.ones(())})


def test_value_that_is_too_deep_is_refused() -> None:
    """A RecursionError would come up from the JSON encoder."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^metrics.*cannot be stored as JSON"):
        require_json(deep, "metrics")
    while deep:  # Python frees a deep list by recursion
        deep = deep.pop()
