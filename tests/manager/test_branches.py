"""The steps of this run's branch among the existing ones: rollbacks, abandoned and damaged steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptkit.cli import main
from tests.manager.runs import Run, restored_step
from tests.states import assert_same, make_state, save_args


def test_rollback_persists_across_restarts(run: Run) -> None:
    """An abandoned branch would win at the next restart, as it does with stock Orbax (30 instead of 11)."""
    run.save_steps(range(10, 31, 10), save_every=1)
    with run.manager(save_every=1) as manager:
        manager.restore(10)
        assert manager.latest_step() == 10
        assert manager.all_steps() == [10, 20, 30]  # looking at an old step is not a rollback yet
        assert manager.save(11, args=save_args(make_state(11), 11))
        assert manager.latest_step() == 11
        assert manager.all_steps() == [10, 11]
    shutil.rmtree(run.ram)
    shutil.rmtree(run.ssd)
    assert restored_step(run) == 11
    with run.manager(save_every=1) as manager:
        manager.restore(None)
        assert manager.save(20, args=save_args(make_state(21), 20))  # replaces the abandoned step of that number
        manager.wait_until_finished()
        assert_same(manager.restore(20)["state"], make_state(21))


def test_restore_of_an_older_step_names_the_newer_ones_before_they_are_lost(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who only looks at an older step would lose the newer ones at the next save, and not know it."""
    run.save_steps(range(10, 41, 10), save_every=1)
    with run.manager(save_every=1, max_to_keep=10) as manager:
        manager.restore(None)
        manager.restore(40)
        assert "not the newest" not in caplog.text
        manager.restore(20)
        assert "from step 20, which is not the newest." in caplog.text
        assert "abandons newer steps: 40, 30. Then" in caplog.text
        assert main(["pin", str(run.durable), "30"]) == 0
        caplog.clear()
        assert manager.save(41, args=save_args(make_state(41), 41))
        assert manager.all_steps() == [10, 20, 41]
        manager.restore(41)
        assert "not the newest" not in caplog.text
    assert durable_steps(run) == {"10", "20", "30", "41"}


def test_listing_or_deletion_does_not_undo_a_rollback(run: Run) -> None:
    """A run that went back would save nothing until it has passed the steps of the branch that it left."""
    run.save_steps(range(10, 31, 10), save_every=1)
    with run.manager(save_every=1) as manager:
        manager.restore(10)
        assert manager.all_steps(read=True) == [10, 20, 30]
        manager.delete(30)
        assert manager.save(11, args=save_args(make_state(11), 11))
        assert manager.all_steps() == [10, 11]


def test_returning_tier_of_an_older_run_is_not_restored(run: Run, tmp_path: Path) -> None:
    """A host that returns with an old ramdisk would bring back a branch that the job has left behind."""
    run.save_steps(range(8))
    shutil.copytree(run.ram, tmp_path / "old")
    shutil.rmtree(run.ram)
    shutil.rmtree(run.ssd)
    assert restored_step(run) == 4
    with run.manager() as manager:
        manager.restore(None)
        manager.save(5, args=save_args(make_state(5), 5), force=True)
    shutil.rmtree(run.ram)
    shutil.copytree(tmp_path / "old", run.ram)
    assert restored_step(run) == 5


def durable_steps(run: Run) -> set[str]:
    return {path.name for path in run.durable.iterdir() if path.name.isdigit()}


def test_step_with_a_damaged_sidecar_can_be_saved_again(run: Run) -> None:
    """One flipped byte would stop every restart, and the step could never be written again."""
    run.save_steps(range(1, 4), tiers=False, save_every=1)
    (sidecar,) = (run.durable / "3" / "state").rglob("process-0.json")
    data = bytearray(sidecar.read_bytes())
    data[len(data) // 2] ^= 1
    sidecar.write_bytes(data)
    assert restored_step(run, tiers=False) == 2
    with run.manager(tiers=False, save_every=1) as manager:
        manager.restore(None)
        assert manager.save(3, args=save_args(make_state(33), 3))
    with run.manager(tiers=False) as manager:
        assert_same(manager.restore(None)["state"], make_state(33))


def test_reader_of_a_damaged_step_is_not_told_to_stop_its_job(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """An evaluator saves nothing: no save of it abandons a step, and its owner need not stop it for a repair."""
    run.save_steps(range(1, 4), tiers=False, save_every=1)
    (sidecar,) = (run.durable / "3" / "state").rglob("process-0.json")
    sidecar.write_bytes(b"{")
    with run.manager(tiers=False, read_only=True) as reader:
        assert reader.restore(None)["data"] == {"step": 2}
    assert "restore: step 2 was read. Newer steps were rejected: step 3 " in caplog.text
    assert f"To repair them, run on each host: `ckptkit scrub {run.durable} --repair`" in caplog.text
    assert "abandons" not in caplog.text
    assert "stop this job" not in caplog.text


def test_branch_is_found_below_many_abandoned_steps(run: Run) -> None:
    """Only the highest steps would be looked at, and the newest committed one be lost."""
    run.save_steps(range(10, 31), tiers=False, save_every=1)
    with run.manager(tiers=False, save_every=1) as manager:
        manager.restore(10)
        assert manager.save(11, args=save_args(make_state(11), 11))
    with run.manager(tiers=False) as manager:
        assert manager.latest_step() == 11
        assert manager.all_steps() == [10, 11]
        assert manager.restore(None)["data"] == {"step": 11}


def test_abandoned_steps_do_not_evict_good_ones(run: Run) -> None:
    """`max_to_keep` would keep the abandoned step and delete the newest good one."""
    run.save_steps(range(10, 21, 10), tiers=False, save_every=1, max_to_keep=2)
    with run.manager(tiers=False, save_every=1, max_to_keep=2) as manager:
        manager.restore(10)
        manager.save(11, args=save_args(make_state(11), 11))
        manager.wait_until_finished()
        assert durable_steps(run) == {"10", "11"}
    with run.manager(tiers=False, save_every=1, max_to_keep=2) as manager:
        manager.restore(None)
        manager.save(12, args=save_args(make_state(12), 12))
        manager.wait_until_finished()
        assert durable_steps(run) == {"11", "12"}


def test_damaged_step_of_the_own_branch_is_kept(run: Run) -> None:
    """A damaged sidecar would cost the step, which might still be mended."""
    run.save_steps(range(1, 3), tiers=False, save_every=1)
    with run.manager(tiers=False, save_every=1) as manager:
        manager.restore(None)
        for step in (3, 4):
            manager.save(step, args=save_args(make_state(step), step))
    (sidecar,) = (run.durable / "3" / "state").rglob("process-0.json")
    sidecar.write_bytes(b"{")
    with run.manager(tiers=False, save_every=1, max_to_keep=4) as manager:
        assert manager.restore(None)["data"] == {"step": 4}
        manager.save(5, args=save_args(make_state(5), 5))
    assert durable_steps(run) == {"2", "3", "4", "5"}


def test_lost_fast_save_does_not_revive_an_abandoned_step(run: Run) -> None:
    """The step of the same number in the durable tier is of a branch that was left."""
    run.save_steps(range(5, 7), tiers=False, save_every=1)
    with run.manager(save_every=100) as manager:
        manager.restore(5)
        manager.save(6, args=save_args(make_state(66), 6))
    for slot in [*run.ram.rglob("slot-*.bin"), *run.ssd.rglob("slot-*.bin")]:
        slot.write_bytes(b"")
    assert restored_step(run) == 5


def test_refused_save_is_repeated_under_another_barrier_name(run: Run) -> None:
    """The barriers of the repeated save would be those that hold the veto of the first one."""
    with run.manager(save_every=1) as manager:
        names: list[str] = []
        enter = manager._pipeline._branch.enter
        manager._pipeline._branch.enter = lambda step: names.append(enter(step)) or names[-1]
        assert manager.save(1, args=save_args(make_state(1), 1))
        with pytest.raises(TypeError, match="not JSON serializable"):
            manager.save(2, args=save_args(make_state(2), object()))  # pyright: ignore[reportArgumentType]
        assert manager.save(2, args=save_args(make_state(2), 2))
        manager.wait_until_finished()
        assert names == ["0.1.0", "0.2.0", "0.2.1"]
        assert [record.step for record in manager.steps()] == [1, 2]
