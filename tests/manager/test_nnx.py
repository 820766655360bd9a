"""NNX states through the manager: to the bit, from every tier, and as stock Orbax reads and writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import ckptkit
from tests.nnx_models import RULES, Net, Train
from tests.states import assert_same, mesh


def saved(state: Any) -> Any:
    return ocp.args.StandardSave(state)


def wanted(target: Any) -> Any:
    return ocp.args.StandardRestore(target)


@pytest.mark.parametrize("tiers", [True, False])
def test_a_resumed_training_run_draws_the_same_dropout_masks(tmp_path: Path, tiers: bool) -> None:
    """A resume would change the losses: a stream, its counter or a moment would begin anew."""
    fast = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if tiers else []
    train = Train(0)
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=fast) as manager:
        for step in range(3):
            train.step(step)
        manager.save(3, args=saved(nnx.state(train)))
        expected = [train.step(step) for step in range(3, 6)]
    resumed = Train(1)
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=fast) as manager:
        restored = manager.restore(None, args=wanted(ckptkit.abstract_state(resumed)))
    assert isinstance(restored, nnx.State)
    nnx.update(resumed, restored)
    assert [resumed.step(step) for step in range(3, 6)] == expected
    assert_same(nnx.state(resumed), nnx.state(train))


def test_sharded_state_is_restored_without_building_the_model(tmp_path: Path) -> None:
    """A restart would first make a model that it then throws away, or gather it on one device."""
    with nnx.logical_axis_rules(RULES):
        with jax.set_mesh(mesh()):
            state = nnx.state(Train(0, named=True))
        target = ckptkit.abstract_state(lambda: Train(0, named=True), mesh())
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=saved(state))
        manager.wait_until_finished()
        restored = manager.restore(1, args=wanted(target))
    assert_same(restored, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, target)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nnx.Rngs(params=0, dropout=jax.random.key(7, impl="rbg")),
        lambda: nnx.Optimizer(Net(0), optax.adamw(1e-3), wrt=nnx.Param),
        lambda: Net(0),
    ],
    ids=["streams", "optimizer", "model"],
)
def test_every_kind_of_node_round_trips_with_stock_orbax(tmp_path: Path, make: Callable[[], Any]) -> None:
    """A job could not change the import in either direction."""
    node = make()
    state = nnx.state(node)
    target = ckptkit.abstract_state(node)
    with ckptkit.CheckpointManager(tmp_path / "ours", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        manager.save(1, args=saved(state))
        manager.wait_until_finished()
        assert_same(manager.restore(1, args=wanted(target)), state)
    with ocp.CheckpointManager(tmp_path / "ours") as stock:
        assert_same(stock.restore(1, args=wanted(target)), state)
        stock.save(2, args=saved(state))
    with ocp.CheckpointManager(tmp_path / "stock") as stock:
        stock.save(1, args=saved(state))
    for root, step in (("stock", 1), ("ours", 2)):
        with ckptkit.CheckpointManager(tmp_path / root) as manager:
            assert_same(manager.restore(step, args=wanted(target)), state)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_restore_without_a_template_gives_nested_dicts(tmp_path: Path) -> None:
    """A state could be read only by who has the code of the model that wrote it."""
    train = Train(0)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=saved(nnx.state(train)))
        manager.wait_until_finished()
        found = manager.restore(1)
    with ocp.CheckpointManager(tmp_path) as stock:
        expected = stock.restore(1)
    assert type(found) is dict
    assert_same(found, expected)
    pure = jax.tree.map(np.asarray, found["net"]["layers"]["1"]["kernel"]["value"])
    np.testing.assert_array_equal(pure, np.asarray(train.net.layers[1].kernel[...]))


def test_a_module_itself_can_be_saved(tmp_path: Path) -> None:
    """A model that is a tree for JAX would be refused, or saved under names that its state does not have."""
    train = Train(0)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=saved(train))
        manager.wait_until_finished()
        restored = manager.restore(1, args=wanted(ckptkit.abstract_state(train)))
    assert_same(restored, nnx.state(train))
