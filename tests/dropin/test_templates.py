"""The targets of restores, as Orbax's helpers make them: templates, restore arguments, parts of a tree, iterators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.states import assert_same, make_state

args: Any = ocp.args
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
construct: Any = ocp.checkpoint_utils.construct_restore_args


def make_manager(path: Path, source: str) -> Any:
    """Steps are restored from `source`: of the ramdisk where there is one, next to an older durable step."""
    tiers = [ckptkit.Tier.ram(str(path / "ram"))] if source == "ram" else []
    options = ocp.CheckpointManagerOptions(save_interval_steps=100 if source == "ram" else 1)
    return ckptkit.CheckpointManager(path / "run", options=options, tiers=tiers, host_id="host")


def restored(path: Path, source: str, save: Any, wanted: Any) -> Any:
    """The second step of two that hold the same, from `source`."""
    with make_manager(path, source) as manager:
        for step in (0, 1):
            assert manager.save(step, args=save)
            manager.wait_until_finished()
        return manager.restore(1, args=wanted)


@pytest.mark.parametrize("source", ["durable", "ram"])
@pytest.mark.parametrize("kind", ["standard", "pytree"])
def test_typed_keys_are_restored_with_the_documented_template(tmp_path: Path, source: str, kind: str) -> None:
    """A state with a Dropout or any other key could not be restored: the helper makes key data of keys."""
    state = make_state(3)
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    assert template["keys"].dtype == np.uint32
    if kind == "standard":
        found = restored(tmp_path, source, args.StandardSave(state), args.StandardRestore(template))
    else:
        wanted = args.PyTreeRestore(template, restore_args=construct(template))
        found = restored(tmp_path, source, args.PyTreeSave(state), wanted)
    assert_same(found, state)
    assert found["keys"].sharding.is_equivalent_to(state["keys"].sharding, 1)


@pytest.mark.parametrize("source", ["orbax", "durable", "ram"])
def test_placeholder_in_a_standard_restore_is_a_value_error(tmp_path: Path, source: str) -> None:
    """A step that only a fast tier holds was reported as one that cannot be restored at all."""
    state = {"w": jnp.arange(4.0), "b": jnp.zeros(2)}
    save, wanted = args.StandardSave(state), args.StandardRestore({"w": ..., "b": state["b"]})
    if source != "orbax":
        with pytest.raises(ckptkit.TreeMismatchError, match=r"default:w is `\.\.\.` in abstract_state"):
            restored(tmp_path, source, save, wanted)
        return
    with ocp.CheckpointManager(tmp_path / "stock") as manager:
        manager.save(0, args=save)
        with pytest.raises(ValueError, match="'w'"):
            manager.restore(0, args=wanted)


def test_key_data_of_another_shape_are_a_mismatch(tmp_path: Path) -> None:
    """Keys would be given for an array that has nothing to do with them."""
    wanted = args.StandardRestore({"k": jax.ShapeDtypeStruct((4,), np.uint32)})
    with pytest.raises(ckptkit.TreeMismatchError, match=r"k is threefry2x32\[2\] on disk, uint32\[4\]"):
        restored(tmp_path, "durable", args.StandardSave({"k": jax.random.key(0)}), wanted)


@pytest.mark.parametrize("source", ["durable", "ram"])
@pytest.mark.parametrize("count", [None, 3])
def test_typed_keys_of_another_number_are_a_mismatch(tmp_path: Path, source: str, count: int | None) -> None:
    """A template of one key got all four that were saved."""
    saved = jax.random.split(jax.random.key(0), 4)
    wanted = args.StandardRestore({"k": saved[0] if count is None else saved[:count]})
    asked = "" if count is None else count
    with pytest.raises(ckptkit.TreeMismatchError, match=rf"k is key<fry>\[4\] on disk, key<fry>\[{asked}\] in"):
        restored(tmp_path, source, args.StandardSave({"k": saved}), wanted)


@pytest.mark.parametrize("source", ["durable", "ram"])
def test_restore_args_with_the_stored_shapes_need_no_durable_step(tmp_path: Path, source: str) -> None:
    """A restart would go back to the durable step: `construct_restore_args` sets shapes by default."""
    state = make_state(3)
    wanted = args.PyTreeRestore(state, restore_args=construct(state))
    assert wanted.restore_args["w"].global_shape == (8, 8)
    assert_same(restored(tmp_path, source, args.PyTreeSave(state), wanted), state)


@pytest.mark.parametrize("source", ["durable", "ram"])
def test_restore_args_with_another_shape_are_a_mismatch(tmp_path: Path, source: str) -> None:
    """A strict wish would be cut or padded."""
    template = {"w": jnp.zeros(3), "v": jnp.zeros(4)}
    wanted = args.PyTreeRestore(template, restore_args=construct(template))
    with pytest.raises(ckptkit.TreeMismatchError, match=r"w is float32\[8\] on disk, of shape \(3,\) in restore_args"):
        restored(tmp_path, source, args.PyTreeSave({"w": jnp.arange(8.0), "v": jnp.ones(4)}), wanted)


PARTS: dict[str, Any] = {
    "placeholder": lambda on: args.PyTreeRestore({"a": 0, "b": ocp.PLACEHOLDER}),
    "placeholder in restore_args": lambda on: args.PyTreeRestore(
        {"a": 0, "b": ocp.PLACEHOLDER}, restore_args={"a": ocp.ArrayRestoreArgs(sharding=on), "b": ocp.PLACEHOLDER}
    ),
    "placeholder, constructed": lambda on: args.PyTreeRestore(
        {"a": jnp.zeros(4), "b": ocp.PLACEHOLDER}, restore_args=construct({"a": jnp.zeros(4), "b": ocp.PLACEHOLDER})
    ),
    "partial": lambda on: args.PyTreeRestore({"a": 0}, partial_restore=True),
    "partial, args of the whole": lambda on: args.PyTreeRestore(
        {"a": 0},
        restore_args={"a": ocp.ArrayRestoreArgs(sharding=on), "b": ocp.ArrayRestoreArgs(sharding=on)},
        partial_restore=True,
    ),
    "partial, constructed": lambda on: args.PyTreeRestore(
        {"a": jnp.zeros(4)}, restore_args=construct({"a": jnp.zeros(4)}), partial_restore=True
    ),
}


@pytest.mark.parametrize("source", ["durable", "ram"])
@pytest.mark.parametrize("part", PARTS)
def test_part_of_a_tree_is_restored_as_stock_orbax_does(tmp_path: Path, source: str, part: str) -> None:
    """Parameters alone, for evaluation or LoRA, could be had from a durable step only."""
    wanted = PARTS[part](jax.sharding.SingleDeviceSharding(jax.devices()[1]))
    save = args.PyTreeSave({"a": jnp.arange(4.0), "b": jnp.ones(2)})
    found = restored(tmp_path, source, save, wanted)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        expected = stock.restore(0, args=wanted)
    assert set(found) == set(expected)
    assert found.get("b") is expected.get("b")
    assert_same(found["a"], expected["a"])
    assert found["a"].sharding == expected["a"].sharding


def loader(**options: Any) -> Any:
    sampler = grain.samplers.IndexSampler(
        100, shuffle=True, seed=1, num_epochs=1, shard_options=grain.sharding.NoSharding()
    )
    return iter(grain.DataLoader(data_source=range(100), sampler=sampler, worker_count=0, **options))  # pyright: ignore[reportArgumentType]


ITERATORS: dict[str, Any] = {
    "DataLoader": loader,
    "DataLoader with batches": lambda: loader(operations=[grain.transforms.Batch(4)]),
    "MapDataset": lambda: iter(grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset()),
    "IterDataset with batches": lambda: iter(grain.MapDataset.range(100).to_iter_dataset().batch(4)),
    "mixture": lambda: iter(
        grain.MapDataset.mix([grain.MapDataset.range(50), grain.MapDataset.range(50, 99)]).to_iter_dataset()
    ),
}


def set_state(state: Any) -> None:
    """As an iterator of a pipeline with a shuffled window, for the state of one without."""
    state["parent_window_start_state"]


@pytest.mark.parametrize("beside", [False, True])
def test_changed_pipeline_is_not_called_damage(tmp_path: Path, beside: bool) -> None:
    """Every older step would be tried, and the caller be told to repair whole steps."""
    state = {"state": args.StandardSave({"w": jnp.arange(4.0)})} if beside else {}
    wanted = {"state": args.StandardRestore({"w": jnp.arange(4.0)})} if beside else {}
    saved, changed = ITERATORS["MapDataset"](), ITERATORS["IterDataset with batches"]()
    changed.set_state = set_state
    with make_manager(tmp_path, "durable") as manager:
        manager.save(0, args=args.Composite(data=grain.checkpoint.CheckpointSave(saved), **state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        with pytest.raises(KeyError, match="parent_window_start_state"):
            manager.restore(None, args=args.Composite(data=grain.checkpoint.CheckpointRestore(changed), **wanted))  # pyright: ignore[reportCallIssue]
        assert manager.all_steps() == [0]


@pytest.mark.parametrize("source", ["durable", "ram"])
@pytest.mark.parametrize("kind", ITERATORS)
def test_grain_iterator_continues_where_it_was_saved(tmp_path: Path, source: str, kind: str) -> None:
    """A restart would repeat or skip data, or not start: `DataLoader` keeps its state as bytes."""
    make = ITERATORS[kind]
    iterator, other = make(), make()
    for _ in range(5):
        next(iterator)
    state = {"w": jnp.arange(4.0)}
    save = args.Composite(state=args.StandardSave(state), data=grain.checkpoint.CheckpointSave(iterator))  # pyright: ignore[reportCallIssue]
    wanted = args.Composite(state=args.StandardRestore(state), data=grain.checkpoint.CheckpointRestore(other))  # pyright: ignore[reportCallIssue]
    restored(tmp_path, source, save, wanted)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        third = make()
        stock.restore(0, args=args.Composite(data=grain.checkpoint.CheckpointRestore(third)))  # pyright: ignore[reportCallIssue]
    expected = next(iterator)
    for each in (other, third):
        np.testing.assert_array_equal(next(each), expected)
