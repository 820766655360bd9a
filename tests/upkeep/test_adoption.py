"""`copy` of a step into the root of another run: refused, or with a new identity that keeps the run's own steps."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit.cli import main
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords, Rollback
from ckptkit.errors import CheckpointError, CorruptCheckpointError, SaveFailedError
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId, new_id
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer
from ckptkit.upkeep import copy, copying, plan_copy, plan_rollback, rollback
from ckptkit.upkeep.adoption import plan_adoption
from tests.durable.test_leases import ended_process
from tests.upkeep.conftest import HOST, make_root, manager_of, restored, save
from tests.upkeep.test_copy import stock_value
from tests.upkeep.test_prune import flip, steps_in


@pytest.fixture(params=["disk", pytest.param("bucket", marks=pytest.mark.long)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A root of two epochs with the steps 1000 and 2000."""
    if request.param == "bucket":
        request.getfixturevalue("server")
    root = str(tmp_path / "run") if request.param == "disk" else "gs://runs/run"
    make_root(root, [1000])
    with manager_of(root) as manager:
        manager.restore(None)
        save(manager, 2000)
    return root


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another run, started five times, with the step 50 of its fifth epoch."""
    root = tmp_path / "other"
    for step in (10, 20, 30, 40, 50):
        with manager_of(root) as manager:
            if manager.latest_step() is not None:
                manager.restore(None)
            save(manager, step)
    return root


def save_more(root: str, steps: tuple[int, ...], **options: Any) -> list[int]:
    """The root after a restart that has saved `steps`."""
    with manager_of(root, **options) as manager:
        manager.restore(None)
        for step in steps:
            save(manager, step)
        manager.reload()
        return [int(step) for step in manager.all_steps()]


def test_step_of_another_run_is_refused(run: str, other: Path) -> None:
    """The next restart would take the step, and the save after it delete the run's own."""
    with pytest.raises(CheckpointError, match=r"steps of another run \(1000, 2000\).*--as newest.*--as history"):
        plan_copy(str(other / "50"), run)
    assert restored(run)[0] == 2000
    assert save_more(run, (2001,), max_to_keep=3) == [1000, 2000, 2001]


def test_step_adopted_as_newest_supersedes_nothing(run: str, other: Path) -> None:
    """The run's own steps would be deleted by the first save after the copy."""
    with pytest.raises(CheckpointError, match="give --as-step 2001 or more"):
        plan_copy(str(other / "50"), run, adopted="newest")
    copy(plan_copy(str(other / "50"), run, adopted="newest", as_step=2050))
    assert {proof.state for proof in ckptkit.verify(run).steps} == {"proven"}
    assert restored(run) == (2050, 50)
    assert stock_value(run, 2050) == 50
    assert save_more(run, (2051,), max_to_keep=4) == [1000, 2000, 2050, 2051]
    assert not any(entry.state == "abandoned" for entry in ckptkit.list_steps(run, host_id=HOST).steps)


def test_step_adopted_as_history_is_never_the_newest(run: str, other: Path) -> None:
    """A step that was put there to be looked at would become the run's, or be deleted as superseded."""
    with pytest.raises(CheckpointError, match="give --as-step 999 or less"):
        plan_copy(str(other / "50"), run, adopted="history", as_step=1500)
    copy(plan_copy(str(other / "50"), run, adopted="history"))
    assert {proof.state for proof in ckptkit.verify(run).steps} == {"proven"}
    assert restored(run) == (2000, 2000 % 2**31)
    assert restored(run, 50) == (50, 50)
    rollback(plan_rollback(run, 1000, host_id=HOST))
    states = {entry.step: entry.state for entry in ckptkit.list_steps(run, host_id=HOST).steps}
    assert states == {50: "committed", 1000: "committed", 2000: "abandoned"}


@pytest.mark.parametrize(("adopted", "step", "newest"), [("newest", 3000, 3000), ("history", 7, 2000)])
def test_stock_step_gets_an_identity(run: str, tmp_path: Path, adopted: Any, step: int, newest: int) -> None:
    """A step of stock Orbax would count as of the run's newest epoch."""
    with ocp.CheckpointManager(tmp_path / "stock") as manager:
        manager.save(5000, args=ocp.args.StandardSave({"w": jnp.full(64, 5)}))  # pyright: ignore[reportCallIssue]
    with pytest.raises(CheckpointError, match="steps of another run"):
        plan_copy(str(tmp_path / "stock/5000"), run)
    copy(plan_copy(str(tmp_path / "stock/5000"), run, adopted=adopted, as_step=step))
    assert restored(run)[0] == newest
    assert restored(run, step) == (step, 5)


def test_refused_copy_claims_nothing(run: str, other: Path, tmp_path: Path) -> None:
    """The running job of the target would die at its next save, for a copy that was never made."""
    flip(other, 50)
    with manager_of(run) as manager:
        manager.restore(None)
        save(manager, 2001)
        before = EpochRecords(open_store(run)).read()
        with pytest.raises(CorruptCheckpointError, match="50 is damaged, or was damaged on the way, and is not copied"):
            copy(plan_copy(str(other / "50"), run, adopted="newest", as_step=2050))
        assert EpochRecords(open_store(run)).read() == before
        save(manager, 2100)
    assert restored(run)[0] == 2100
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        copy(replace(plan_copy(str(other), str(tmp_path / "into")), steps=plan_copy(str(other), run + "-2").steps[-1:]))
    assert EpochRecords(open_store(str(tmp_path / "into"))).read().epoch == 0, "nor the records of a root"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_adoption_that_died_before_its_commit_is_completed(
    other: Path, tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch, place: str, resume: bool
) -> None:
    """Its sidecars have the new identity already, and the sound source would be called damaged."""
    del server
    into = str(tmp_path / "into") if place == "disk" else "gs://runs/into"
    make_root(into, [1])

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(copying._Copying, "_commit", dies)
        with pytest.raises(KeyboardInterrupt):
            copy(plan_copy(str(other / "50"), into, adopted="newest"))
    assert copy(plan_copy(str(other / "50"), into, adopted="newest"), resume=resume).done
    assert restored(into) == (50, 50)
    assert {proof.state for proof in ckptkit.verify(into).steps} == {"proven"}


def test_run_that_is_under_way_is_fenced_off_by_a_newest_copy(run: str, other: Path) -> None:
    """Two runs would save into one root, each in an order of its own."""
    manager = manager_of(run)
    manager.restore(None)
    save(manager, 2001)
    copy(plan_copy(str(other / "50"), run, adopted="newest", as_step=2050))
    with pytest.raises(SaveFailedError, match="a later run has begun epoch 4"):
        save(manager, 2100)
    manager.close()
    assert 2100 not in steps_in(run)
    assert restored(run) == (2050, 50)


def test_step_of_the_same_run_needs_no_choice(tmp_path: Path) -> None:
    """A step could not be brought back from the backup of its own run."""
    root, archive = tmp_path / "run", tmp_path / "archive"
    make_root(root, [1, 2])
    copy(plan_copy(str(root), str(archive)))
    with manager_of(root) as manager:
        manager.restore(None)
        save(manager, 3)
    shutil.rmtree(root / "1")
    copy(plan_copy(str(archive / "1"), str(root)))
    assert restored(root) == (3, 3)
    assert restored(root, 1) == (1, 1)


def test_two_runs_with_equal_records_are_not_mixed(tmp_path: Path) -> None:
    """Every first run has the same epoch: a root would be copied into another run's."""
    make_root(tmp_path / "a", [1])
    make_root(tmp_path / "b", [2])
    records = [EpochRecords(open_store(str(tmp_path / name))).read() for name in "ab"]
    assert records[0].epoch == records[1].epoch
    with pytest.raises(CheckpointError, match="has a history of its own"):
        plan_copy(str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(CheckpointError, match="steps of another run"):
        plan_copy(str(tmp_path / "a/1"), str(tmp_path / "b"))


def test_command_prints_what_adoption_means(run: str, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody would know from the plan which step the next restart takes."""
    assert main(["copy", str(other / "50"), run]) == 1
    assert "Choose `--as newest`" in capsys.readouterr().err
    before = open_store(run).list_all("")
    assert main(["copy", str(other / "50"), run, "--as", "newest", "--as-step", "2050", "--dry-run"]) == 0
    assert "takes step 2050; the next durable save of a running job is refused" in capsys.readouterr().out
    assert open_store(run).list_all("") == before


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), unique=True, max_size=8),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 60)), max_size=3),
    st.integers(0, 70),
    st.sampled_from(["newest", "history"]),
    st.integers(0, 60),
)
def test_adoption_keeps_every_step_of_the_run(
    found: list[tuple[int, int]], rollbacks: list[tuple[int, int]], step: int, adopted: Any, base: int
) -> None:
    """A step of the run, or the copy, would be superseded by what nobody has rolled back."""
    ancestry = Ancestry(epoch=4, rollbacks=tuple(Rollback(*pair) for pair in sorted(rollbacks)))
    saves = [SaveId(epoch, number, 0) for epoch, number in found]
    try:
        adoption = plan_adoption("root", ancestry, saves, [], step, adopted)
    except CheckpointError:
        return
    after = adoption.after or ancestry
    assert not after.superseded(adoption.save_id)
    assert [after.superseded(save) for save in saves] == [ancestry.superseded(save) for save in saves]
    if adopted == "newest":
        assert all(adoption.save_id > save for save in saves)
        restarted = after.begin(after.epoch + 1, adoption.save_id, new_id())
        assert [restarted.superseded(save) for save in saves] == [ancestry.superseded(save) for save in saves]
    else:
        own = [save for save in saves if save.epoch > 0]
        assert all(adoption.save_id < save for save in own)
        if own and base in [save.step for save in own]:  # a rollback goes back to a step that is there
            to = next(save for save in own if save.step == base)
            assert not after.begin(after.epoch + 1, to, new_id()).superseded(adoption.save_id)


def test_two_copies_to_a_bucket_do_not_destroy_each_other(
    tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy would delete what the first has proven, and leave a committed step without data."""
    del server
    root, into = tmp_path / "run", "gs://runs/into"
    make_root(root, [1])
    real, refused = copying.copy_object, list[str]()

    def meanwhile(source: str, target: str) -> tuple[int, str]:
        if not refused:
            refused.append("")
            with pytest.raises(CheckpointError, match=r"another process .* is making") as caught:
                copy(plan_copy(str(root), into))
            refused.append(str(caught.value))
        return real(source, target)

    monkeypatch.setattr(copying, "copy_object", meanwhile)
    monkeypatch.setattr(copying, "_THREADS", 1)
    copy(plan_copy(str(root), into))
    assert len(refused) == 2
    assert restored(into) == (1, 1)
    assert not [key for key in open_store(into).list_all("") if "copying-" in key or "/intents/" in key]


def test_run_that_saves_the_step_takes_it_from_a_copy(
    tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy would commit over, or delete, what a run has saved under the number meanwhile."""
    del server
    root, into = tmp_path / "run", "gs://runs/into"
    make_root(root, [1])
    real = copying._Copying._prove

    def saves_meanwhile(self: Any) -> None:
        real(self)
        make_root(into, [1])

    monkeypatch.setattr(copying._Copying, "_prove", saves_meanwhile)
    with pytest.raises(CheckpointError, match="is not committed: a run, or another copy"):
        copy(plan_copy(str(root / "1"), into))
    assert {proof.state for proof in ckptkit.verify(into).steps} == {"proven"}
    assert steps_in(into) == [1]


def test_claim_of_a_dead_process_is_taken_over(tmp_path: Path, server: BucketServer) -> None:
    """A copy that was killed could never be made again."""
    del server
    root, into = tmp_path / "run", "gs://runs/into"
    make_root(root, [1])
    store = open_store(into)
    record = {"steps": [], "lease_s": 60, "beat": 3, "holder": "here:7", "process": ended_process()}
    store.put(f"{paths.LEASES_DIR}/{paths.claim_name('1')}", json.dumps(record).encode())
    copy(plan_copy(str(root), into))
    assert restored(into) == (1, 1)


def test_steps_that_are_deleted_before_their_turn_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy while a job runs would call steps damaged that the job has pruned."""
    root, into = tmp_path / "run", tmp_path / "into"
    make_root(root, [1, 2, 3])
    plan = plan_copy(str(root), str(into))
    shutil.rmtree(root / "1")
    real, leased = copying.copy_object, list[int]()

    def look(source: str, target: str) -> tuple[int, str]:
        if not leased:
            names = open_store(str(root)).list("_ckptkit/leases")
            leased.append(len(names))
            shutil.rmtree(root / "3")
        return real(source, target)

    monkeypatch.setattr(copying, "copy_object", look)
    monkeypatch.setattr(copying, "_THREADS", 1)
    done = copy(plan)
    assert [(each.step, each.act) for each in done.steps] == [(1, "leave"), (2, "copy"), (3, "leave")]
    assert {each.reason for each in done.steps if each.act == "leave"} == {"deleted meanwhile"}
    assert leased == [1], "one lease for all steps, before the first is read"
    assert steps_in(into) == [2]
