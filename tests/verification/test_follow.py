"""`follow`: an evaluator sees every proven step of a running job once, and none is pruned under it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle import leases
from ckptkit.model import paths
from ckptkit.testing.bucket import BucketServer
from ckptkit.verification import follow
from tests.states import abstract, assert_same, make_state, put, restore_args, save_args

KEEP_ONE = ocp.CheckpointManagerOptions(max_to_keep=1)


def save(manager: Any, step: int, seed: int | None = None) -> None:
    manager.save(step, args=save_args(make_state(step if seed is None else seed), step))
    manager.wait_until_finished()


def steps_on_disk(root: Path) -> list[int]:
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


def followed(root: Path, **options: Any) -> list[int]:
    return [found.step for found in ckptkit.follow(root, poll_s=0.01, idle_timeout_s=0.0, **options)]


def test_evaluator_receives_every_step_once(tmp_path: Path) -> None:
    """A step would be missed, given twice, or be another than the one that was saved."""
    root, seen = tmp_path / "run", list[int]()

    def evaluate() -> None:
        for found in ckptkit.follow(root, poll_s=0.01):
            restored = found.restore(restore_args(abstract(make_state())))
            assert_same(restored["state"], make_state(found.step))
            assert found.proven
            seen.append(found.step)
            if found.step == 4:
                return

    evaluator = threading.Thread(target=evaluate)
    evaluator.start()  # before the root is there
    with ckptkit.CheckpointManager(root) as manager:
        for step in range(5):
            save(manager, step)
        evaluator.join(timeout=60)
    assert seen == [0, 1, 2, 3, 4]


def test_a_step_is_not_pruned_while_it_is_evaluated(tmp_path: Path) -> None:
    """The evaluation would end in half a step."""
    with ckptkit.CheckpointManager(tmp_path, options=KEEP_ONE) as manager:
        save(manager, 1)
        steps = ckptkit.follow(tmp_path, poll_s=0.01)
        first = next(steps)
        for step in (2, 3):
            save(manager, step)
        assert steps_on_disk(tmp_path) == [1, 3]
        assert_same(first.restore(restore_args(abstract(make_state())))["state"], make_state(1))
        assert next(steps).step == 3
        save(manager, 4)
        assert steps_on_disk(tmp_path) == [3, 4]
        steps.close()  # pyright: ignore[reportAttributeAccessIssue]
        save(manager, 5)
        assert steps_on_disk(tmp_path) == [5]
        assert list((tmp_path / paths.LEASES_DIR).iterdir()) == []


EVALUATOR = """
import sys, time, ckptkit
for found in ckptkit.follow(sys.argv[1], poll_s=0.01, lease_s=float(sys.argv[2])):
    print(found.step, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("machine", ["this", "another"])
def test_killed_evaluator_holds_its_step_only_for_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """The bucket would fill up with what dead evaluators read. One of this machine is seen to have ended."""
    if machine == "another":
        monkeypatch.setattr(leases, "_has_ended", lambda _: None)
    with ckptkit.CheckpointManager(tmp_path, options=KEEP_ONE) as manager:
        save(manager, 1)
        command = [sys.executable, "-c", EVALUATOR, str(tmp_path), "1.0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as evaluator:
            assert evaluator.stdout is not None
            assert evaluator.stdout.readline() == "1\n"
            save(manager, 2)
            assert steps_on_disk(tmp_path) == [1, 2]
            evaluator.send_signal(signal.SIGKILL)
            evaluator.wait()
        save(manager, 3)
        assert steps_on_disk(tmp_path) == ([3] if machine == "this" else [1, 3])
        time.sleep(1.1)
        save(manager, 4)
        assert steps_on_disk(tmp_path) == [4]
    assert not (tmp_path / paths.DOOMED_KEY).exists()


def test_damaged_step_is_skipped_and_reported(tmp_path: Path) -> None:
    """An evaluator would report the score of garbage, or end."""
    weights = np.random.default_rng(0).random((8, 512))  # larger than what OCDBT keeps in its compressed nodes
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, args=save_args({"w": put(weights.astype(np.float32) + step)}, step))
    sidecar = tmp_path / "2" / "state" / "_ckptkit" / "process-0.json"
    sidecar.write_text(sidecar.read_text().replace("float32", "float64"))
    flipped = 0
    for path in (tmp_path / "3" / "state").rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if (at := data.find((weights.astype(np.float32) + 3)[0].tobytes())) >= 0:
            data[at + 7] ^= 1
            path.write_bytes(data)
            flipped += 1
    assert flipped == 1
    log, events = ckptkit.EventLog(), list[ckptkit.Event]()
    log.observe(events.append)
    assert followed(tmp_path, events=log) == [1, 4]
    assert [event.step for event in events if event.kind == ckptkit.Kind.REJECTED] == [2, 3]


def test_evaluator_follows_the_branch_after_a_rollback(tmp_path: Path) -> None:
    """After a rollback the evaluator would wait without an end for a number above the abandoned ones."""
    found = ckptkit.follow(tmp_path, poll_s=0.01)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (10, 20, 30):
            save(manager, step)
        assert [next(found).step for _ in range(3)] == [10, 20, 30]
        manager.restore(10, args=restore_args(abstract(make_state())))
        save(manager, 20, seed=99)
    again = next(found)
    assert again.step == 20
    assert_same(again.restore(restore_args(abstract(make_state())))["state"], make_state(99))
    found.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert followed(tmp_path) == [10, 20]


def test_reused_step_number_is_a_new_step(tmp_path: Path) -> None:
    """The score of one branch would be written down for the other."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            save(manager, step)
        found = ckptkit.follow(tmp_path, after=1)
        old = next(found)
        manager.restore(1, args=restore_args(abstract(make_state())))
        save(manager, 2, seed=99)
        with pytest.raises(ckptkit.CheckpointError):
            old.restore(restore_args(abstract(make_state())))
        found.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_after_newest_only_and_prove_options(tmp_path: Path) -> None:
    """A restarted evaluator would begin at the first step, and a slow one would never catch up."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in range(5):
            save(manager, step)
    assert followed(tmp_path, after=2) == [3, 4]
    assert followed(tmp_path, newest_only=True) == [4]
    assert followed(tmp_path, after=4) == []
    assert followed(tmp_path, prove=False) == [0, 1, 2, 3, 4]
    unread = ckptkit.follow(tmp_path, poll_s=0.01, idle_timeout_s=0.0, prove=False)
    assert not any(found.proven for found in unread), "nobody has read their bytes"


def test_stock_orbax_steps_are_followed_as_unproven(tmp_path: Path) -> None:
    """A job that has not changed its import could not be evaluated, or its bytes would pass for proven."""
    with ocp.CheckpointManager(tmp_path) as stock:
        for step in (1, 2):
            stock.save(step, args=save_args(make_state(step), step))
    for found in ckptkit.follow(tmp_path, poll_s=0.01, idle_timeout_s=0.0):
        assert not found.proven
        assert_same(found.restore(restore_args(abstract(make_state())))["state"], make_state(found.step))


def test_directories_that_are_not_of_the_run_are_not_followed(tmp_path: Path) -> None:
    """A tree, another run and notes, whose names end in digits, would be steps that `restore` refuses."""
    root = tmp_path / "run"
    with ckptkit.CheckpointManager(root) as manager:
        for step in (100, 200):
            save(manager, step)
    with ckptkit.CheckpointManager(root / "exp_500") as other:
        save(other, 1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "gemma_350", {"w": np.arange(4)})
    (root / "2024").mkdir()
    (root / "2024/notes.txt").write_text("runs of 2024")
    assert followed(root) == [100, 200]


def test_step_with_a_lost_lease_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer may have begun to prune it: the evaluation would end in half a step."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        save(manager, 1)
    real, away = follow._Follower._proven, [True]

    def proven(*args: Any) -> bool:
        if away.pop():
            time.sleep(0.5)  # longer than the lease, which nobody can renew meanwhile
        return real(*args)

    monkeypatch.setattr(follow._Follower, "_proven", proven)
    monkeypatch.setattr(leases.Beating, "_keep", lambda self: self._released.wait())
    assert followed(tmp_path, lease_s=0.2) == []
    away += [False]
    assert followed(tmp_path, lease_s=60.0) == [1]


def test_an_evaluator_writes_nothing_but_its_lease(tmp_path: Path) -> None:
    """It would begin an epoch, and fence off the job that it follows."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        save(manager, 1)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        for found in ckptkit.follow(tmp_path, poll_s=0.01, idle_timeout_s=0.0):
            (lease,) = (tmp_path / paths.LEASES_DIR).iterdir()
            assert json.loads(lease.read_text())["step"] == found.step == 1
            found.restore()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
        save(manager, 2)


def test_a_job_on_a_bucket_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluator of a real job, whose root is a bucket, would see nothing, or lose the step that it reads."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"), save=ckptkit.EverySteps(1))]
        options = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=2)
        with ckptkit.CheckpointManager("gs://runs/followed", options=options, tiers=tiers) as manager:
            steps = ckptkit.follow("gs://runs/followed", poll_s=0.01, idle_timeout_s=60.0)
            save(manager, 2)
            first = next(steps)
            assert (first.step, first.proven) == (2, True)
            for step in (3, 4, 6):
                save(manager, step)
            assert manager._durable.steps() == [2, 6], "2 is leased, 3 is in the ramdisk alone, 4 is pruned"
            assert_same(first.restore(restore_args(abstract(make_state())))["state"], make_state(2))
            assert next(steps).step == 6
            save(manager, 8)
            assert manager._durable.steps() == [6, 8]
            steps.close()  # pyright: ignore[reportAttributeAccessIssue]
            save(manager, 10)
            assert manager._durable.steps() == [10]
