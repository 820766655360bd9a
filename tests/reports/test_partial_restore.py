"""A part of a checkpoint, and a model that differs from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import ckptkit
from tests.reports.managers import args, over, restored, saved
from tests.reports.reported import reported
from tests.states import abstract, assert_same


def _state() -> dict[str, Any]:
    params = {"w": jnp.arange(4.0), "b": jnp.ones(2)}
    return {"params": params, "opt_state": optax.adam(0.1).init(params), "step": 7}


@reported("google/orbax/issues/331", "Inference loads the parameters of a train state, and nothing else.")
def test_parameters_of_a_train_state_are_restored_alone(tmp_path: Path) -> None:
    state = _state()
    saved(tmp_path, state)
    wanted = args.PyTreeRestore(abstract({"params": state["params"]}), partial_restore=True)
    with over(tmp_path, read_only=True) as manager:
        assert_same(manager.restore(0, args=wanted), {"params": state["params"]})


@reported("google/orbax/issues/487", "Old checkpoints without an item and new ones with it are read by one program.")
def test_step_without_an_item_is_told_from_one_that_has_it(tmp_path: Path) -> None:
    state, batch = args.StandardSave({"w": jnp.ones(2)}), args.StandardSave({"x": jnp.zeros(3)})
    with over(tmp_path) as manager:
        manager.save(0, args=args.Composite(state=state))
        manager.save(1, args=args.Composite(state=state, last_batch=batch))
    with over(tmp_path) as manager:
        assert [sorted(manager.restore(step).keys()) for step in (0, 1)] == [["state"], ["last_batch", "state"]]
        with pytest.raises(ckptkit.ItemNotFoundError, match=r'Item "last_batch" was not found.*\[\'state\'\]'):
            manager.restore(0, args=args.Composite(last_batch=args.StandardRestore()))


def _layers(count: int) -> dict[str, Any]:
    return {f"layer_{at}": {"w": jnp.full(2, at)} for at in range(count)}


@reported("google/orbax/issues/2972", "A larger model than the one that was saved is an error, not half restored.")
def test_larger_model_is_refused_with_all_missing_leaves(tmp_path: Path) -> None:
    saved(tmp_path, _layers(2))
    with pytest.raises(ckptkit.TreeMismatchError) as caught:
        restored(tmp_path, abstract(_layers(4)))
    for name in ("layer_2.w", "layer_3.w"):
        assert f"{name} is int32[2] in abstract_state, but not on disk" in str(caught.value)


@reported("pytorch/pytorch/issues/148252", "Leaves of the checkpoint that the model lacks are not skipped silently.")
def test_smaller_model_is_refused_with_all_leaves_that_it_lacks(tmp_path: Path) -> None:
    saved(tmp_path, _layers(4))
    with pytest.raises(ckptkit.TreeMismatchError) as caught:
        restored(tmp_path, abstract(_layers(2)))
    for name in ("layer_2.w", "layer_3.w"):
        assert f"{name} is int32[2] on disk, but not in abstract_state" in str(caught.value)


@reported("NVIDIA-NeMo/Megatron-Bridge/pull/6032", "A resume never goes on with weights that were left as initialised.")
def test_other_shape_is_refused_and_not_cut(tmp_path: Path) -> None:
    saved(tmp_path, {"w": jnp.ones((4, 2)), "v": jnp.ones(3)})
    wanted = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32), "v": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(ckptkit.TreeMismatchError, match=r"w is float32\[4,2\] on disk, float32\[4,3\]"):
        restored(tmp_path, wanted)


@reported("google/flax/issues/880", "Items that are saved apart are restored apart.")
def test_one_item_is_restored_without_the_others(tmp_path: Path) -> None:
    state = _state()
    items = {name: args.StandardSave(state[name]) for name in ("params", "opt_state")}
    with over(tmp_path) as manager:
        manager.save(0, args=args.Composite(**items))
    for file in (tmp_path / "0" / "opt_state" / "d").iterdir():
        file.unlink()  # nothing of the other item is read
    with over(tmp_path) as manager:
        found = manager.restore(0, args=args.Composite(params=args.StandardRestore(abstract(state["params"]))))
    assert_same(found["params"], state["params"])
