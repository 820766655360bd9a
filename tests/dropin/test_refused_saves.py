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
import ckptkit.direct
from ckptkit.snapshot.json_values import require_json

args: Any = ocp.args
state = {"w": jnp.ones(3)}
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


@pytest.mark.parametrize("kind", [args.StandardSave, args.PyTreeSave])
@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        (
            np.ma.array([1.0, 2.0], mask=[True, False]),
            r": e\.x \(a masked array would lose its mask: save np.ma.getdata",
        ),
        (1 << 100, r": e\.x \(an integer of more than 64 bits: .*JsonSave.*NumpyRandomKeySave"),
        (-(1 << 64), r": e\.x \(an integer of more than 64 bits: "),
        (np.array([object()]), r": e\.x \(an array of object, which is not a number: .*JsonSave"),
        (np.array(["a", "b"]), r": e\.x \(an array of <U1, "),
        (np.array(["2020-01-01"], "M8[D]"), r": e\.x \(an array of datetime64\[D\], "),
        (np.datetime64("2020-01-01"), r": e\.x \(an array of datetime64\[D\], "),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), r": e\.x \(an array of \[\('a', '<f4'\), "),
    ],
    ids=["masked", "128 bits", "negative", "objects", "text", "dates", "a date", "structures"],
)
def test_leaf_that_no_array_on_disk_holds_is_refused(tmp_path: Path, kind: Any, leaf: Any, match: str) -> None:
    """The save would fail in the background with an error of zarr's, or a mask would be lost."""
    refused(tmp_path, ValueError, f"^these leaves cannot be saved{match}", kind({**state, "e": {"x": leaf}}))


def test_leaves_are_refused_by_their_own_path_too(tmp_path: Path) -> None:
    """A tree that is saved without a manager would lose its mask."""
    with pytest.raises(ValueError, match=r"^these leaves cannot be saved: a, b \(a masked array"):
        ckptkit.direct.save(tmp_path / "here", {name: np.ma.array([1.0, 2.0]) for name in "ab"})


def test_state_of_a_numpy_generator_is_saved_as_its_refusal_tells(tmp_path: Path) -> None:
    """The remedy of the refusal would be wrong."""
    rng = np.random.default_rng(0)
    for given in (
        args.StandardSave({"rng": rng.bit_generator.state}),
        args.PyTreeSave({"rng": rng.bit_generator.state}),
    ):
        refused(tmp_path / type(given).__name__, ValueError, r"rng\.state\.inc, rng\.state\.state \(an integer", given)
    items = args.Composite(
        state=args.StandardSave(state),
        rng=args.JsonSave(rng.bit_generator.state),
        legacy=args.NumpyRandomKeySave(np.random.get_state()),
    )
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=items)
    expected = rng.random(3)
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        found = manager.restore(0, args=args.Composite(rng=args.JsonRestore(), legacy=args.NumpyRandomKeyRestore()))
    rng.bit_generator.state = found["rng"]
    assert rng.random(3).tolist() == expected.tolist()
    np.random.set_state(found["legacy"])


def test_leaf_of_a_type_handler_of_the_callers_own_is_not_refused(tmp_path: Path) -> None:
    """A handler that stores such leaves could not be used."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ckptkit.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        assert manager.save(0, args=args.PyTreeSave({"m": np.ma.array([1.0, 2.0])}))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_small_items_without_elements_are_saved(tmp_path: Path) -> None:
    """The save would fail in the background, after the copies."""
    keys = jax.random.split(jax.random.key(0), 0)
    items = args.Composite(
        state=args.StandardSave(state), numpy=args.ArraySave(np.zeros((2, 0))), keys=args.JaxRandomKeySave(keys)
    )
    wanted = args.Composite(numpy=args.ArrayRestore(), keys=args.JaxRandomKeyRestore())
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=items)
    for library in (ocp, ckptkit):
        with library.CheckpointManager(tmp_path) as manager:
            found = manager.restore(0, args=wanted)
        assert (found["numpy"].shape, found["keys"].shape, found["keys"].dtype) == ((2, 0), (0,), keys.dtype)
