"""An item of the caller's that is called `default`, as the one of steps without names is: restored as in Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import v1

args: Any = ocp.args
tree = {"w": jnp.arange(3.0)}
LIBRARIES = pytest.mark.parametrize("library", [ocp, ckptkit], ids=["orbax", "ckptkit"])


def composite(*, alone: bool) -> Any:
    other = {} if alone else {"other": args.JsonSave({"a": 1})}
    return args.Composite(default=args.StandardSave(tree), **other)


def described(found: Any) -> Any:
    """A restored value, or an error, in a form to compare."""
    if isinstance(found, Exception):
        return type(found), str(found).partition("\n")[0]
    if isinstance(found, args.Composite):
        return {name: described(value) for name, value in found.items()}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}


def outcome(call: Any) -> Any:
    try:
        return described(call())
    except ValueError as error:
        return described(error)


def outcomes(manager: Any, step: int) -> list[Any]:
    """The results of each way to ask for the step."""
    return [
        outcome(lambda: manager.restore(step)),
        outcome(lambda: manager.restore(None)),
        outcome(lambda: manager.restore(step, args=args.Composite(default=args.StandardRestore(tree)))),
        outcome(lambda: manager.restore(step, args=args.StandardRestore(tree))),
    ]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("alone", [False, True])
@LIBRARIES
def test_item_called_default_is_restored_as_in_orbax(tmp_path: Path, library: Any, alone: bool) -> None:
    """The manager that saved the step could not restore it, or would return it without its name."""
    with library.CheckpointManager(tmp_path) as manager:  # the step may be stock Orbax's
        manager.save(0, args=composite(alone=alone))
    found = []
    for number, each in enumerate((ocp, ckptkit), start=1):
        with each.CheckpointManager(tmp_path) as manager:
            manager.save(number, args=composite(alone=alone))
            manager.wait_until_finished()
            found.append([outcomes(manager, number), outcomes(manager, 0)])
            assert manager.item_metadata(number)["default"] is not None
    assert found[1] == found[0]
    assert found[1][0][0]["default"] == {"w": [0.0, 1.0, 2.0]}


@LIBRARIES
def test_manager_without_names_reads_the_item_default_alone(tmp_path: Path, library: Any) -> None:
    """A manager that knows nothing of the step's names would take a `Composite` that Orbax refuses."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=composite(alone=False))
    unnamed = pytest.raises(ValueError, match="Cannot provide `args` of type `Composite`")
    with library.CheckpointManager(tmp_path) as manager, unnamed:
        manager.restore(0, args=args.Composite(default=args.StandardRestore(tree)))
    with library.CheckpointManager(tmp_path) as manager:
        assert described(manager.restore(0, args=args.StandardRestore(tree))) == {"w": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize("alone", [False, True])
def test_item_called_default_is_restored_from_the_ramdisk(tmp_path: Path, alone: bool) -> None:
    """A step of the fast tiers would be restored in another form than the durable one."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))]
    options = ocp.CheckpointManagerOptions(save_interval_steps=100)
    with ckptkit.CheckpointManager(tmp_path / "run", options=options, tiers=tiers) as manager:
        for step in (0, 1):
            manager.save(step, args=composite(alone=alone))
            manager.wait_until_finished()
        assert manager.steps()[-1].tiers == ("ram",)
        assert outcomes(manager, 1) == outcomes(manager, 0)
        assert described(manager.restore(1))["default"] == {"w": [0.0, 1.0, 2.0]}
        assert manager.item_metadata(1)["default"] is not None


def test_newer_style_restores_a_checkpointable_called_default(tmp_path: Path) -> None:
    """`Checkpointer` could not load it, neither in the process that saved it nor in the next one."""
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(0, {"default": tree, "other": {"a": 1}})
        assert described(checkpointer.load_checkpointables(0)["default"]) == {"w": [0.0, 1.0, 2.0]}
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        assert described(checkpointer.load(0, tree, checkpointable_name="default")) == {"w": [0.0, 1.0, 2.0]}
    with v1.training.Checkpointer(tmp_path) as checkpointer:
        assert set(checkpointer.load_checkpointables(0)) == {"default", "other"}
