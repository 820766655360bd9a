"""`from ckptkit import v1 as ocp` in place of `from orbax.checkpoint import v1 as ocp`: every public name is there."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from orbax.checkpoint import v1 as orbax

from ckptkit import v1 as ours
from tests.states import assert_same


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
