"""Newest means made last on this branch, whatever the numbers of the steps are: in every tier, list and policy."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.save.book.ledger import Ledger
from ckptkit.upkeep import plan_rollback, rollback

args: Any = ocp.args

SAVED = (10, 20, 30, 15, 16, 17)


def manager_of(home: Path, *, keep: Any = None, max_to_keep: int | None = None, every: int = 1) -> Any:
    return ckptkit.CheckpointManager(
        home / "root",
        options=ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=max_to_keep),
        tiers=[ckptkit.Tier.ram(str(home / "ram"), save=ckptkit.EverySteps(1), keep=keep)],
        host_id="h",
    )


def save(manager: Any, *steps: int) -> None:
    for step in steps:
        assert manager.save(step, args=args.StandardSave({"w": np.full(4, step)}), force=True)
        manager.wait_until_finished()


def restored(manager: Any) -> int:
    return int(manager.restore(None)["w"][0])


@pytest.mark.parametrize("tier", ["ram", "durable"])
def test_restart_takes_the_save_made_last(tmp_path: Path, tier: str) -> None:
    """A run that was forced to a lower step would go back to the higher one at its next restart."""
    with manager_of(tmp_path) as manager:
        save(manager, *SAVED)
        assert manager.latest_step() == 17
    if tier == "durable":
        (tmp_path / "ram").rename(tmp_path / "lost")
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == [*SAVED]
        assert (manager.latest_step(), restored(manager)) == (17, 17)


def test_keep_policies_count_in_the_order_of_saves(tmp_path: Path) -> None:
    """Lower steps would be reported as committed, and be in no tier."""
    with manager_of(tmp_path, keep=ckptkit.KeepNewest(2), max_to_keep=3) as manager:
        save(manager, *SAVED)
        held = {record.step: record.tiers for record in manager.steps()}
    assert held == {15: ("durable",), 16: ("durable", "ram"), 17: ("durable", "ram")}


def test_durable_policy_counts_in_the_order_of_saves_after_a_restart(tmp_path: Path) -> None:
    """Orbax lists steps by number at a start: the newest saves would be the first to go."""
    with manager_of(tmp_path) as manager:
        save(manager, *SAVED)
    with manager_of(tmp_path, max_to_keep=3) as manager:
        manager.restore(None)
        save(manager, 18)
        assert [record.step for record in manager.steps() if "durable" in record.tiers] == [16, 17, 18]
    assert sorted(path.name for path in (tmp_path / "root").iterdir() if path.name.isdecimal()) == ["16", "17", "18"]


def test_listings_agree_on_the_newest_step(tmp_path: Path) -> None:
    """A script that asks for the newest step would evaluate, or delete, another one than a restart takes."""
    root = str(tmp_path / "root")
    with manager_of(tmp_path) as manager:
        save(manager, *SAVED)
    assert ckptkit.latest_step(root) == 17
    assert [entry.step for entry in ckptkit.list_steps(root, host_id="h").steps] == [*SAVED]
    assert [each.step for each in ckptkit.follow(root, idle_timeout_s=0.0)] == [*SAVED]
    with manager_of(tmp_path) as manager:
        manager.restore(20)
        save(manager, 25)
    assert ckptkit.latest_step(root) == 25
    live = [entry.step for entry in ckptkit.list_steps(root, host_id="h").steps if entry.state == "committed"]
    assert live == [10, 20, 25]
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == [10, 20, 25]


def test_rolled_back_root_has_the_step_before_as_its_latest(tmp_path: Path) -> None:
    """`latest_step` would name an abandoned step."""
    root = str(tmp_path / "root")
    with manager_of(tmp_path) as manager:
        save(manager, 100, 200)
    rollback(plan_rollback(root, 100, host_id="h"))
    assert ckptkit.latest_step(root) == 100


def test_step_that_is_saved_again_lower_than_others_is_the_newest(tmp_path: Path) -> None:
    """The first save of the number would come back, or the higher steps."""
    with manager_of(tmp_path) as manager:
        save(manager, 10, 20, 30)
        manager.delete(10)
        save(manager, 10)
        assert manager.latest_step() == 10
    with manager_of(tmp_path) as manager:
        assert (manager.latest_step(), manager.all_steps()) == (10, [20, 30, 10])
        assert restored(manager) == 10


def test_late_durable_commit_of_an_older_save_is_not_the_newest() -> None:
    """A step that only the durable tier holds, because its ramdisk's slot was reused before, would be the latest."""
    book = Ledger(Ancestry())
    older, newer = SaveId(1, 1, 0), SaveId(1, 2, 1)
    for save_id in (older, newer):
        book.begin(save_id)
        book.commit(save_id, "ram")
    book.keep_only("ram", [newer])
    book.commit(older, "durable")
    assert (book.latest_step(), book.steps()) == (2, [1, 2])


@pytest.mark.parametrize("deleted", [False, True])
def test_run_that_restores_nothing_abandons_what_it_does_not_see(deleted: bool, tmp_path: Path) -> None:
    """The step of a host that was away would be listed among those of the newer run."""
    away, kept = tmp_path / "away", [20] if deleted else [10, 20]
    with manager_of(tmp_path, every=10) as manager:
        for step in (10, 11):
            assert manager.save(step, args=args.StandardSave({"w": np.full(4, step)}))
            manager.wait_until_finished()
    (tmp_path / "ram").rename(away)
    with manager_of(tmp_path, every=10) as manager:
        assert manager.all_steps() == [10]
        if deleted:
            manager.delete(10)
        save(manager, 20)
        assert manager.all_steps() == kept
    shutil.rmtree(tmp_path / "ram")
    away.rename(tmp_path / "ram")
    with manager_of(tmp_path, every=10) as manager:
        assert manager.all_steps() == kept


def test_older_save_of_a_deleted_step_stays_away(tmp_path: Path) -> None:
    """A host that was away would bring a deleted step back, with an older state."""
    with manager_of(tmp_path, keep=ckptkit.KeepNewest(2), max_to_keep=1) as manager:
        save(manager, 11, 10)
        assert manager.all_steps() == [11, 10]
    (tmp_path / "ram").rename(tmp_path / "away")
    with manager_of(tmp_path, max_to_keep=1) as manager:
        assert restored(manager) == 10
        save(manager, 11)
        manager.delete(11)
        save(manager, 12)
    shutil.rmtree(tmp_path / "ram")
    (tmp_path / "away").rename(tmp_path / "ram")
    with manager_of(tmp_path, max_to_keep=1) as manager:
        assert manager.all_steps() == [10, 12]


def test_step_that_was_deleted_is_saved_by_a_run_that_cannot_record_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have the epoch of the deleted save, whose run could not record itself either, and no restore would find
    it."""

    def unwritable(*_: Any) -> None:
        raise ckptkit.StoreError("read only")

    def unrecorded(*steps: int) -> int:
        with monkeypatch.context() as patched, manager_of(tmp_path) as manager:
            patched.setattr(EpochRecords, "write", unwritable)
            for step in steps:
                assert manager.save(step, args=args.StandardSave({"w": np.full(4, step)}), force=True)
                with pytest.raises(ckptkit.SaveFailedError, match="could not be recorded"):
                    manager.wait_until_finished()
            return restored(manager)

    assert unrecorded(9, 10) == 10
    with manager_of(tmp_path) as manager:
        manager.delete(10)
    shutil.rmtree(tmp_path / "ram")  # on another host
    assert unrecorded(10) == 10


def test_after_the_newest_step_is_deleted_the_newest_is_what_a_restart_takes(tmp_path: Path) -> None:
    """`latest_step` would be None, and a restart would restore a step that nobody could list or delete."""
    with manager_of(tmp_path, every=1000) as manager:
        for step in (9, 10, 11):
            assert manager.save(step, args=args.StandardSave({"w": np.full(4, step)}))
            manager.wait_until_finished()
        assert manager.steps()[1].tiers == ("ram",)
    (path,) = (tmp_path / "ram").rglob("step-*10-*.json")
    manifest = Manifest.from_bytes(path.read_bytes(), path=str(path))
    writer = replace(manifest.writer, count=2)  # the other process held all of it too, and its host is lost
    path.write_bytes(replace(manifest, writer=writer).to_bytes())
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == [9, 11]
        manager.delete(11)
        assert (manager.latest_step(), manager.all_steps()) == (10, [9, 10])
        manager.delete(9)
        assert restored(manager) == 10
    with manager_of(tmp_path) as manager:
        assert (manager.latest_step(), restored(manager)) == (10, 10)


def test_damaged_newest_step_is_listed_again_once_it_is_repaired(tmp_path: Path) -> None:
    """A run that restored nothing would count the step before as its base, and abandon the damaged one."""
    with manager_of(tmp_path) as manager:
        save(manager, 10, 11)
    shutil.rmtree(tmp_path / "ram")
    sidecars = sorted((tmp_path / "root" / "11").rglob("process-*.json"))
    whole = {path: path.read_bytes() for path in sidecars}
    for path in sidecars:
        path.write_bytes(b"{")
    with manager_of(tmp_path) as manager:
        save(manager, 20)
    for path, data in whole.items():
        path.write_bytes(data)
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == [10, 11, 20]
