"""A durable root on a mounted bucket, as GCSFuse has it: steps are committed by a mark, as in the bucket itself."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

import ckptkit
from ckptkit import direct
from ckptkit.durable.abandoned import clean_left, left_behind
from ckptkit.durable.lifecycle.listing import latest_step
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.read_step import identity_metadata
from ckptkit.durable.write_step import StepWriter
from ckptkit.errors import CheckpointError
from ckptkit.inspection import list_steps
from ckptkit.job.coordination import make_coordinator
from ckptkit.model import paths
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import SaveId
from ckptkit.store import open_store
from ckptkit.upkeep import copy, plan_copy
from tests.mount import MountedBucket


def make_manager(root: Path, **options: object) -> ckptkit.CheckpointManager:
    made = ocp.CheckpointManagerOptions(save_interval_steps=1, **options)  # pyright: ignore[reportArgumentType]
    return ckptkit.CheckpointManager(root, options=made)


def save(manager: ckptkit.CheckpointManager | ocp.CheckpointManager, step: int) -> None:
    state = {"w": jnp.full(3000, float(step)), "b": jnp.full(3, float(step))}
    assert manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def restored(manager: ckptkit.CheckpointManager | ocp.CheckpointManager, step: int | None = None) -> float:
    args = ocp.args.StandardRestore({"w": jnp.zeros(3000), "b": jnp.zeros(3)})  # pyright: ignore[reportCallIssue]
    found = manager.restore(step, args=args)
    assert (found["w"] == found["w"][0]).all()
    assert (found["b"] == found["w"][0]).all()
    return float(found["w"][0])


def test_steps_are_written_in_place_and_read_by_stock_orbax(mounted_bucket: MountedBucket) -> None:
    """A rename of a step would be as many copies as it has objects, and half a step where one fails."""
    root = mounted_bucket.path / "run"
    with make_manager(root, max_to_keep=2) as manager:
        for step in (1, 2, 3):
            save(manager, step)
        assert list(manager.all_steps()) == [2, 3]
    assert not (root / "1").exists(), "its directories are removed too"
    assert (root / "3" / paths.COMMIT_MARK).exists()
    assert open_store(root).list(paths.INTENTS_DIR) == []
    with make_manager(root) as manager:
        assert restored(manager) == 3.0
    with ocp.CheckpointManager(root) as stock:
        assert stock.all_steps() == [2, 3]
        assert restored(stock, 2) == 2.0
    assert [(each.step, each.state) for each in list_steps(str(root), host_id="h").steps] == [
        (2, "committed"),
        (3, "committed"),
    ]
    assert [proof.state for proof in ckptkit.verify(str(root)).steps] == ["proven", "proven"]


def test_steps_that_stock_orbax_renamed_are_found(mounted_bucket: MountedBucket) -> None:
    """A job on GCSFuse that changes over to ckptkit would begin again from nothing."""
    root = mounted_bucket.path / "run"
    with ocp.CheckpointManager(root) as stock:
        save(stock, 1)
        save(stock, 2)
    for step in (1, 2):  # Orbax puts the mark since 0.12: older ones rename alone
        (root / str(step) / paths.COMMIT_MARK).unlink()
    with make_manager(root, cleanup_tmp_directories=True, max_to_keep=3) as manager:
        assert list(manager.all_steps()) == [1, 2]
        assert restored(manager) == 2.0
        save(manager, 3)
        save(manager, 4)
        assert list(manager.all_steps()) == [2, 3, 4]
    assert [each.state for each in list_steps(str(root), host_id="h").steps] == ["committed"] * 3
    with pytest.raises(StepAlreadyExistsError):
        write_step(root, 2, 9)
    assert read_step(root, 2) == 2.0


def test_copy_onto_a_mount_is_committed_by_its_mark(mounted_bucket: MountedBucket, tmp_path: Path) -> None:
    """The copy would be renamed file by file, and a part of it be a step meanwhile."""
    with make_manager(tmp_path / "run") as manager:
        save(manager, 1)
    mounted_bucket.set()
    copy(plan_copy(str(tmp_path / "run"), str(mounted_bucket.path / "run")))
    with make_manager(mounted_bucket.path / "run") as manager:
        assert restored(manager) == 1.0
    assert open_store(mounted_bucket.path / "run").list(paths.INTENTS_DIR) == []
    copy(plan_copy(str(mounted_bucket.path / "run"), str(tmp_path / "back")))
    with ocp.CheckpointManager(tmp_path / "back") as stock:
        assert restored(stock) == 1.0


def test_cleanup_removes_what_is_not_committed_and_nothing_else(mounted_bucket: MountedBucket) -> None:
    """`cleanup_tmp_directories` takes every directory without a mark for half a save: stock steps would go."""
    root = mounted_bucket.path / "run"
    with ocp.CheckpointManager(root) as stock:
        save(stock, 1)
    (root / "1" / paths.COMMIT_MARK).unlink()
    with make_manager(root) as manager:
        save(manager, 2)
        save(manager, 3)
    (root / "3" / paths.COMMIT_MARK).unlink()
    shutil.copytree(root / "2", root / f"4{paths.TEMPORARY}-x")
    assert left_behind(open_store(root), [1, 2]) == [f"4{paths.TEMPORARY}-x", "3"]
    with make_manager(root, cleanup_tmp_directories=True) as manager:
        assert list(manager.all_steps()) == [1, 2]
    assert sorted(each.name for each in root.iterdir()) == ["1", "2", paths.SIDECAR_DIR]


@pytest.mark.parametrize("mendable", [True, False], ids=["repaired", "put aside"])
def test_damaged_step_is_treated_without_a_rename_of_its_directory(
    mounted_bucket: MountedBucket, tmp_path: Path, mendable: bool
) -> None:
    """A repair that dies would leave a part of the step under its name."""
    root, ram = mounted_bucket.path / "run", tmp_path / "ram"
    options = ocp.CheckpointManagerOptions(save_interval_steps=1)
    tiers = [ckptkit.Tier.ram(str(ram))]
    with ckptkit.CheckpointManager(root, options=options, tiers=tiers, host_id="h") as manager:
        save(manager, 1)
        save(manager, 2)
    data = max((root / "2" / "default" / "d").iterdir(), key=lambda each: each.stat().st_size)
    found = bytearray(data.read_bytes())
    found[len(found) // 2] ^= 1
    data.write_bytes(found)
    scrub = ckptkit.scrub(str(root), [str(ram)] if mendable else [], repair=True, host_id="h")
    assert [(each.step, each.act, each.done) for each in scrub.treatments] == [
        (2, "repair" if mendable else "quarantine", True)
    ]
    assert [(each.step, each.state) for each in ckptkit.verify(str(root)).steps] == [
        (step, "proven") for step in ((1, 2) if mendable else (1,))
    ]
    assert (root / "2").exists() == mendable
    assert not [each for each in (root / paths.SIDECAR_DIR).iterdir() if each.name.startswith("repair-")]
    with ocp.CheckpointManager(root) as stock:
        assert restored(stock) == (2.0 if mendable else 1.0)


def write_step(root: Path, step: int, epoch: int) -> None:
    """One save of a run of this epoch, after what earlier ones have left is removed."""
    clean_left(open_store(root), epoch, shutil.rmtree)
    value = np.full(3000, float(step), np.float32)
    items = {"default": HostTreeSave({"w": value, "b": value[:3]}, handler=ocp.StandardCheckpointHandler.typestr())}
    save_id = SaveId(epoch, step, 0)
    writer = StepWriter(str(root), make_coordinator(), DurableProfile())
    writer.write(str(step), save_id, items, identity_metadata(save_id))()


def read_step(root: Path, step: int) -> float:
    """By stock Orbax; every value is looked at."""
    found = ocp.StandardCheckpointer().restore(root / str(step) / "default")
    assert set(np.unique(found["w"])) == set(np.unique(found["b"]))
    return float(found["w"][0])


@dataclass
class Attempt:
    """A save onto a mount that may die: whether it was reported as done, and whether the mount died."""

    reported: bool = False
    died: bool = False


@contextmanager
def dying(bucket: MountedBucket, changes_max: int, lag: int = 0) -> Iterator[Attempt]:
    """The mount dies after so many changes of the body, and loses what was not an object yet; then it lives again."""
    attempt = Attempt()
    bucket.set(changes_max=changes_max, listing_lag=lag)
    with suppress(CheckpointError, OSError, ValueError):
        yield attempt
        attempt.reported = True
    attempt.died = bucket.changes() >= changes_max
    bucket.revive()
    bucket.set()


@pytest.mark.parametrize(
    ("lag", "stride"),
    [
        pytest.param(0, 1, id="listed at once", marks=pytest.mark.long),
        pytest.param(2, 1, id="listed late", marks=pytest.mark.long),
        pytest.param(2, 4, id="listed late, every fourth change"),
    ],
)
def test_crash_after_any_change_leaves_the_whole_step_or_none(
    mounted_bucket: MountedBucket, lag: int, stride: int
) -> None:
    """Readers would restore a part of a step. Enumerated: the mount dies after every change that a save makes, and
    loses what was not an object yet; then the next run reads, cleans up and saves the same number."""
    outcomes: list[bool] = []
    root = mounted_bucket.path
    for changes_max in itertools.count(step=stride):
        root = mounted_bucket.path / f"run-{changes_max}"
        write_step(root, 2, 1)
        with dying(mounted_bucket, changes_max, lag) as attempt:
            write_step(root, 3, 1)
        whole = latest_step(str(root)) == 3
        assert latest_step(str(root)) in (2, 3), f"after {changes_max} changes"
        assert whole == (root / "3" / paths.COMMIT_MARK).exists(), f"after {changes_max} changes"
        assert whole or not attempt.reported, f"after {changes_max} changes a step is lost that was reported"
        if whole:
            assert read_step(root, 3) == 3.0
            with pytest.raises(StepAlreadyExistsError):
                write_step(root, 3, 2)
        else:
            write_step(root, 3, 2)
        assert left_behind(open_store(root), [2, 3]) == []
        assert open_store(root).list(paths.INTENTS_DIR) == []
        outcomes.append(whole)
        if not attempt.died:
            break
    assert (read_step(root, 2), read_step(root, 3)) == (2.0, 3.0)
    assert outcomes.count(False) * stride > 10
    assert outcomes.count(True) > (stride == 1), "a death after the mark, too"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's threads in a failed save
@pytest.mark.usefixtures("orbax_may_fail")
def test_crash_of_one_tree_after_any_change_leaves_the_whole_tree_or_none(mounted_bucket: MountedBucket) -> None:
    """`direct.save` to a mount: a load would find a part of the tree, without the digests that tell so. The mount dies
    after every change; then the tree is read, and saved again."""
    path, tree = mounted_bucket.path, {"w": np.arange(3000.0), "b": np.arange(3.0)}
    outcomes: list[bool] = []
    for changes_max in itertools.count():
        path = mounted_bucket.path / f"tree-{changes_max}"
        with dying(mounted_bucket, changes_max) as attempt:
            direct.save(path, tree)
        try:
            found = direct.load(path)
            assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in tree.items()}
            whole = True
        except (CheckpointError, FileNotFoundError):
            whole = False
        assert whole or not attempt.reported, f"after {changes_max} changes a tree is lost that was reported"
        assert whole or not (path / paths.COMMIT_MARK).exists(), f"after {changes_max} changes the mark tells a lie"
        if not whole:
            direct.save(path, tree, force=True)
            assert direct.load(path)["w"][-1] == 2999.0
        outcomes.append(whole)
        if not attempt.died:
            break
    assert (path / paths.COMMIT_MARK).exists()
    stock = ocp.StandardCheckpointer().restore(path)
    assert stock["w"][-1] == 2999.0
    assert outcomes.count(False) > 10
