"""`cleanup_tmp_directories=True` deletes what has no mark: the records of a root have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.leases import pinned_steps
from ckptkit.durable.lifecycle.root_record import SHIELD_KEY
from ckptkit.store import open_store
from ckptkit.store.remote import forget_listings
from ckptkit.testing.bucket import BucketServer
from ckptkit.upkeep import pin, plan_rollback, rollback
from tests.upkeep.conftest import HOST, make_root, manager_of
from tests.upkeep.conftest import save as save_step

ROOT = "gs://runs/run"
CLEANING = {"cleanup_tmp_directories": True, "max_to_keep": 1, "save_interval_steps": 1}
MARKED = {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath}


def save(make: Any, root: Any, step: int, **options: Any) -> None:
    with make(root, options=ocp.CheckpointManagerOptions(**options)) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(4, step)}))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()


@pytest.mark.parametrize("make", [ckptkit.CheckpointManager, ocp.CheckpointManager])
def test_cleaning_of_a_bucket_keeps_pins_and_epochs(server: BucketServer, make: Any) -> None:
    """A pinned step would be pruned, and abandoned steps come back."""
    del server
    make_root(ROOT, [1, 2, 3])
    rollback(plan_rollback(ROOT, 2, host_id=HOST))
    pin(ROOT, 1)
    store = open_store(ROOT)
    before = set(store.list_all("_ckptkit"))
    for step in (4, 5):
        save(make, ROOT, step, **CLEANING)
    assert before <= set(store.list_all("_ckptkit"))
    assert pinned_steps(store) == {1}
    if make is ckptkit.CheckpointManager:
        assert store.list("1"), "the pinned step"


def test_root_of_an_earlier_version_is_shielded_at_its_next_start(server: BucketServer) -> None:
    """Only new roots would be safe."""
    del server
    make_root(ROOT, [1])
    pin(ROOT, 1)
    store = open_store(ROOT)
    store.delete(SHIELD_KEY)
    save(ckptkit.CheckpointManager, ROOT, 2, **CLEANING)
    assert store.stat(SHIELD_KEY) is not None
    assert pinned_steps(store) == {1}


def test_command_shields_what_it_makes(server: BucketServer) -> None:
    """A pin in the root of a stock job would be deleted at that job's next start."""
    del server
    save(ocp.CheckpointManager, ROOT, 1)
    pin(ROOT, 1)
    save(ocp.CheckpointManager, ROOT, 2, cleanup_tmp_directories=True)
    assert pinned_steps(open_store(ROOT)) == {1}


def test_disk_with_marks_is_shielded(tmp_path: Path) -> None:
    """The same option deletes the records of a disk whose steps are committed by a mark."""
    save(ckptkit.CheckpointManager, tmp_path, 1, **MARKED)
    pin(str(tmp_path), 1)
    for make in (ckptkit.CheckpointManager, ocp.CheckpointManager):
        save(make, tmp_path, 2 if make is ckptkit.CheckpointManager else 3, **CLEANING, **MARKED)
        assert pinned_steps(open_store(str(tmp_path))) == {1}, make


def test_cleaning_of_a_bucket_deletes_only_steps(server: BucketServer) -> None:
    """Every directory of a user next to the steps would be deleted, because none has a mark."""
    del server
    make_root(ROOT, [1, 2])
    store = open_store(ROOT)
    store.delete("2/commit_success.txt")
    others = ["2024/notes.txt", "wandb/run.log", "gemma_3/_METADATA", "7/100/_CHECKPOINT_METADATA"]
    for key in others:
        store.put(key, b"mine")
    save(ckptkit.CheckpointManager, ROOT, 3, cleanup_tmp_directories=True)
    assert [key for key in others if store.stat(key) is None] == []
    assert store.list_all("2") == []


def test_tree_without_a_manager_is_not_a_step_in_a_bucket(server: BucketServer) -> None:
    """It has a mark: a restart would try it first, and the run's own pruning count it as the newest step."""
    del server
    make_root(ROOT, [1000, 2000])
    ocp.PyTreeCheckpointer().save(f"{ROOT}/3000", {"w": jnp.ones(3)})
    with manager_of(ROOT, max_to_keep=2) as manager:
        assert manager.all_steps() == [1000, 2000]
        assert int(manager.restore(None)["w"][0]) == 2000
        save_step(manager, 2001)
        manager.reload()
        assert manager.all_steps() == [2000, 2001]
    assert open_store(ROOT).stat("3000/commit_success.txt") is not None


@pytest.mark.usefixtures("server")
def test_listings_of_orbax_are_dropped_although_fsspec_forgot_its_file_system() -> None:
    """Orbax would not find a step that was committed since its last listing."""
    from etils import epath
    from etils.epath import backend

    root = epath.Path("gs://runs/run")
    (root / "1").mkdir(parents=True)
    (root / "1" / "x").write_text("")
    assert [path.name for path in root.iterdir()] == ["1"]
    type(backend.fsspec_backend.fs("gs://runs"))._cache.clear()
    open_store("gs://runs/run").put("2/x", b"")
    forget_listings("gs://runs/run")
    assert sorted(path.name for path in root.iterdir()) == ["1", "2"]
