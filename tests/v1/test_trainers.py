"""The calls of public trainers, as they make them today, replayed over ckptkit and over stock Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as orbax

import ckptkit
from ckptkit import v1 as ours
from tests.states import assert_same
from tests.v1.test_checkpointables import Position

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(params=["ours", "tiers", "orbax"])
def setup(request: Any, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The module that a trainer calls `ocp`, and the checkpointer's arguments that the trainer does not pass."""
    tiers = {"tiers": [ckptkit.Tier.ram(str(tmp_path / "ram"))]} if request.param == "tiers" else {}
    return (orbax if request.param == "orbax" else ours), tiers


def state(step: int) -> Any:
    return {"step": jnp.int32(step), "params": {"w": jnp.full(8, step, jnp.float32)}, "opt": {"m": jnp.ones(8)}}


def maxtext_context(ocp: Any) -> Any:
    context = ocp.Context()
    context.array.saving.use_ocdbt = True
    context.array.saving.use_zarr3 = True
    context.array.saving.ocdbt_target_data_file_size = 2 << 30
    context.array.saving.storage_options.chunk_byte_size = 2 << 30
    context.memory.write_concurrent_bytes = 96 << 30
    context.memory.read_concurrent_bytes = 96 << 30
    context.asynchronous.timeout_secs = 600
    context.pytree.loading.partial_load = True
    return context


def test_maxtext_saves_resumes_and_loads_parameters(setup: Any, tmp_path: Path) -> None:
    """MaxText would end at its first save, or begin its data anew."""
    ocp, tiers = setup
    policies = ocp.training.save_decision_policies

    def make() -> Any:
        made = ocp.training.Checkpointer(
            tmp_path / "run",
            context=maxtext_context(ocp),
            save_decision_policy=policies.AnySavePolicy(
                [policies.FixedIntervalPolicy(2), policies.PreemptionCheckpointingPolicy()]
            ),
            preservation_policy=ocp.training.preservation_policies.LatestN(2),
            **tiers,
        )
        made.use_async = True
        assert isinstance(made, orbax.training.Checkpointer)
        return made

    with make() as checkpointer:
        for step in range(1, 6):
            if checkpointer.should_save(step):
                items = {"items": state(step), "iter": Position(step)}
                checkpointer.save_checkpointables_async(step, items, force=False, custom_metadata={"n": step})
        checkpointer.wait()
        checkpointer.save_checkpointables(5, {"items": state(5), "iter": Position(5)}, force=True)
    with make() as checkpointer:
        latest = checkpointer.latest.step
        assert latest == 5
        position, abstract = Position(), jax.tree.map(jax.typeof, state(0))
        templates = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)
        found = checkpointer.load_checkpointables(latest, {"items": templates, "iter": position})
        assert position.at == 5
        assert_same(found["items"], state(5))
        part = {"params": templates["params"]}
        assert_same(checkpointer.load_checkpointables(latest, {"items": part})["items"], {"params": state(5)["params"]})
        path = checkpointer.directory / str(latest)
    with maxtext_context(ocp):
        assert set(ocp.checkpointables_metadata(path).metadata) >= {"items", "iter"}
        assert_same(ocp.load(path, part, checkpointable_name="items"), {"params": state(5)["params"]})


def test_tunix_saves_and_restores_lora(setup: Any, tmp_path: Path) -> None:
    """Tunix could not restore the LoRA parameters alone."""
    ocp, tiers = setup
    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = False
    names = ocp.path.step.standard_name_format()
    with ocp.training.Checkpointer(
        tmp_path / "run", context=context, step_name_format=names, custom_metadata={"run": "a"}, **tiers
    ) as checkpointer:
        assert checkpointer.latest is None
        saved = checkpointer.save_checkpointables_async(
            3, {"model_params": state(3), "optimizer_state": {"m": jnp.ones(2)}}, custom_metadata={"lr": 0.1}
        )
        assert saved.result()
        checkpointer.wait()
        assert checkpointer.latest is not None
        step = checkpointer.latest.step
        load_context = ocp.Context(context)
        load_context.pytree.loading.partial_load = True
        part = {"params": {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}}
        with ocp.Context(context):
            metadata = checkpointer.checkpointables_metadata(step)
            assert set(metadata.metadata) >= {"model_params", "optimizer_state"}
            assert metadata.custom_metadata == {"lr": 0.1}
        with load_context:
            found = checkpointer.load_checkpointables(step, {"model_params": part})
        assert_same(found["model_params"], {"params": state(3)["params"]})


def test_keras_saves_configuration_and_assets(setup: Any, tmp_path: Path) -> None:
    """`model.fit` with Keras' OrbaxCheckpoint would end at the first epoch."""
    ocp, tiers = setup
    checkpointer = ocp.training.Checkpointer(
        directory=str(tmp_path / "run"),
        preservation_policy=ocp.training.preservation_policies.LatestN(1),
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        **tiers,
    )
    for step in range(2):
        payload = {"pytree": state(step), "model_config": {"config": "{}"}, "assets": {"words.txt": "YWI="}}
        with ocp.Context():
            future = checkpointer.save_checkpointables_async(step, payload)
        assert future.result()
    checkpointer.close()
    with ocp.training.Checkpointer(directory=str(tmp_path / "run"), **tiers) as checkpointer:
        found = checkpointer.load_checkpointables(checkpointer.latest.step)
    assert_same(found["pytree"], state(1))
    assert (found["model_config"], found["assets"]) == ({"config": "{}"}, {"words.txt": "YWI="})
    config = ocp.load(tmp_path / "run" / "1", {"config": str}, checkpointable_name="model_config")
    assert config == {"config": "{}"}
