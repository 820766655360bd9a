"""A loop after a restore: the step that it continues from, what was rejected, and how to start anew."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

import ckptkit
from ckptkit.cli import main
from ckptkit.slots.reader import read_manifest
from ckptkit.testing.damage import inflict
from tests.manager.runs import Run

args: Any = ocp.args


def make_manager(root: Path, *, tiers: Any = (), **options: Any) -> Any:
    return ckptkit.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(save_interval_steps=1, **options), tiers=tiers, host_id="host"
    )


def save_steps(root: Path, *steps: int, tiers: Any = ()) -> None:
    with make_manager(root, tiers=tiers) as manager:
        for step in steps:
            assert manager.save(step, args=args.StandardSave({"w": jnp.full(2000, float(step))}))
            manager.wait_until_finished()


def damage(root: Path, step: int) -> None:
    files = list((root / str(step) / "default" / "d").iterdir())
    inflict("bit flip", [max(files, key=lambda path: path.stat().st_size)], [], 0)


def train(manager: Any, end: int) -> float:
    """README's loop: one more for each step. Returns what the parameters are at the end."""
    state = {"w": jnp.zeros(2000)}
    if manager.latest_step() is not None:
        state = manager.restore(None, args=args.StandardRestore(state))
    for step in range((manager.latest_step() or 0) + 1, end + 1):
        state = {"w": state["w"] + 1}
        manager.save(step, args=args.StandardSave(state))
        manager.wait_until_finished()
    return float(state["w"][0])


@pytest.mark.parametrize("removed", ["data", "sidecars"])
def test_loop_from_latest_step_repeats_what_a_damaged_step_lost(tmp_path: Path, removed: str) -> None:
    """A run would count steps that it never trained, and end early with wrong weights."""
    save_steps(tmp_path, 1, 2, 3)
    if removed == "data":
        damage(tmp_path, 3)
    else:
        for path in (tmp_path / "3" / "default" / "_ckptkit").iterdir():
            path.write_text("{}")
    with make_manager(tmp_path) as manager:
        assert train(manager, 5) == 5.0
        assert manager.all_steps() == [1, 2, 3, 4, 5]
    with make_manager(tmp_path) as manager:
        assert train(manager, 5) == 5.0


def test_damaged_step_is_not_listed_after_it_was_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`restore(latest_step())` would try the damaged step again and again."""
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    opened = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert all(text.startswith(f"durable tier {tmp_path} is on ") for text in opened), "once in a process: of a mount"
    caplog.clear()
    with make_manager(tmp_path) as manager:
        assert manager.latest_step() == 3
        manager.restore(None)
        assert manager.latest_step() == 2
        assert manager.all_steps() == [1, 2]
        assert manager.all_steps(read=True) == [1, 2], "another look does not make it whole"
        assert [(each.step, each.state) for each in manager.steps()][-1] == (3, "rejected")
        assert float(manager.restore(manager.latest_step())["w"][0]) == 2.0
        manager.delete(3)
        assert not (tmp_path / "3").exists()
    rejected, warning = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert rejected.startswith("restore: step 3 in durable was rejected: ")
    assert "the run continues from step 2" in warning
    assert "step 3 in durable: process 0: CorruptCheckpointError" in warning


def test_damaged_step_by_number_names_the_other_steps(tmp_path: Path) -> None:
    """A launcher would start a job again and again on a step that cannot be restored."""
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    with make_manager(tmp_path) as manager:
        with pytest.raises(ckptkit.CorruptCheckpointError, match=r"newest first: 2, 1\. restore\(None\)") as caught:
            manager.restore(manager.latest_step())
        assert caught.value.step == 3
        assert manager.latest_step() == 2
        assert float(manager.restore(manager.latest_step())["w"][0]) == 2.0


def test_no_step_is_latest_when_all_are_damaged(tmp_path: Path) -> None:
    """A loop would begin with fresh weights in the middle of its steps."""
    save_steps(tmp_path, 1)
    damage(tmp_path, 1)
    with make_manager(tmp_path) as manager:
        with pytest.raises(ckptkit.NoRestorableStepError):
            manager.restore(None)
        assert manager.latest_step() is None
        with pytest.raises(StepAlreadyExistsError, match=r"call delete\(1\)"):
            manager.save(1, args=args.StandardSave({"w": jnp.zeros(2)}))
        manager.delete(1)
        assert manager.save(1, args=args.StandardSave({"w": jnp.zeros(2)}))
        manager.wait_until_finished()
        assert manager.latest_step() == 1
    with make_manager(tmp_path) as manager:
        assert manager.restore(None)["w"].shape == (2,)


def test_new_run_does_not_replace_steps_that_are_all_damaged(tmp_path: Path) -> None:
    """A host that reads all steps wrongly would begin anew, and the next host would delete the steps of the old run."""
    save_steps(tmp_path, 1, 2)
    whole = {step: tmp_path.parent / f"whole-{step}" for step in (1, 2)}
    for step, copy in whole.items():
        shutil.copytree(tmp_path / str(step), copy)
        damage(tmp_path, step)
    with make_manager(tmp_path) as manager:
        with pytest.raises(ckptkit.NoRestorableStepError):
            manager.restore(None)
        for step in (0, 3):
            with pytest.raises(ckptkit.CheckpointError, match=r"every step damaged \(1, 2\).*delete each") as caught:
                manager.save(step, args=args.StandardSave({"w": jnp.zeros(2000)}))
            assert caught.value.path == str(tmp_path)
    for step, copy in whole.items():
        shutil.rmtree(tmp_path / str(step))
        copy.rename(tmp_path / str(step))
    with make_manager(tmp_path) as manager:
        assert float(manager.restore(None)["w"][0]) == 2.0
        assert manager.all_steps() == [1, 2]


def test_new_run_begins_once_the_damaged_steps_are_deleted(tmp_path: Path) -> None:
    """Nobody could start anew in a root whose steps are all damaged."""
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        damage(tmp_path, step)
    with make_manager(tmp_path) as manager:
        with pytest.raises(ckptkit.NoRestorableStepError):
            manager.restore(None)
        manager.delete(1)
        with pytest.raises(ckptkit.CheckpointError, match=r"every step damaged \(2\)"):
            manager.save(0, args=args.StandardSave({"w": jnp.zeros(2000)}))
        manager.delete(2)
        assert train(manager, 3) == 3.0
        assert manager.all_steps() == [1, 2, 3]
    with make_manager(tmp_path) as manager:
        assert train(manager, 4) == 4.0


@pytest.mark.parametrize("state", ["saved", "restored", "restored elsewhere"])
def test_run_with_a_state_of_its_own_saves_next_to_damaged_steps(tmp_path: Path, state: str) -> None:
    """A run in mid-training would be refused the save that its next start needs."""
    root, backup = tmp_path / "root", tmp_path / "backup"
    save_steps(root, 1, 2)
    shutil.copytree(root, backup)
    with make_manager(root) as manager:
        if state == "saved":
            assert manager.save(3, args=args.StandardSave({"w": jnp.full(2000, 3.0)}))
            manager.wait_until_finished()
        elif state == "restored":
            manager.restore(None)
        for step in manager.all_steps():
            damage(root, step)
        with pytest.raises(ckptkit.NoRestorableStepError):
            manager.restore(None)
        if state == "restored elsewhere":
            assert float(manager.restore(None, directory=backup)["w"][0]) == 2.0
        assert manager.save(4, args=args.StandardSave({"w": jnp.full(2000, 4.0)}))
        manager.wait_until_finished()
    with make_manager(root) as manager:
        assert float(manager.restore(None)["w"][0]) == 4.0


def test_run_that_falls_back_midway_abandons_the_damaged_step(tmp_path: Path) -> None:
    """A restart would count the damaged step as one of the new branch."""
    with make_manager(tmp_path) as manager:
        for step in (1, 2, 5):
            assert manager.save(step, args=args.StandardSave({"w": jnp.full(2000, float(step))}))
            manager.wait_until_finished()
        damage(tmp_path, 5)
        manager.restore(None)
        assert manager.latest_step() == 2
        assert manager.save(3, args=args.StandardSave({"w": jnp.full(2000, 3.0)}))
        manager.wait_until_finished()
        assert manager.latest_step() == 3
    with make_manager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2, 3]


def test_evaluator_sees_new_steps_after_it_restored_an_old_one(tmp_path: Path) -> None:
    """An evaluation next to a training would evaluate one step again and again."""
    save_steps(tmp_path, 1, 2)
    with make_manager(tmp_path) as trainer, make_manager(tmp_path, read_only=True) as evaluator:
        evaluator.restore(1)
        assert evaluator.latest_step() == 1
        trainer.restore(None)
        assert trainer.save(3, args=args.StandardSave({"w": jnp.full(2000, 3.0)}))
        trainer.wait_until_finished()
        assert float(evaluator.restore(None)["w"][0]) == 3.0
        assert evaluator.latest_step() == 3
        evaluator.restore(2)
        assert trainer.save(4, args=args.StandardSave({"w": jnp.full(2000, 4.0)}))
        trainer.wait_until_finished()
        evaluator.reload()
        assert evaluator.latest_step() == 4


def test_item_that_newer_steps_lack_does_not_hide_them(tmp_path: Path) -> None:
    """A whole step would be missing from the list because one restore asked for something else."""
    with make_manager(tmp_path) as manager:
        both = {"a": args.StandardSave({"w": jnp.ones(4)}), "b": args.StandardSave({"w": jnp.ones(4)})}
        assert manager.save(1, args=args.Composite(**both))
        manager.wait_until_finished()
        assert manager.save(2, args=args.Composite(a=both["a"]))
        manager.wait_until_finished()
        with pytest.raises(ckptkit.ItemNotFoundError, match="Step 2 is the newest that can be restored, and intact"):
            manager.restore(None, args=args.Composite(b=args.StandardRestore()))
        assert (manager.latest_step(), manager.all_steps()) == (2, [1, 2])
        manager.restore(1, args=args.Composite(b=args.StandardRestore()))
        assert (manager.latest_step(), manager.all_steps()) == (1, [1, 2])


def test_restore_logs_step_tiers_bytes_and_seconds_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody could tell from a log where a restart continued."""
    caplog.set_level(logging.INFO, logger="ckptkit")
    tiers = [ckptkit.Tier.ram(str(run.ram))]
    save_steps(run.durable, 1, 2, tiers=tiers)
    caplog.clear()
    with make_manager(run.durable, tiers=tiers) as manager:
        manager.restore(None)
    lines = [each.getMessage() for each in caplog.records if each.name == "ckptkit"]
    (line,) = [line for line in lines if line.startswith("restore")]
    assert line.startswith("restore: step 2 from ram (8000 bytes) in ")
    assert line.endswith("; rejected: none")


def test_root_that_was_emptied_warns_of_slots_that_are_left(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A run that was to start anew would continue the old one, and nothing would tell why."""
    tiers = [ckptkit.Tier.ram(str(run.ram))]
    save_steps(run.durable, 1, 2, tiers=tiers)
    with make_manager(run.durable, tiers=tiers):
        pass
    assert not caplog.records, "no warning where the root has steps"
    for step in (1, 2):
        shutil.rmtree(run.durable / str(step))
    with make_manager(run.durable, tiers=tiers) as manager:
        assert manager.latest_step() == 2
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"{run.durable} holds no step" in warning
    assert "close(remove_arenas=True)" in warning
    command = shlex.split(warning.rpartition("`ckptkit ")[2].removesuffix("`"))
    assert main(command) == 0
    with make_manager(run.durable, tiers=tiers) as manager:
        assert manager.latest_step() is None


def test_root_that_was_made_again_does_not_continue_the_removed_run(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A new run at the same place would continue from the state of the removed one."""
    tiers = [ckptkit.Tier.ram(str(run.ram))]
    save_steps(run.durable, 1, 2, tiers=tiers)
    shutil.rmtree(run.durable)
    caplog.clear()
    with make_manager(run.durable, tiers=tiers) as manager:
        assert manager.latest_step() is None
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "2 saves" in warning
    assert f"of another root that was at {run.durable} before" in warning
    save_steps(run.durable, 1, tiers=tiers)
    (command,) = re.findall("`ckptkit (.*?)`", warning)
    assert main(shlex.split(command)) == 0
    caplog.clear()
    with make_manager(run.durable, tiers=tiers) as manager:
        assert manager.latest_step() == 1
    assert not caplog.records, "the slots of the removed root were freed, and nothing else"


def test_root_that_was_put_back_continues_from_itself(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """The run would go on from what the removed root had saved after the backup."""
    tiers = [ckptkit.Tier.ram(str(run.ram))]
    save_steps(run.durable, 1, tiers=tiers)
    shutil.copytree(run.durable, run.durable.with_name("backup"))
    with make_manager(run.durable, tiers=tiers) as manager:
        manager.restore(None)
        assert manager.save(2, args=args.StandardSave({"w": jnp.full(2000, 2.0)}))
    shutil.rmtree(run.durable)
    shutil.copytree(run.durable.with_name("backup"), run.durable)
    caplog.clear()
    with make_manager(run.durable, tiers=tiers) as manager:
        assert manager.latest_step() == 1
        manager.restore(None)
        assert manager.latest_step() == 1
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"the fast tiers hold steps of a run that {run.durable} does not know: 2" in warning


def test_replica_that_is_alone_now_has_the_newest_step(run: Run) -> None:
    """A job of two data replicas that starts on one host would begin anew: `latest_step` was None, or an older step."""
    tiers = [ckptkit.Tier.ram(str(run.ram))]
    save_steps(run.durable, 1, 2, tiers=tiers)
    shutil.rmtree(run.durable / "2")
    (path,) = run.ram.glob("*/*/0/step-000000000002-*.json")
    manifest = read_manifest(path)
    path.write_bytes(replace(manifest, writer=replace(manifest.writer, process=1, count=2)).to_bytes())
    with make_manager(run.durable, tiers=tiers) as manager:
        assert (manager.latest_step(), manager.all_steps()) == (2, [1, 2])
        assert float(manager.restore(None)["w"][0]) == 2


def test_pruned_step_that_was_restored_is_not_the_latest(run: Run) -> None:
    """`latest_step` would be a step that no tier has, and the next restore raise."""
    save_steps(run.durable, 1)
    with make_manager(run.durable, max_to_keep=1) as manager:
        manager.restore(None)
        assert manager.save(2, args=args.StandardSave({"w": jnp.zeros(2000)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        manager.delete(2)
        assert manager.latest_step() is None
