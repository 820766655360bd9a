"""Surgery over every kind of checkpoint: what is taken is to the bit, and nothing else is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from ckptkit.surgery import Cast, Init, Rename, Skip, SurgeryError, Take, restore_into
from tests.nnx_models import Net, Train
from tests.states import assert_same, make_state, mesh, raw, save_args

PARAMETERS_ONLY = (Skip("optimizer.**"), Rename("net.**", "**"))


class LoraNet(nnx.Module):
    """`Net` with its first layer wrapped."""

    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.net = Net(seed)
        self.net.first = nnx.LoRA(4, 2, 8, base_module=self.net.first, rngs=rngs)  # pyright: ignore[reportAttributeAccessIssue]


def saved(state: Any) -> Any:
    return ocp.args.StandardSave(state)


def find(state: Any, name: str) -> Any:
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") == name:
            return leaf
    raise KeyError(name)


@pytest.fixture(params=["ram", "durable", "stock"])
def run(request: Any, tmp_path: Path) -> Any:
    """A manager over a trained `Train(0)` that is held by one kind of tier alone, and its state."""
    train = Train(0)
    train.step(0)
    state = nnx.state(train)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if request.param == "ram" else []
    if request.param == "stock":
        with ocp.CheckpointManager(tmp_path / "run") as stock:
            stock.save(1, args=saved(state))
    else:
        with ckptkit.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
            manager.save(1, args=saved(state))
    if request.param == "ram":
        shutil.rmtree(tmp_path / "run" / "1")
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
        yield manager, state


def test_item_of_a_step_is_restored_with_its_checksums(tmp_path: Path) -> None:
    """Damage of an item that is named by its directory would be restored, and the report blame stock Orbax."""
    state = {"w": jnp.arange(4096.0)}
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=saved(state))
        manager.save(2, args=saved(state))
    found, report = restore_into(tmp_path / "run" / "1" / "default", None, state, [Take("**")])
    assert_same(found, state)
    assert (report.proven, report.step, report.item) == (True, 1, "default")
    assert "(proven)" in str(report)
    shutil.copytree(tmp_path / "run" / "1" / "default", tmp_path / "alone")
    _, report = restore_into(tmp_path / "alone", None, state, [Take("**")])
    assert "not proven: read by Orbax, which compares no checksums" in str(report)


def test_restores_only_parameters_into_a_bare_model(run: Any) -> None:
    """An evaluator would have to make the optimizer, and to read three times the bytes."""
    manager, state = run
    fresh = Net(1)
    found, report = restore_into(manager, None, fresh, PARAMETERS_ONLY)
    assert_same(found, state["net"])
    nnx.update(fresh, found)
    assert report.step == 1
    assert not report.plan.initialised
    assert sum(report.read_bytes.values()) in (0, sum(leaf.nbytes for leaf in map(_raw, jax.tree.leaves(found))))
    assert report.proven == (list(report.read_bytes) != ["durable (orbax)"])
    assert json.loads(json.dumps(report.to_json()))["step"] == 1
    assert "taken        first.kernel float32[4,8] from net.first.kernel" in str(report)


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def test_restores_into_a_lora_wrapped_model(run: Any) -> None:
    """Fine-tuning could not begin from the run's checkpoints."""
    manager, state = run
    wrapped = LoraNet(5)
    rules = [
        Skip("optimizer.**"),
        Rename("net.first.*", "net.first.base_module.*"),
        Init("net.first.lora_?"),
        Take("net.**"),
    ]
    found, report = restore_into(manager, 1, wrapped, rules)
    assert raw(find(found, "net.first.base_module.kernel")) == raw(find(state, "net.first.kernel"))
    assert raw(find(found, "net.layers.1.kernel")) == raw(find(state, "net.layers.1.kernel"))
    assert raw(find(found, "net.dropout.rngs.key")) == raw(find(state, "net.dropout.rngs.key"))
    assert [origin.target for origin in report.plan.initialised] == ["net.first.lora_a", "net.first.lora_b"]
    assert raw(find(found, "net.first.lora_a")) == raw(find(nnx.state(LoraNet(5)), "net.first.lora_a"))
    nnx.update(wrapped, found)
    assert wrapped.net(jnp.ones((2, 4))).shape == (2, 2)


def test_another_dtype_is_cast_on_the_devices(run: Any) -> None:
    """A bfloat16 model could not begin from a float32 checkpoint, or would round in another way."""
    manager, state = run
    sharding = NamedSharding(mesh(), PartitionSpec(None, "fsdp"))
    target = {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=sharding)}
    rules = [Rename("net.first.kernel", "kernel"), Skip("**"), Cast("kernel")]
    found, report = restore_into(manager, None, target, rules)
    expected = np.asarray(find(state, "net.first.kernel")).astype(jnp.bfloat16)
    assert raw(found["kernel"]) == raw(expected)
    assert found["kernel"].sharding == sharding
    assert report.plan.taken[0].cast
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    target = {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=alone)}
    with jax.set_mesh(mesh()):  # of other devices than the leaf's
        found, _ = restore_into(manager, None, target, rules)
    assert raw(found["kernel"]) == raw(expected)
    assert found["kernel"].sharding == alone


def test_all_differences_are_reported_without_a_fallback(run: Any) -> None:
    """A wrong rule would be tried on older and older steps, and end as 'no restorable step'."""
    manager, _ = run
    with pytest.raises(SurgeryError, match=r"head\.kernel .* covered by no rule"):
        restore_into(manager, None, Net(0), [Skip("optimizer.**"), Skip("net.head.**"), Rename("net.**", "**")])


def test_skipped_leaves_are_not_read(tmp_path: Path) -> None:
    """A subset would cost the whole checkpoint."""
    state = {"small": jnp.arange(3.0), "large": [jnp.zeros((64, 64)), jnp.ones(4)]}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.CheckpointManager(tmp_path / "stock", item_handlers=handler) as stock:
        stock.save(1, args=ocp.args.PyTreeSave(state))  # pyright: ignore[reportCallIssue]
    (chunk,) = (tmp_path / "stock" / "1" / "default" / "large.0").glob("0*")
    chunk.write_bytes(b"\x00damaged")
    target = {"small": state["small"], "one": state["large"][1]}
    found, _ = restore_into(tmp_path / "stock", 1, target, [Take("small"), Rename("large.1", "one"), Skip("**")])
    assert_same(found, target)
    with ckptkit.CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, args=saved(state))
    _, report = restore_into(tmp_path / "ours", 1, target, [Take("small"), Rename("large.1", "one"), Skip("**")])
    assert report.read_bytes == {"durable": 28}


def test_restore_into_does_not_roll_back(tmp_path: Path) -> None:
    """A run that reads a part of an older step of its own would abandon the steps above it."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=saved({"w": jnp.full(2, step)}))
        manager.wait_until_finished()
        found, _ = restore_into(manager, 1, {"w": jnp.zeros(2, int)}, [Take("**")])
        assert_same(found, {"w": jnp.full(2, 1)})
        manager.save(4, args=saved({"w": jnp.full(2, 4)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 4]


def test_every_leaf_kind_can_be_restored(tmp_path: Path) -> None:
    """Host arrays, numbers, keys and low precision would be changed on the way."""
    state = make_state(3)
    with ckptkit.CheckpointManager(tmp_path / "ours") as manager:
        manager.save(1, args=save_args(state, 1))
    with ocp.CheckpointManager(tmp_path / "stock") as stock:
        stock.save(1, args=save_args(state, 1))
    for root in ("ours", "stock"):
        found, report = restore_into(tmp_path / root, None, {"moved": make_state(0)}, [Rename("**", "moved.**")])
        assert_same(found["moved"], state)
        assert (report.item, report.proven) == ("state", root == "ours")


@pytest.mark.parametrize("stock", [True, False])
@pytest.mark.parametrize(
    ("stored", "target", "expected"),
    [
        (jnp.int32(7), 0, 7),
        (np.int64(7), 0, 7),
        (7, 0, 7),
        (jnp.bfloat16(2.5), 0.0, 2.5),
        (jnp.float32(jnp.inf), 0.0, np.inf),
        (jnp.int32(1), False, True),
        (jnp.int32(2), False, None),
        (jnp.float32(2.5), 0, None),
        (jnp.float32(jnp.inf), 0, None),
        (2**53 + 1, 0.0, None),
    ],
)
def test_an_array_becomes_a_python_number_without_loss(
    tmp_path: Path, stored: Any, target: Any, expected: Any, stock: bool
) -> None:
    """The rule that the error advises would fail, or 2.5 become step 2."""
    if stock:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "run", {"n": stored})
    else:
        with ckptkit.CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, args=saved({"n": stored}))
    rules = [Take("n"), Cast("n")]
    if expected is None:
        with pytest.raises(SurgeryError, match=rf"n is {type(target).__name__} in the new model: .* of n would change"):
            restore_into(tmp_path / "run", None, {"n": target}, rules)
        return
    found, _ = restore_into(tmp_path / "run", None, {"n": target}, rules)
    assert (type(found["n"]), found["n"]) == (type(expected), expected)


def test_restores_from_directories_that_are_not_roots(tmp_path: Path) -> None:
    """Weights that somebody published have a directory of their own."""
    state = {"a": {"w": jnp.arange(4.0)}, "b": jnp.ones(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "published", state)
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=saved(state))
    shutil.copytree(tmp_path / "run" / "7", tmp_path / "renamed")
    rules = [Take("a.w"), Skip("b")]
    proven = {"published": False, "run": True, "run/7": True, "run/7/default": True, "renamed": False}
    for path, is_proven in proven.items():
        found, report = restore_into(str(tmp_path / path), None, {"a": {"w": jnp.zeros(4)}}, rules)
        assert_same(found, {"a": {"w": jnp.arange(4.0)}})
        assert report.proven == is_proven, path
    with pytest.raises(ckptkit.StepNotFoundError, match="is empty or not there"):
        restore_into(str(tmp_path / "none"), None, {}, rules)


def test_one_of_several_items_must_be_named(tmp_path: Path) -> None:
    """The optimizer would be taken for the model."""
    args = ocp.args.Composite(model=saved({"w": jnp.ones(2)}), optimizer=saved({"w": jnp.zeros(2)}))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args)
    with pytest.raises(ValueError, match=r"array items \['model', 'optimizer'\]: name one"):
        restore_into(tmp_path, None, {"w": jnp.full(2, 5.0)}, [Take("w")])
    found, _ = restore_into(tmp_path, None, {"w": jnp.full(2, 5.0)}, [Take("w")], item="model")
    assert_same(found, {"w": jnp.ones(2)})
