"""The order of a deletion, and the files that it must not delete."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint._src.path import deleter

import ckptkit
from ckptkit.durable import prune
from ckptkit.durable.abandoned import clean_left
from ckptkit.durable.lifecycle import delete, leases
from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.orbax.preservation import BranchPreservation
from ckptkit.durable.steps import DurableSteps
from ckptkit.job.coordination import LocalCoordinator
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import MemoryStore, open_store
from ckptkit.testing import FaultyStore, StoreCrash, StoreFault
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Status


class Died(BaseException):
    """The process ends here."""


def make_manager(root: Path | str, **options: Any) -> ckptkit.CheckpointManager:
    return ckptkit.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(**options), processes=ckptkit.ProcessOptions(timeout_s=60)
    )


def save(manager: ckptkit.CheckpointManager, step: int, value: int, make: Any = jnp.full) -> None:
    manager.save(step, args=ocp.args.StandardSave({"w": make(5, value)}))  # pyright: ignore[reportCallIssue]
    manager.wait_until_finished()


def restored(manager: ckptkit.CheckpointManager) -> int:
    return int(manager.restore(None)["w"][0])


@pytest.mark.parametrize("make", [jnp.full, np.full], ids=["jax", "numpy"])
def test_step_that_reuses_an_abandoned_number_is_kept(tmp_path: Path, make: Any) -> None:
    """Its own save would prune it, or a restart take it for the abandoned one: committed, and lost."""
    with make_manager(tmp_path, save_interval_steps=2, max_to_keep=2) as manager:
        for step in (2, 4, 6):
            save(manager, step, step, make)
    with make_manager(tmp_path, save_interval_steps=2, max_to_keep=2) as manager:
        manager.restore(4)
        save(manager, 6, 66, make)
        assert manager.all_steps() == [4, 6]
    with make_manager(tmp_path) as manager:
        assert restored(manager) == 66


def test_abandoned_number_is_reusable_with_background_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save of the new branch would find the old step of its number and fail, or be deleted in its place."""
    move_away = delete.move_away

    def late(where: str) -> str:
        time.sleep(0.3)
        return move_away(where)

    with make_manager(tmp_path, enable_background_delete=True) as manager:
        for step in (1, 2, 3):
            save(manager, step, step)
        monkeypatch.setattr(delete, "move_away", late)
        manager.restore(1)
        for step in (2, 3):
            save(manager, step, 10 * step)
        assert manager.all_steps() == [1, 2, 3]
    with make_manager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2, 3]
        assert restored(manager) == 30


def test_failed_background_deletion_fails_the_reusing_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save would be written over a step that is there."""

    def refused(where: str) -> str:
        raise PermissionError(where)

    manager = make_manager(tmp_path, enable_background_delete=True)
    save(manager, 1, 1)
    save(manager, 2, 2)
    monkeypatch.setattr(delete, "move_away", refused)
    manager.restore(1)
    with pytest.raises(ckptkit.SaveFailedError, match="step 2 was not committed to tier durable: PermissionError"):
        save(manager, 2, 20)
    monkeypatch.undo()
    manager.close()
    with make_manager(tmp_path) as manager:
        assert restored(manager) == 1


def test_deletion_is_agreed_even_if_nothing_is_due_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its own clock deletes nothing, it would miss the barrier, and the others would wait for it."""
    asked: list[str] = []

    agree = LocalCoordinator.agree

    def noted(self: LocalCoordinator, channel: str, *args: Any, **words: Any) -> Any:
        asked.append(channel)
        return agree(self, channel, *args, **words)

    monkeypatch.setattr(LocalCoordinator, "agree", noted)
    options = ocp.CheckpointManagerOptions(keep_time_interval=datetime.timedelta(hours=1), max_to_keep=5)
    durable = DurableSteps(str(tmp_path), options, LocalCoordinator())
    durable.save(SaveId(1, 1, 1), {"state": HostTreeSave({"w": np.ones(2)})}, metrics=None, ancestry=Ancestry())
    durable.close()
    assert asked[-1] == "leases"


def test_steps_of_an_abandoned_branch_are_not_kept() -> None:
    """They would push good steps out of `max_to_keep`."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    steps = [SimpleNamespace(step=step, time=None, metrics=None) for step in (1, 2, 3, 4)]
    assert BranchPreservation(options, lambda step: step).doomed(steps, {3, 4}) == [3, 4]


@pytest.mark.parametrize("background", [False, True], ids=["in place", "background"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_crashed_deletion_leaves_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    """`latest_step` would name a step that is half gone, at every restart."""
    removed: list[str] = []

    def died(self: Any, path: epath.Path, *_: Any, **__: Any) -> None:
        removed.append(path.name)
        raise Died

    with make_manager(tmp_path, enable_background_delete=background) as manager:
        save(manager, 1, 1)
        save(manager, 2, 2)
        monkeypatch.setattr(deleter.PathDeleter, "delete", died)
        try:
            manager.delete(2)
            manager.close()
        except Died:
            pass
        monkeypatch.undo()
    assert [name.partition("-")[0] for name in removed] == ["2"]
    assert not (tmp_path / "2").exists(), "its name goes first"
    with make_manager(tmp_path) as manager:
        assert manager.all_steps() == [1]
        assert restored(manager) == 1
        save(manager, 2, 22)
        assert restored(manager) == 22
        manager.delete(2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "_ckptkit") == ["1"]


def test_bucket_deletion_removes_the_mark_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a bucket, where a deletion is one request for each object."""
    with BucketServer(dir=tmp_path, buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        with make_manager("gs://runs/marked") as manager:
            save(manager, 1, 1)
            save(manager, 2, 2)
            refused = Fault(effect=Status(code=403), kinds=(Kind.DELETE,), skip=1)
            server.faults = FaultPlan(faults=(refused,))
            with pytest.raises(Exception, match=r"(?i)forbidden|403|denied|permission"):
                manager.delete(2)
            server.faults = FaultPlan()
        with make_manager("gs://runs/marked") as manager:
            assert manager.all_steps() == [1]
            assert restored(manager) == 1


@pytest.mark.parametrize("prunes", [False, True], ids=["by name", "pruned"])
def test_next_run_completes_a_partial_bucket_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prunes: bool
) -> None:
    """A step without its mark has no visible owner: its bytes would never be removed."""
    with BucketServer(dir=tmp_path, buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        store = open_store("gs://runs/left")
        with make_manager("gs://runs/left", max_to_keep=1 if prunes else None) as manager:
            save(manager, 1, 1)
            refused = Fault(effect=Status(code=403), kinds=(Kind.DELETE,), objects="left/1/default/*")
            server.faults = FaultPlan(faults=(refused,))
            save(manager, 2, 2)
            if not prunes:
                with pytest.raises(Exception, match=r"(?i)forbidden|403|denied|permission"):
                    manager.delete(1)
        server.faults = FaultPlan()
        assert store.list_all("1")
        with make_manager("gs://runs/left") as manager:
            save(manager, 3, 3)
            assert manager.all_steps() == [2, 3]
        assert store.list_all("1") == []
        assert store.list(paths.INTENTS_DIR) == []


def test_next_run_completes_a_bucket_deletion_crashed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same after each of its requests: the rest is the complete step, or is removed by the next run."""
    keys = [f"{step}/{name}" for step in (4, 40) for name in (paths.COMMIT_MARK, "_CHECKPOINT_METADATA", "a/d/x")]

    def made() -> MemoryStore:
        store = MemoryStore("gs://runs/run")
        for key in keys:
            store.put(key, b"1")
        return store

    counted = FaultyStore(made())
    monkeypatch.setattr(delete, "open_store", lambda url: {"gs://runs/run": counted}[url])
    delete.remove_step("gs://runs/run/4", lambda place: None)
    operations = counted.operations
    assert counted.list_all("") == sorted(keys[3:])
    for died_after in range(operations):
        store = made()
        dying = FaultyStore(store, [StoreFault(effect="crash", skip=died_after)])
        monkeypatch.setattr(delete, "open_store", lambda url, dying=dying: dying)
        with pytest.raises(StoreCrash):
            delete.remove_step("gs://runs/run/4", lambda place: None)
        left = store.list_all("4")
        clean_left(store, 1, lambda place: None)  # the next run
        assert store.list_all("") == sorted(keys if keys[0] in left else keys[3:]), died_after


def test_steps_can_be_deleted_from_a_full_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a quota is reached a deletion would wait for room that only it can make."""
    store = MemoryStore("gs://runs/run")
    for name in (paths.COMMIT_MARK, "default/d/x"):
        store.put(f"4/{name}", b"1")
    full = FaultyStore(store, [StoreFault(effect="full")])
    monkeypatch.setattr(delete, "open_store", lambda url: full)
    delete.remove_step("gs://runs/run/4", lambda place: None)
    assert store.list_all("") == []


@pytest.mark.parametrize("replaced", [False, True], ids=["by name", "an abandoned one"])
def test_deletion_is_announced_until_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    """A scrub at the same time would take a half-deleted step for damaged, and put it aside or repair it."""
    announced: list[list[int]] = []
    move_away = delete.move_away

    def moved(where: str) -> str:
        announced.append(json.loads((tmp_path / paths.DOOMED_KEY).read_text())["steps"])
        return move_away(where)

    with make_manager(tmp_path) as manager:
        save(manager, 1, 1)
        save(manager, 2, 2)
        monkeypatch.setattr(delete, "move_away", moved)
        if replaced:
            manager.restore(1)
            save(manager, 2, 22)
            assert restored(manager) == 22
        else:
            manager.delete(2)
            assert restored(manager) == 1
        assert announced == [[2]]
        assert not (tmp_path / paths.DOOMED_KEY).exists()


def test_unannounced_deletion_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion without a notice would be undone by a repair."""

    def refused(*_: Any) -> None:
        raise ckptkit.StoreError("the disk is full")

    with make_manager(tmp_path) as manager:
        save(manager, 1, 1)
        monkeypatch.setattr(leases.PruneGuard, "announce", refused)
        with pytest.raises(ckptkit.StoreError, match="the disk is full"):
            manager.delete(1)
        monkeypatch.undo()
        assert restored(manager) == 1
        manager.delete(1)
        assert manager.all_steps() == []


def make_listening(root: Path) -> tuple[ckptkit.CheckpointManager, list[str]]:
    """A manager that keeps one step, and the reasons of its `degraded` events."""
    reasons: list[str] = []
    log = ckptkit.EventLog()
    log.observe(lambda event: reasons.append(event.fields["reason"]) if event.kind == ckptkit.Kind.DEGRADED else None)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    return ckptkit.CheckpointManager(
        root, options=options, processes=ckptkit.ProcessOptions(timeout_s=60), events=log
    ), reasons


def test_failed_prune_is_reported_and_retried_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only directory would keep every step, without a report; or the save would fail with it."""
    announced: list[list[int]] = []

    def refused(path: str, options: Any) -> None:
        announced.append(json.loads((tmp_path / paths.DOOMED_KEY).read_text())["steps"])
        raise PermissionError(path)

    manager, reasons = make_listening(tmp_path)
    with manager:
        save(manager, 1, 1)
        monkeypatch.setattr(prune, "delete_directory", refused)
        save(manager, 2, 2)
        assert [reason.partition(": ")[0] for reason in reasons] == ["step 1 is to be deleted, and is not yet"]
        assert announced == [[1]], "a scrub would take it for damaged"
        assert manager.all_steps() == [2]
        monkeypatch.undo()
        save(manager, 3, 3)
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != "_ckptkit") == ["3"]
        assert not (tmp_path / paths.DOOMED_KEY).exists()


def test_retried_prune_keeps_a_newer_step_of_the_same_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that has to be tried again would take the new step of that number."""

    def refused(path: str, options: Any) -> None:
        raise PermissionError(path)

    manager, reasons = make_listening(tmp_path)
    with manager:
        save(manager, 1, 1)
        monkeypatch.setattr(prune, "delete_directory", refused)
        save(manager, 2, 2)
        monkeypatch.undo()
        assert len(reasons) == 1
        manager.delete(2)
        save(manager, 1, 11)
    with make_manager(tmp_path) as manager:
        assert restored(manager) == 11


@pytest.mark.parametrize("damaged", [(2, 3), (1, 2)], ids=["newest", "oldest"])
def test_steps_of_unknown_age_do_not_push_out_good_ones(tmp_path: Path, damaged: tuple[int, ...]) -> None:
    """A job would delete each of its own saves where as many steps are damaged as it keeps: nothing to restore."""
    with make_manager(tmp_path) as manager:
        for step in (1, 2, 3):
            save(manager, step, step)
    for step in damaged:
        for file in ("default/_ckptkit/process-0.json", "_CHECKPOINT_METADATA", "commit_success.txt"):
            (tmp_path / str(step) / file).write_text("")
    with make_manager(tmp_path, max_to_keep=2) as manager:
        manager.restore(None)
        for step in (8, 9):
            save(manager, step, step)
    there = {int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()}
    assert there == {8, 9, *damaged}
    with make_manager(tmp_path) as manager:
        assert restored(manager) == 9
