"""`copy`: a step arrives complete and verified, or not at all; between disks and buckets, also while a job runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.epochs import EpochRecords
from ckptkit.durable.lifecycle.root_record import certified_saves
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from ckptkit.guard.replaying import certify_saves
from ckptkit.model import paths
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Status
from ckptkit.upkeep import copy, copying, plan_copy, plan_rollback, rollback
from tests.upkeep.conftest import HOST, make_root, manager_of, restored, save
from tests.upkeep.test_prune import flip, steps_in

BUCKET = "gs://runs/run"


def stock_value(root: Path | str, step: int) -> int:
    """The result of stock Orbax's restore."""
    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == step
        return int(manager.restore(step, args=ocp.args.StandardRestore())["w"][0])  # pyright: ignore[reportCallIssue]


def test_root_is_copied_to_a_bucket_and_back(tmp_path: Path, server: BucketServer) -> None:
    """A backup could not be restored, by us or by stock Orbax, or would take an abandoned branch."""
    root, back = tmp_path / "run", tmp_path / "back"
    make_root(root, (1, 2, 3, 4))
    rollback(plan_rollback(str(root), 3, host_id=HOST))
    (root / "9.orbax-checkpoint-tmp").mkdir()
    plan = plan_copy(str(root), BUCKET)
    assert [(each.step, each.act) for each in plan.steps] == [(1, "copy"), (2, "copy"), (3, "copy")]
    assert plan.notes == ("not copied: step 4, abandoned", "not copied: step 9, unfinished")
    assert open_store(BUCKET).list("") == [], "a plan writes nothing"
    seen: list[tuple[int, int]] = []
    assert copy(plan, progress=lambda moved, total: seen.append((moved, total))).done
    assert seen[-1][1] == plan.copied_bytes
    assert {verdict.state for verdict in ckptkit.verify(BUCKET).steps} == {"proven"}
    assert stock_value(BUCKET, 3) == 3
    assert restored(BUCKET) == (3, 3)
    assert not any("_ckptkit_copy" in name for name in open_store(BUCKET).list_all(""))
    again = plan_copy(str(root), BUCKET)
    assert {each.act for each in again.steps} == {"skip"}

    copy(plan_copy(BUCKET, str(back)))
    assert {verdict.state for verdict in ckptkit.verify(str(back)).steps} == {"proven"}
    assert stock_value(back, 3) == 3
    for path in (root / "3").rglob("*"):
        if path.is_file():
            assert (back / path.relative_to(root)).read_bytes() == path.read_bytes(), path
    assert restored(back) == (3, 3)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("ocdbt", [True, False])
def test_stock_orbax_steps_are_copied(tmp_path: Path, server: BucketServer, ocdbt: bool) -> None:
    """Its steps have no digests: what arrives would be taken on trust, or not be committed in a bucket."""
    root = tmp_path / "stock"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        manager.save(5, args=ocp.args.PyTreeSave({"w": jnp.full(64, 5)}))  # pyright: ignore[reportCallIssue]
    (note,) = [each for each in copy(plan_copy(str(root / "5"), BUCKET)).steps if each.act == "copy"]
    assert note.save_id is None
    with ocp.CheckpointManager(BUCKET, item_handlers=ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as manager:
        assert manager.latest_step() == 5
        assert int(manager.restore(5, args=ocp.args.PyTreeRestore())["w"][0]) == 5  # pyright: ignore[reportCallIssue]
    copy(plan_copy(f"{BUCKET}/5", str(tmp_path / "back")))
    with ocp.CheckpointManager(tmp_path / "back", item_handlers=handler) as manager:
        assert int(manager.restore(5, args=ocp.args.PyTreeRestore())["w"][0]) == 5  # pyright: ignore[reportCallIssue]


def test_stock_step_replaced_during_the_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two saves of one number would be one step at the target, and no digest would show it."""
    handler, homes = ocp.PyTreeCheckpointHandler(use_ocdbt=False), (tmp_path / "root", tmp_path / "other")
    for value, home in enumerate(homes):
        with ocp.CheckpointManager(home, item_handlers=handler) as manager:
            tree = {name: jnp.full(64, value) for name in "abcd"}
            manager.save(5, args=ocp.args.PyTreeSave(tree))  # pyright: ignore[reportCallIssue]
    real, copied = copying.copy_object, list[str]()
    monkeypatch.setattr(copying, "_THREADS", 1)

    def replaced(source: str, target: str) -> tuple[int, str]:
        copied.append(source)
        if len(copied) == 8:
            shutil.rmtree(homes[0] / "5")
            shutil.copytree(homes[1] / "5", homes[0] / "5")
        return real(source, target)

    monkeypatch.setattr(copying, "copy_object", replaced)
    plan = plan_copy(str(homes[0] / "5"), str(tmp_path / "into"))
    with pytest.raises(CheckpointError, match="was replaced, or changed, while it was copied"):
        copy(plan)
    assert steps_in(tmp_path / "into") == []


def test_concurrent_copy_to_the_same_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last night's copy may still run when tonight's begins, and each would take away what the other has copied."""
    root, into = tmp_path / "run", str(tmp_path / "into")
    make_root(root, (1,))
    real, refused = copying.copy_object, list[str]()

    def meanwhile(source: str, target: str) -> tuple[int, str]:
        if not refused:
            refused.append("")
            with pytest.raises(CheckpointError, match="another process is making") as caught:
                copy(plan_copy(str(root), into), resume=True)
            refused.append(str(caught.value))
        return real(source, target)

    monkeypatch.setattr(copying, "copy_object", meanwhile)
    monkeypatch.setattr(copying, "_THREADS", 1)
    copy(plan_copy(str(root), into))
    assert len(refused) == 2
    assert restored(into) == (1, 1)
    assert sorted(path.name for path in Path(into).iterdir() if path.name.startswith(".")) == []


def test_damage_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup would be as bad as what it is a backup of, and be found so on the day it is needed."""
    root, into = tmp_path / "run", tmp_path / "into"
    make_root(root, (1, 2, 3))
    flip(root, 2)
    with pytest.raises(CorruptCheckpointError, match="run/2 is damaged, or was damaged on the way, and is not copied"):
        copy(plan_copy(str(root), str(into)))
    assert sorted(path.name for path in into.iterdir()) == ["1", "3", "_ckptkit"], "those after it too"
    shutil.rmtree(into)
    real = copying.copy_object

    def torn(source: str, target: str) -> tuple[int, str]:
        told = real(source, target)
        if target.endswith("_METADATA"):  # no digest of ours covers it
            data = bytearray(Path(target).read_bytes())
            Path(target).write_bytes(bytes(data).replace(b"StandardCheckpointHandler", b"StandardCheckpointHandles"))
        return told

    monkeypatch.setattr(copying, "copy_object", torn)
    with pytest.raises(CorruptCheckpointError, match="_METADATA"):
        copy(plan_copy(str(root / "1"), str(into)))
    assert steps_in(into) == []


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_copy_resumes_after_an_interruption_at_any_object(
    tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Half a step would be taken for one, or an interrupted copy of a night begin anew."""
    root, into = tmp_path / "run", str(tmp_path / "into") if place == "disk" else BUCKET
    make_root(root, (1,))
    real, copied, count = copying.copy_object, list[str](), 0
    monkeypatch.setattr(copying, "_THREADS", 1)

    def dies(source: str, target: str) -> tuple[int, str]:
        if len(copied) >= limit:
            raise KeyboardInterrupt
        copied.append(source)
        return real(source, target)

    monkeypatch.setattr(copying, "copy_object", dies)
    objects = len(plan_copy(str(root), into).steps[0].sizes) - 1  # the mark is written, not copied
    for limit in range(0, objects, 3 if place == "disk" else 4):
        copied.clear()
        with pytest.raises(KeyboardInterrupt):
            copy(plan_copy(str(root), into))
        assert steps_in(into) == [] or place == "bucket"
        assert ckptkit.latest_step(into) is None
        before = list(copied)
        limit = objects
        copied.clear()
        assert copy(plan_copy(str(root), into), resume=True).done
        assert not set(copied) & set(before)
        assert len(copied) + len(before) == objects
        assert restored(into) == (1, 1)
        count += 1
        if place == "disk":
            shutil.rmtree(into)
        else:
            store = open_store(into)
            store.delete_many(store.list_all(""))
    assert count > 1


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("marked", [False, True], ids=["before the mark", "after the mark"])
def test_copy_that_died_at_its_mark_is_completed(
    tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch, marked: bool, resume: bool
) -> None:
    """The step would have no journal and no mark, and every later copy would refuse it as another's."""
    root = tmp_path / "run"
    make_root(root, (1,))
    real = copying.commit_mark

    def dies(*args: Any) -> None:
        if marked:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(copying, "commit_mark", dies)
        with pytest.raises(KeyboardInterrupt):
            copy(plan_copy(str(root), BUCKET))
    assert ckptkit.latest_step(BUCKET) == (1 if marked else None)
    if marked:
        assert restored(BUCKET) == (1, 1)
        assert {proof.state for proof in ckptkit.verify(BUCKET).steps} == {"proven"}
    assert copy(plan_copy(str(root), BUCKET), resume=resume).done
    assert restored(BUCKET) == (1, 1)
    assert not [key for key in open_store(BUCKET).list_all("1") if key.endswith(paths.COPY_JOURNAL)]


def test_lost_mark_response_does_not_fail_the_copy(tmp_path: Path, server: BucketServer) -> None:
    """The client below repeats the put, and a complete copy would be reported as an obstacle to itself."""
    root = tmp_path / "run"
    make_root(root, (1,))
    intent = "run/_ckptkit/intents/*"
    lost = Fault(effect=Status(code=503, stage="after"), kinds=(Kind.COPY,), objects=intent, count=1)
    server.faults = FaultPlan(faults=(lost,))
    assert copy(plan_copy(str(root), BUCKET)).done
    assert server.fired() == [1]
    assert restored(BUCKET) == (1, 1)


def test_copy_of_another_source_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of two saves would be mixed in one step."""
    root, into = tmp_path / "run", tmp_path / "into"
    make_root(root, (1,))
    monkeypatch.setattr(copying._Copying, "_prove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        copy(plan_copy(str(root), str(into)))
    monkeypatch.undo()
    shutil.rmtree(root)
    make_root(root, (0, 1))
    assert copy(plan_copy(str(root), str(into)), resume=True).done
    assert {verdict.state for verdict in ckptkit.verify(str(into)).steps} == {"proven"}


def test_conflicting_targets_are_refused(tmp_path: Path, server: BucketServer) -> None:
    """Another run's steps would be mixed with these, or replaced."""
    root, into = tmp_path / "run", tmp_path / "into"
    make_root(root, (1, 2))
    make_root(into, (1,))
    with pytest.raises(CheckpointError, match="1 exists already, and is not known to be the same"):
        plan_copy(str(into / "1"), str(root))  # both are save 1@1.0
    with manager_of(into) as manager:
        save(manager, 5)
    with pytest.raises(CheckpointError, match="has a history of its own"):
        plan_copy(str(root), str(into))
    with pytest.raises(CheckpointError, match="is where the step is"):
        plan_copy(str(root / "1"), str(root))
    with pytest.raises(StepNotFoundError, match="there is nothing to copy"):
        plan_copy(str(tmp_path / "none"), str(into))
    open_store(f"{BUCKET}/1").put("other", b"x")
    with pytest.raises(CheckpointError, match="holds an unfinished step that is not a copy"):
        copy(plan_copy(str(root), BUCKET))


def test_root_is_copied_again_after_a_rollback(tmp_path: Path) -> None:
    """A second backup of a run would be refused, or leave an abandoned step newest."""
    root, into = tmp_path / "run", tmp_path / "into"
    make_root(root, (1, 2, 3))
    copy(plan_copy(str(root), str(into)))
    with manager_of(root) as manager:
        manager.restore(2)
        save(manager, 3, 33)
    with pytest.raises(CheckpointError, match="3 exists already"):
        plan_copy(str(root), str(into))
    shutil.rmtree(into / "3")
    done = copy(plan_copy(str(root), str(into)))
    assert [(each.step, each.act) for each in done.steps] == [(1, "skip"), (2, "skip"), (3, "copy")]
    assert restored(into) == (3, 33)


def test_refused_copy_records_no_deletion(tmp_path: Path) -> None:
    """The run that began at the target meanwhile would take its own saves in fast tiers for deleted ones."""
    root, target = tmp_path / "run", tmp_path / "target"
    with manager_of(root) as manager:
        for step in (1, 2, 3):
            save(manager, step)
        manager.delete(3)
    plan = plan_copy(str(root), str(target))
    make_root(target, (1, 2, 3))
    with pytest.raises(CheckpointError):
        copy(plan)
    assert EpochRecords(open_store(str(target))).read().deleted == frozenset()


def test_certified_saves_are_certified_in_the_copy(tmp_path: Path) -> None:
    """A job that restores from a backup by `certified=True` would find no step."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    by_step = {each.step: each.save_id for each in ckptkit.verify(str(root)).steps if each.save_id is not None}
    certify_saves(open_store(str(root)), [by_step[1], by_step[2]], held=[])
    assert copy(plan_copy(str(root), str(tmp_path / "copy"))).done
    assert certified_saves(open_store(str(tmp_path / "copy"))) == {by_step[1], by_step[2]}
    with manager_of(tmp_path / "copy") as manager:
        assert int(manager.restore(None, certified=True)["w"][0]) == 2


def test_deleted_step_does_not_return_to_a_copy(tmp_path: Path) -> None:
    """A host that was away at the deletion would bring the step back in the root that was copied."""
    root, ram, away = tmp_path / "run", tmp_path / "ram", tmp_path / "away"
    with manager_of(root, ram=ram) as manager:
        for step in (1, 2):
            save(manager, step)
            shutil.copytree(ram, away, dirs_exist_ok=True)  # of a host that is lost before the deletion
        manager.delete(2)
        manager.wait_until_finished()
    assert copy(plan_copy(str(root), str(tmp_path / "copy"))).done
    shutil.rmtree(root)
    shutil.rmtree(ram)
    (tmp_path / "copy").rename(root)
    away.rename(ram)
    with manager_of(root, ram=ram) as manager:
        assert manager.all_steps() == [1]
        assert manager.latest_step() == 1


def test_abandoned_step_is_restored_by_a_copy_to_a_new_root(tmp_path: Path) -> None:
    """After a rollback nothing could bring the other branch back."""
    root, into = tmp_path / "run", tmp_path / "into"
    make_root(root, (1, 2, 3))
    rollback(plan_rollback(str(root), 1, host_id=HOST))
    copy(plan_copy(str(root / "3"), str(into)))
    assert EpochRecords(open_store(into)).read().epoch == 0
    assert restored(into) == (3, 3)


def test_copy_keeps_steps_that_a_running_job_prunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job would prune the step that is being copied."""
    root, into = tmp_path / "run", tmp_path / "into"
    real: Any = copying.copy_object
    with manager_of(root, max_to_keep=1) as manager:
        save(manager, 1)
        plan = plan_copy(str(root), str(into))

        def saves_meanwhile(source: str, target: str) -> tuple[int, str]:
            if (manager.latest_step() or 0) < 3:
                monkeypatch.setattr(copying, "copy_object", real)
                save(manager, 2)
                save(manager, 3)
                assert steps_in(root) == [1, 3]
            return real(source, target)

        monkeypatch.setattr(copying, "_THREADS", 1)
        monkeypatch.setattr(copying, "copy_object", saves_meanwhile)
        copy(plan)
        save(manager, 4)
        manager.reload()
        assert steps_in(root) == [4]
        gone = str(tmp_path / "gone")
        left = copy(plan_copy(str(root), gone), progress=lambda *_: shutil.rmtree(root / "4", ignore_errors=True))
        assert [(each.step, each.act, each.reason) for each in left.steps] == [(4, "leave", "deleted meanwhile")]
        assert steps_in(gone) == []
    assert restored(into) == (1, 1)


def test_a_run_that_saves_the_step_meanwhile_is_no_damage(
    tmp_path: Path, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`copy` called a sound source damaged, with exit code 11, because it found the run's objects in its place."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    copy(plan_copy(str(root / "2"), BUCKET))
    prove = copying.prove_written

    def prove_late(*args: Any, **kwargs: Any) -> Any:
        make_root(BUCKET, (3,))
        return prove(*args, **kwargs)

    monkeypatch.setattr(copying, "prove_written", prove_late)
    with pytest.raises(CheckpointError, match="/3 is not committed: a run, or another copy, has begun") as caught:
        copy(plan_copy(str(root / "3"), BUCKET))
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert {verdict.state for verdict in ckptkit.verify(BUCKET).steps} == {"proven"}
    assert restored(BUCKET) == (3, 3)


def test_copy_into_a_root_that_a_job_was_started_in_is_refused(tmp_path: Path) -> None:
    """The manager would take each copied step for one of another root, and delete the newest as the oldest."""
    root, target = tmp_path / "run", tmp_path / "target"
    make_root(root, (1, 2))
    manager_of(target).close()
    with pytest.raises(CheckpointError, match="is another root already: a job was started there"):
        plan_copy(str(root), str(target))


def test_copy_into_a_copy_that_was_trained_on_is_refused(tmp_path: Path) -> None:
    """The steps of that run would be abandoned without a warning: both copies have only their newest records."""
    root, trained, later = tmp_path / "run", tmp_path / "b1", tmp_path / "b2"
    make_root(root, (1, 2, 3))
    copy(plan_copy(str(root), str(trained)))
    for step in (4, 5):
        with manager_of(root) as manager:
            manager.restore(None)
            save(manager, step)
    copy(plan_copy(str(root), str(later)))
    with manager_of(trained) as manager:
        manager.restore(None)
        save(manager, 10)
    for source in (root, later):
        with pytest.raises(CheckpointError, match="has a history of its own"):
            plan_copy(str(source), str(trained))


def test_step_gets_another_number_only_with_a_new_identity(tmp_path: Path) -> None:
    """Its records would name another step: the copy was called proven, and no restart took it."""
    make_root(tmp_path / "run", (1, 2, 3))
    with pytest.raises(CheckpointError, match="is not copied as step 9: its records name its number"):
        plan_copy(f"{tmp_path}/run/3", str(tmp_path / "target"), as_step=9)


@pytest.mark.parametrize("stock", [False, True])
def test_adopted_step_of_a_new_root_is_restored(stock: bool, tmp_path: Path) -> None:
    """A root without an id of its own gave the step two identities: no restart could read what was called proven."""
    target, number = tmp_path / "target", 3
    make_root(tmp_path / "run", (1, 2, 3))
    if stock:
        number = 7
        with ocp.CheckpointManager(target) as manager:
            for step in (5, 6):
                state = {"w": jnp.full(64, step)}
                manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    copy(plan_copy(f"{tmp_path}/run/3", str(target), as_step=number, adopted="newest"))
    assert ckptkit.latest_step(str(target)) == number
    assert restored(target) == (number, 3)
    assert restored(target) == (number, 3), "at the second start, too"
