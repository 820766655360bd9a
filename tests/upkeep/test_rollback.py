"""`rollback`: every restart goes on from the step, a run that is under way is fenced off, and nothing is deleted."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from ckptkit.durable.lifecycle.epochs import EpochRecords
from ckptkit.durable.lifecycle.leases import PruneGuard
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from ckptkit.inspection import list_steps
from ckptkit.model.tiers import KeepNewest
from ckptkit.store import open_store
from ckptkit.upkeep import pin, plan_prune, plan_rollback, prune, rollback, rolling_back
from ckptkit.verification.deletions import DeletionNotice
from tests.upkeep.conftest import HOST, make_root, manager_of, restored, save
from tests.upkeep.test_prune import flip, steps_in


def test_restart_restores_the_rolled_back_step(tmp_path: Path) -> None:
    """An abandoned branch would win at the next start, from any tier."""
    root, ram = tmp_path / "run", tmp_path / "ram"
    make_root(root, range(1, 6), ram=ram, max_to_keep=4)
    plan = plan_rollback(str(root), 3, tiers=[str(ram)], host_id=HOST)
    assert [each.step for each in plan.abandoned] == [4, 5]
    assert (plan.after.epoch, plan.notes, plan.done) == (2, (), False)
    assert restored(root, ram=ram) == (5, 5), "a plan changes nothing"
    plan = plan_rollback(str(root), 3, tiers=[str(ram)], host_id=HOST)
    assert rollback(plan).done
    assert steps_in(root) == [2, 3, 4, 5]
    assert restored(root, ram=ram) == (3, 3)
    states = {each.step: each.state for each in list_steps(str(root), tiers=[str(ram)], host_id=HOST).steps}
    assert (states[3], states[4], states[5]) == ("committed", "abandoned", "abandoned")
    with manager_of(root, ram=ram) as manager:
        manager.restore(None)
        save(manager, 4, 44)
    assert restored(root, ram=ram) == (4, 44)


def test_running_job_is_fenced_off(tmp_path: Path) -> None:
    """It would go on committing above the step that everybody was sent back to."""
    root, ram = tmp_path / "run", tmp_path / "ram"
    with manager_of(root, ram=ram) as manager:
        for step in (1, 2, 3):
            save(manager, step)
        plan = plan_rollback(str(root), 1, tiers=[str(ram)], host_id=HOST)
        assert any("a process runs here" in note for note in plan.notes)
        rollback(plan)
        manager.save(4, args=ocp.args.StandardSave({"w": 4}))  # pyright: ignore[reportCallIssue]
        with pytest.raises(CheckpointError, match="a later run has begun epoch 2 there; stop this run"):
            manager.wait_until_finished()
    assert steps_in(root) == [1, 2, 3]
    assert restored(root, ram=ram) == (1, 1), "what it saved to its ramdisk after that is abandoned too"


def test_rollback_to_an_unrestorable_step_is_refused(tmp_path: Path) -> None:
    """All newer steps would be abandoned for one that cannot be restored."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3, 4))
    flip(root, 2)
    with pytest.raises(CorruptCheckpointError, match="is not rolled back: step 2 is damaged"):
        plan_rollback(str(root), 2, host_id=HOST)
    with pytest.raises(StepNotFoundError, match="no restart would take step 7: there is none"):
        plan_rollback(str(root), 7, host_id=HOST)
    rollback(plan_rollback(str(root), 1, host_id=HOST))
    with pytest.raises(StepNotFoundError, match=r"it is abandoned; `ckptkit copy .*/4 NEW_ROOT` takes it"):
        plan_rollback(str(root), 4, host_id=HOST)


def test_one_of_two_concurrent_rollbacks_is_refused(tmp_path: Path) -> None:
    """A record that was planned before a run began would abandon what that run has saved."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    plan = plan_rollback(str(root), 2, host_id=HOST)
    other = plan_rollback(str(root), 1, host_id=HOST)
    rollback(plan)
    with pytest.raises(CheckpointError, match="changed since it was looked at"):
        rollback(other)
    store = open_store(root)
    assert EpochRecords(store).read() == plan.after
    assert restored(root) == (2, 2)


def test_notes_report_steps_at_risk_and_pins(tmp_path: Path) -> None:
    """No message would tell that the step may be lost with a ramdisk, or that a number is blocked."""
    root, ram = tmp_path / "run", tmp_path / "ram"
    make_root(root, range(5), ram=ram, save_interval_steps=2)
    pin(str(root), 4)
    plan = plan_rollback(str(root), 3, tiers=[str(ram)], host_id=HOST)
    assert plan.notes == (
        "only fast tiers of this host hold it: if they are lost, a restart takes an older step",
        "pinned: 4; these numbers cannot be saved anew until they are unpinned",
    )
    rollback(plan)
    assert restored(root, ram=ram) == (3, 3)
    assert restored(root) == (2, 2)


def test_rollback_supersedes_steps_of_stock_orbax(tmp_path: Path) -> None:
    """They have no identity of their own, and those above the step would be taken again."""
    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave({"w": step}))  # pyright: ignore[reportCallIssue]
    rollback(plan_rollback(str(root), 2, host_id=HOST))
    with manager_of(root) as manager:
        assert manager.latest_step() == 2


def test_rollback_of_a_stock_root_names_who_ignores_it(tmp_path: Path) -> None:
    """The user of a stock job would believe that it goes back too."""
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(3)}))  # pyright: ignore[reportCallIssue]
    notes = plan_rollback(str(tmp_path), 1, host_id=HOST).notes
    assert any("a job of stock Orbax ignores it and restores the highest number, 3" in note for note in notes)


@pytest.mark.parametrize("moment", ["before the lease", "after the lease", "announced"])
def test_rollback_never_records_a_step_that_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Every newer step would be abandoned for one that was deleted, and no restart would find a step."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    plan = plan_rollback(str(root), 1, host_id=HOST)
    before = EpochRecords(open_store(str(root))).read()
    if moment == "before the lease":
        assert prune(plan_prune(str(root), [KeepNewest(2)])).done
        with pytest.raises(StepNotFoundError, match="no restart would take step 1: there is none"):
            rollback(plan)
    elif moment == "announced":
        with (
            DeletionNotice(open_store(str(root)), [1]),
            pytest.raises(CheckpointError, match="is not rolled back: step 1 is being deleted"),
        ):
            rollback(plan)
    else:
        pruning, real = plan_prune(str(root), [KeepNewest(2)]), rolling_back._require_there

        def prunes(*args: Any) -> None:
            real(*args)
            assert [each.act for each in prune(pruning).steps] == ["keep"] * 3

        monkeypatch.setattr(rolling_back, "_require_there", prunes)
        assert rollback(plan).done
        assert restored(root) == (1, 1)
        return
    assert EpochRecords(open_store(str(root))).read() == before
    assert restored(root) == (3, 3)


def test_job_does_not_prune_the_step_that_a_rollback_went_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has committed before the rollback and prunes after it: no step would be left."""
    root, real = tmp_path / "run", PruneGuard.spare

    def meanwhile(self: PruneGuard, doomed: Iterable[int]) -> set[int]:
        if doomed := list(doomed):
            rollback(plan_rollback(str(root), 1, host_id=HOST))
        return real(self, doomed)

    with manager_of(root, max_to_keep=2) as manager:
        save(manager, 1)
        save(manager, 2)
        monkeypatch.setattr(PruneGuard, "spare", meanwhile)
        save(manager, 3)
    assert steps_in(root) == [1, 2, 3]
    assert restored(root) == (1, 1)


def test_rollback_to_a_step_of_another_root_is_refused(tmp_path: Path) -> None:
    """It answered that the run continues from there, and every restart still took the newest step."""
    root = tmp_path / "run"
    make_root(tmp_path / "other", (3,))
    make_root(root, (5, 6))
    shutil.copytree(tmp_path / "other/3", root / "3")
    with pytest.raises(CheckpointError, match="step 3 is of another root, so it counts as the oldest"):
        plan_rollback(str(root), 3, host_id=HOST)
    assert restored(root) == (6, 6)
