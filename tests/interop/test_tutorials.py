"""The lessons of Orbax's public tutorials, in our words against our import: each lesson runs with both managers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from tests.nnx_models import Net
from tests.states import assert_same, mesh, put

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

Options = ocp.CheckpointManagerOptions
Managers = {"ours": ckptkit.CheckpointManager, "tiers": ckptkit.CheckpointManager, "orbax": ocp.CheckpointManager}


@pytest.fixture(params=list(Managers))
def managed(request: Any, tmp_path: Path) -> Any:
    """Makes managers of one kind over one root."""
    tier = ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(2))
    ours: dict[str, Any] = {"tiers": [tier]} if request.param == "tiers" else {}
    return lambda *args, **options: Managers[request.param](tmp_path / "run", *args, **options, **ours)


def weights(step: int) -> dict[str, Any]:
    return {
        "layer": {"kernel": put(jnp.arange(16.0).reshape(4, 4) + step, "fsdp"), "bias": put(jnp.ones(4))},
        "n": step,
    }


def template() -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, weights(0))


def test_manager_in_a_training_loop(managed: Any) -> None:
    """CheckpointManager: interval, how many to keep, wait, latest, restore."""
    with managed(options=Options(save_interval_steps=2, max_to_keep=3)) as manager:
        for step in range(11):
            manager.save(step, args=ocp.args.StandardSave(weights(step)))
        manager.wait_until_finished()
        assert manager.latest_step() == 10
        assert list(manager.all_steps())[-3:] == [6, 8, 10]
        assert_same(manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(template())), weights(10))
        assert manager.should_save(12)
        assert not manager.should_save(13)


def test_restart_resumes_from_an_existing_directory(managed: Any) -> None:
    """CheckpointManager: an existing directory is found again, and a step that is there is not saved again."""
    with managed(options=Options(save_interval_steps=2)) as manager:
        for step in range(5):
            manager.save(step, args=ocp.args.StandardSave(weights(step)))
    with managed(options=Options(save_interval_steps=2)) as manager:
        begin = manager.latest_step()
        assert begin == 4
        state = manager.restore(begin, args=ocp.args.StandardRestore(template()))
        assert_same(state, weights(4))
        assert not manager.save(begin, args=ocp.args.StandardSave(state))
        assert manager.save(6, args=ocp.args.StandardSave(weights(6)))


def test_best_checkpoints_are_kept(managed: Any) -> None:
    """CheckpointManager: metrics, `best_fn`, `best_mode`."""
    options = Options(best_fn=lambda metrics: metrics["accuracy"], best_mode="max", max_to_keep=2)
    with managed(options=options) as manager:
        for step, accuracy in enumerate([0.1, 0.7, 0.9, 0.3, 0.8]):
            manager.save(step, args=ocp.args.StandardSave(weights(step)), metrics={"accuracy": accuracy})
            manager.wait_until_finished()
        assert manager.best_step() == 2
        assert manager.metrics(2) == {"accuracy": 0.9}
        assert {2, 4} <= set(manager.all_steps())


def test_several_items_in_one_step_are_restored(managed: Any) -> None:
    """Composite: save several, restore all, some, and with templates for some."""
    with managed() as manager:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(weights(1)),
            extra=ocp.args.JsonSave({"lr": 0.1, "names": ["a", "b"]}),
            other=ocp.args.StandardSave({"x": jnp.zeros(3)}),
        )
        manager.save(1, args=args)
        manager.wait_until_finished()
        whole = manager.restore(
            1,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(template()),
                extra=ocp.args.JsonRestore(),
                other=ocp.args.StandardRestore(),
            ),
        )
        assert_same(whole.state, weights(1))
        assert whole["extra"] == {"lr": 0.1, "names": ["a", "b"]}
        some = manager.restore(1, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))
        assert list(some.keys()) == ["extra"]
        described = manager.item_metadata(1)
        assert set(described.keys()) >= {"state", "extra", "other"}


def test_asynchronous_save_is_isolated_from_training(managed: Any) -> None:
    """Async: training goes on, and overwrites what was saved, while the step is written."""
    with managed(options=Options(enable_async_checkpointing=True)) as manager:
        state = {"w": np.arange(1 << 16, dtype=np.float32)}
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.asarray(state["w"])}))
        state["w"][:] = -1
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()
        manager.check_for_errors()
        restored = manager.restore(
            0, args=ocp.args.StandardRestore({"w": jax.ShapeDtypeStruct((1 << 16,), jnp.float32)})
        )
        np.testing.assert_array_equal(restored["w"], np.arange(1 << 16))


def test_restores_to_another_sharding(managed: Any) -> None:
    """Sharding: the template places each array."""
    moved = NamedSharding(mesh(), PartitionSpec("data", "fsdp"))
    with managed() as manager:
        manager.save(0, args=ocp.args.StandardSave(weights(0)))
        manager.wait_until_finished()
        target = template()
        target["layer"]["kernel"] = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=moved)
        restored = manager.restore(0, args=ocp.args.StandardRestore(target))
    assert restored["layer"]["kernel"].sharding == moved
    assert_same(restored, weights(0))


def test_restore_arguments_apply_per_leaf(managed: Any) -> None:
    """PyTree: `construct_restore_args`, another dtype, NumPy instead of device arrays."""
    with managed() as manager:
        manager.save(0, args=ocp.args.PyTreeSave(weights(0)))
        manager.wait_until_finished()
        restore_args = ocp.checkpoint_utils.construct_restore_args(weights(0))
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(weights(0), restore_args=restore_args))
        assert_same(restored, weights(0))
        restore_args["layer"]["kernel"] = ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype(np.float16))
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(weights(0), restore_args=restore_args))
        assert isinstance(restored["layer"]["kernel"], np.ndarray)
        assert restored["layer"]["kernel"].dtype == np.float16


def test_part_of_a_tree_is_restored(managed: Any) -> None:
    """Partial restoring: placeholders, and a template with fewer leaves."""
    with managed() as manager:
        manager.save(0, args=ocp.args.PyTreeSave(weights(0)))
        manager.wait_until_finished()
        target = template()
        target["n"] = ...
        found = manager.restore(0, args=ocp.args.PyTreeRestore(target))
        assert found["n"] is ...
        assert_same(found["layer"], weights(0)["layer"])
        less = {"layer": {"bias": weights(0)["layer"]["bias"]}}
        args = ocp.args.PyTreeRestore(
            less, restore_args=ocp.checkpoint_utils.construct_restore_args(less), partial_restore=True
        )
        assert_same(manager.restore(0, args=args), less)


def test_random_keys_and_arrays_are_restored(managed: Any) -> None:
    """Other kinds of item: a JAX key, NumPy's random state, a single array."""
    np.random.seed(3)
    numpy_state = np.random.get_state()
    args = ocp.args.Composite(
        key=ocp.args.JaxRandomKeySave(jax.random.key(7)),
        numpy=ocp.args.NumpyRandomKeySave(numpy_state),
        array=ocp.args.ArraySave(jnp.arange(5.0)),
    )
    with managed() as manager:
        manager.save(0, args=args)
        manager.wait_until_finished()
        found = manager.restore(
            0,
            args=ocp.args.Composite(
                key=ocp.args.JaxRandomKeyRestore(),
                numpy=ocp.args.NumpyRandomKeyRestore(),
                array=ocp.args.ArrayRestore(),
            ),
        )
    assert_same(found["key"], jax.random.key(7))
    np.testing.assert_array_equal(found["numpy"][1], np.asarray(numpy_state[1]))  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(found["array"], np.arange(5.0))


def test_grain_pipeline_resumes_with_the_next_batch(managed: Any) -> None:
    """Grain: the iterator is saved with the state, and goes on with the next batch."""

    def batches() -> Any:
        return iter(grain.MapDataset.range(64).seed(1).shuffle().batch(4).to_iter_dataset())

    data = batches()
    with managed() as manager:
        for step in range(3):
            next(data)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave({"w": jnp.full(2, step)}), data=grain.checkpoint.CheckpointSave(data)
            )
            manager.save(step, args=args)
            manager.wait_until_finished()
        expected = next(data)
    resumed = batches()
    with managed() as manager:
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore({"w": jnp.zeros(2, int)}), data=grain.checkpoint.CheckpointRestore(resumed)
        )
        manager.restore(manager.latest_step(), args=args)
    np.testing.assert_array_equal(next(resumed), expected)


def test_flax_nnx_model_is_restored(managed: Any) -> None:
    """NNX: split, save the state, make the model abstractly, restore, merge; parameters alone; a pure dict."""
    model = Net(0)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    _, state = nnx.split(model)
    with managed() as manager:
        args = ocp.args.Composite(
            model=ocp.args.StandardSave(state),
            optimizer=ocp.args.StandardSave(nnx.state(optimizer)),
            pure=ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(model, nnx.Param))),
        )
        manager.save(0, args=args)
        manager.wait_until_finished()
        graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Net(0)))
        assert jax.tree.structure(abstract) == jax.tree.structure(ckptkit.abstract_state(lambda: Net(0)))
        pure = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Net(0)), nnx.Param))
        found = manager.restore(
            0, args=ocp.args.Composite(model=ocp.args.StandardRestore(abstract), pure=ocp.args.StandardRestore(pure))
        )
    restored = nnx.merge(graphdef, found["model"])
    assert_same(nnx.state(restored), state)
    assert_same(found["pure"], nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    fresh = Net(1)
    parameters = nnx.state(fresh, nnx.Param)
    nnx.replace_by_pure_dict(parameters, found["pure"])
    nnx.update(fresh, parameters)
    x = jnp.ones((3, 4))
    np.testing.assert_array_equal(nnx.view(fresh, deterministic=True)(x), nnx.view(model, deterministic=True)(x))


def test_custom_metadata_of_run_and_step(managed: Any) -> None:
    """Metadata: of the run, and of a step."""
    with managed(metadata={"project": "p"}) as manager:
        manager.save(0, args=ocp.args.StandardSave(weights(0)), custom_metadata={"note": "first"})
        manager.wait_until_finished()
        assert manager.metadata().custom_metadata == {"project": "p"}
        found = manager.metadata(0)
        assert found.custom_metadata == {"note": "first"}
        assert found.item_metadata["layer"]["kernel"].shape == (4, 4)
        json.dumps(found.custom_metadata)
