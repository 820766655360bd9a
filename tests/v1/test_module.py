"""`from ckptkit import v1 as ocp` in place of `from orbax.checkpoint import v1 as ocp`: every public name is there."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as orbax

from ckptkit import v1 as ours
from tests.states import assert_same


def public(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(public(orbax)))
def test_every_public_name_of_orbax_is_there(name: str) -> None:
    """A trainer that changes its import would end with AttributeError."""
    theirs, found = getattr(orbax, name), getattr(ours, name)
    if isinstance(theirs, ModuleType):
        assert set(public(theirs)) <= set(public(found))
    else:
        assert found is theirs


def test_checkpointer_takes_every_argument_of_orbax() -> None:
    """A call of a trainer would raise TypeError."""
    with_all = {"__init__"}  # that hand `**options` on
    for name, method in [
        ("__init__", orbax.training.Checkpointer.__init__),
        *inspect.getmembers(orbax.training.Checkpointer),
    ]:
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            asked, given = (inspect.signature(each).parameters for each in (method, getattr(ours.Checkpointer, name)))
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values()):
                with_all.add(name)
            else:
                assert set(asked) <= set(given), name
    older = {"save_pytree", "save_pytree_async", "load_pytree", "load_pytree_async", "pytree_metadata"}
    assert with_all == {"__init__", "save", "save_checkpointables"} | older
    asked, given = (inspect.signature(each.Checkpointer).parameters for each in (orbax.training, ours.training))
    assert set(asked) <= set(given)


def test_checkpointer_is_an_instance_of_orbax(tmp_path: Path) -> None:
    """MaxText asserts it."""
    with ours.training.Checkpointer(tmp_path) as checkpointer:
        assert isinstance(checkpointer, orbax.training.Checkpointer)
        checkpointer.use_async = True  # pyright: ignore[reportAttributeAccessIssue]  as MaxText does


def test_free_functions_read_a_step(tmp_path: Path) -> None:
    """Keras restores with the free functions what its callback has saved."""
    state = {"w": jnp.arange(4.0)}
    with ours.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(3, {"pytree": state, "config": {"text": "a"}})
    step = str(tmp_path / "3")
    assert ours.is_orbax_checkpoint(step)
    assert set(ours.checkpointables_metadata(step).metadata) == {"pytree", "config"}
    found = ours.load_checkpointables(step, {"pytree": state, "config": {"text": str}})
    assert_same(found["pytree"], state)
    assert found["config"] == {"text": "a"}
