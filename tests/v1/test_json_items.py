"""Steps that Orbax's newer API wrote with an item of JSON: restored whole, by name, and called readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1 as orbax_v1

import ckptkit
from ckptkit.v1 import Checkpointer
from tests.states import assert_same

NOTES = {"x": 1, "y": ["text", None]}
a: Any = ocp.args


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Step 1 with a state and `data.json`, as stock Orbax writes a JSON item."""
    registry = orbax_v1.handlers.local_registry()
    registry.add(orbax_v1.handlers.JsonHandler, checkpointable_name="notes")
    context = orbax_v1.Context()
    context.checkpointables.registry = registry
    with context, orbax_v1.training.Checkpointer(str(tmp_path / "root")) as checkpointer:
        checkpointer.save_checkpointables(1, {"state": {"w": jnp.arange(4.0)}, "notes": NOTES})
    assert (tmp_path / "root/1/notes/data.json").exists()
    return tmp_path / "root"


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_json_item_is_restored_with_all_others(root: Path) -> None:
    """The item would be left out of what a restart gets."""
    state = {"w": jnp.arange(4.0)}
    with ckptkit.CheckpointManager(root) as manager:
        for found in (manager.restore(None), manager.restore(1)):
            assert found["notes"] == NOTES
            assert_same(found["state"], state)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load_checkpointables()["notes"] == NOTES


def test_json_item_is_restored_by_name(root: Path) -> None:
    """A good step would be called damaged."""
    with ckptkit.CheckpointManager(root) as manager:
        assert manager.restore(1, args=a.Composite(notes=a.JsonRestore())) == a.Composite(notes=NOTES)
        template = {"w": jnp.zeros(4)}
        found = manager.restore(1, args=a.Composite(notes=a.JsonRestore(), state=a.StandardRestore(template)))
        assert found["notes"] == NOTES
        assert_same(found["state"], {"w": jnp.arange(4.0)})
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load_checkpointables(1, {"notes": None}) == {"notes": NOTES}


def test_step_with_only_a_json_item_is_readable(root: Path) -> None:
    """`scrub --repair` would put the step aside."""
    assert ckptkit.verify(str(root)).steps[0].state == "unproven"
    (root / "1/state").rename(root.parent / "state")  # as Orbax deletes a checkpointable
    (proof,) = ckptkit.verify(str(root)).steps
    assert (proof.state, proof.findings) == ("unproven", ())
    assert ckptkit.inspect(str(root / "1")).items[0].value == NOTES


def test_item_that_is_not_understood_is_named(root: Path) -> None:
    """The item would be left out of what a restart gets, and nobody would know."""
    (root / "1/words").mkdir()
    (root / "1/words/words.txt").write_text("a b c")
    with ckptkit.CheckpointManager(root) as manager:
        with pytest.raises(ckptkit.ItemNotFoundError, match=r"words can be restored by its own handler only"):
            manager.restore(1)
        assert manager.restore(1, args=a.Composite(notes=a.JsonRestore())) == a.Composite(notes=NOTES)
