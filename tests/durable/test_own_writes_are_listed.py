"""Saves and deletions of a run in a bucket are seen by Orbax's half of its manager: gcsfs caches listings."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.testing.bucket import BucketServer
from tests.states import assert_same

args: Any = ocp.args
URL = "gs://runs/run"
SAVES: dict[str, tuple[Any, Any]] = {
    "jax": (lambda n: args.StandardSave({"w": jnp.arange(4.0) + n}), args.StandardRestore()),
    "numpy": (lambda n: args.StandardSave({"w": np.arange(4.0) + n}), args.StandardRestore()),
    "numbers": (lambda n: args.StandardSave({"n": n}), args.StandardRestore()),
    "json": (lambda n: args.JsonSave({"n": n}), args.JsonRestore()),
    "text": (lambda n: args.PyTreeSave({"n": str(n)}), args.PyTreeRestore()),
}


@pytest.mark.parametrize("kind", SAVES)
def test_own_saves_are_seen_where_steps_were_found(server: BucketServer, kind: str) -> None:
    """`restore(None)` would give an older step than the run has saved, and metadata none."""
    save, restore_args = SAVES[kind]
    with ckptkit.CheckpointManager(URL) as manager:
        for step in (1, 2):
            manager.save(step, args=save(step))
    with ckptkit.CheckpointManager(URL) as manager:
        manager.metadata(2)
        for step in (3, 4):
            manager.save(step, args=save(step))
        manager.wait_until_finished()
        assert manager.metadata(4).commit_timestamp_nsecs > manager.metadata(2).commit_timestamp_nsecs
        manager.item_metadata(4)
        assert_same(manager.restore(None), save(4).item)
        assert_same(manager.restore(3), save(3).item)
        assert_same(manager.restore(4, args=restore_args), save(4).item)


def test_own_deletions_are_seen_where_steps_were_found(server: BucketServer) -> None:
    """A step that was deleted or pruned would be listed, and its metadata read from nothing."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ckptkit.CheckpointManager(URL, options=options) as manager:
        for step in (1, 2):
            manager.save(step, args=args.JsonSave({"n": step}))
    with ckptkit.CheckpointManager(URL, options=options) as manager:
        manager.metadata(1)
        manager.save(3, args=args.JsonSave({"n": 3}))
        manager.wait_until_finished()
        manager._durable.wait_until_pruned()
        with pytest.raises(ckptkit.StepNotFoundError):
            manager.metadata(1)
        manager.delete(3)
        with pytest.raises(ckptkit.StepNotFoundError):
            manager.metadata(3)
        assert manager.restore(None) == {"n": 2}
