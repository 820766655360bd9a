"""`plan_prune` and `prune`: what the rules keep, what nothing may take, and what a running job makes of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.cli import main
from ckptkit.cli.exits import Exit
from ckptkit.durable.lifecycle.leases import Lease, announced_deletions, pinned_steps
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from ckptkit.model import paths
from ckptkit.model.tiers import EverySteps, KeepBytes, KeepNewest
from ckptkit.store import MemoryStore, open_store
from ckptkit.testing.bucket import BucketServer
from ckptkit.upkeep import pin, plan_prune, prune, pruning, unpin
from ckptkit.upkeep.pinning import put_pin
from ckptkit.verification.deletions import DeletionNotice
from tests.upkeep.conftest import make_root, manager_of, restored, save


def steps_in(root: Path | str) -> list[int]:
    return sorted(int(name.rstrip("/")) for name in open_store(root).list("") if name.rstrip("/").isdecimal())


def acts(plan: Any) -> dict[int, tuple[str, tuple[str, ...]]]:
    return {each.step: (each.act, each.reasons) for each in plan.steps}


def flip(root: Path, step: int) -> None:
    """One bit of the data of a step changes."""
    for path in (root / str(step) / "default/d").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), unique_by=lambda pair: pair[0]),
    st.one_of(
        st.builds(KeepNewest, st.integers(1, 5)),
        st.builds(KeepBytes, st.integers(1, 30)),
        st.builds(EverySteps, st.integers(1, 7)),
    ),
)
def test_each_rule_keeps_the_documented_steps(pairs: list[tuple[int, int]], rule: Any) -> None:
    """A rule would keep other steps than those in its name."""
    newest_first = [(str(step), step, size) for step, size in sorted(pairs, reverse=True)]
    kept = pruning.kept_by(rule, newest_first)
    if isinstance(rule, EverySteps):
        assert kept == [name for name, step, _ in newest_first if step % rule.steps == 0]
    elif isinstance(rule, KeepNewest):
        assert kept == [name for name, _, _ in newest_first[: rule.count]]
    else:
        sizes = {name: size for name, _, size in newest_first}
        assert kept == [name for name, _, _ in newest_first[: len(kept)]]
        assert sum(sizes[name] for name in kept) <= rule.bytes_max or len(kept) == 1
        assert len(kept) == len(pairs) or sum(sizes[n] for n, _, _ in newest_first[: len(kept) + 1]) > rule.bytes_max


def test_prune_keeps_steps_of_rules_and_pins(tmp_path: Path) -> None:
    """The wrong steps would be deleted, for good."""
    root = tmp_path / "run"
    make_root(root, range(1, 9))
    pin(str(root), 3, reason="the paper's")
    (root / "9.orbax-checkpoint-tmp").mkdir()
    flip(root, 7)  # not the newest: nobody reads it for a pruning
    (root / "6" / "default" / paths.SIDECAR_DIR / "process-0.json").write_text("{")
    plan = plan_prune(str(root), [KeepNewest(1), EverySteps(4)])
    assert acts(plan) == {
        1: ("delete", ("no rule keeps it",)),
        2: ("delete", ("no rule keeps it",)),
        3: ("keep", ("pinned",)),
        4: ("keep", ("every=4",)),
        5: ("delete", ("no rule keeps it",)),
        6: ("leave", ("damaged: `ckptkit scrub` reports what can be done",)),
        7: ("delete", ("no rule keeps it",)),
        8: ("keep", ("newest=1", "every=4", "the newest whole step")),
        9: ("leave", ("never committed: a save in flight, or interrupted",)),
    }
    assert steps_in(root) == list(range(1, 9)), "a plan deletes nothing"
    done = prune(plan)
    assert (done.done, [each.step for each in done.doomed]) == (True, [1, 2, 5, 7])
    assert steps_in(root) == [3, 4, 6, 8]
    assert announced_deletions(open_store(root)) == set()
    assert restored(root) == (8, 8)
    assert [each.step for each in ocp.CheckpointManager(root)._checkpoints] == [3, 4, 6, 8]


def test_newest_undamaged_step_is_never_deleted(tmp_path: Path) -> None:
    """Only damaged steps would be left: the rules count names, not bytes."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    flip(root, 3)
    plan = plan_prune(str(root), [KeepNewest(1)])
    assert acts(plan) == {
        1: ("delete", ("no rule keeps it",)),
        2: ("keep", ("newest=1", "the newest whole step")),
        3: ("leave", ("damaged: `ckptkit scrub` reports what can be done",)),
    }
    assert plan.proven == 2
    assert len(plan.problems) == 1
    prune(plan)
    assert restored(root)[0] == 2
    assert plan_prune(str(root), [KeepNewest(1)], unread=True).proven == 3, "its records are trusted"


def test_step_that_a_restore_may_reject_is_not_the_newest_whole_one(tmp_path: Path) -> None:
    """A restart without a template rejects a step that lacks `_METADATA`: no other step would be left."""
    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as stock:
        for step in (1, 2, 3):
            stock.save(step, args=ocp.args.StandardSave({"w": jnp.full(64, step)}))  # pyright: ignore[reportCallIssue]
    (root / "3/default/_METADATA").unlink()
    plan = plan_prune(str(root), [KeepNewest(1)])
    assert acts(plan) == {
        1: ("delete", ("no rule keeps it",)),
        2: ("keep", ("the newest whole step",)),
        3: ("keep", ("newest=1", "newer, and a restore with a template takes it")),
    }
    assert "_METADATA" in "".join(plan.notes)
    every = acts(plan_prune(str(root), [EverySteps(1000)]))
    newer = "newer, and a restore with a template takes it"
    assert every == {
        1: ("delete", ("no rule keeps it",)),
        2: ("keep", ("the newest whole step",)),
        3: ("keep", (newer,)),
    }
    for step in (1, 2):
        (root / f"{step}/default/_METADATA").unlink()
    assert plan_prune(str(root), [KeepNewest(1)]).proven == 3, "each of them may be rejected"


def test_unread_prune_keeps_an_older_step_than_one_with_a_known_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the steps only one would be left that stock Orbax may not restore, and nothing would tell."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    (root / "3/_CHECKPOINT_METADATA").write_text("{")
    assert main(["prune", str(root), "--keep", "newest=1", "--unread"]) == Exit.CORRUPT
    assert "_CHECKPOINT_METADATA cannot be read" in capsys.readouterr().err
    assert steps_in(root) == [2, 3]


def test_prune_that_leaves_a_damaged_step_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A nightly job that prunes would be green for months above a damaged step."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    (root / "1" / "default" / paths.SIDECAR_DIR / "process-0.json").write_text("{")
    assert main(["prune", str(root), "--keep", "newest=1"]) == Exit.CORRUPT
    printed = capsys.readouterr()
    assert "process-0.json" in printed.err
    assert "it is left as it is" in printed.err
    assert steps_in(root) == [1, 3], "what could be pruned was"


def test_superseded_steps_are_deleted(tmp_path: Path) -> None:
    """An abandoned branch would push good steps out of what is kept."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3, 4))
    with manager_of(root) as manager:
        manager.restore(2)
        save(manager, 3, 33)
    plan = plan_prune(str(root), [KeepNewest(2)])
    assert {step: act for step, (act, _) in acts(plan).items()} == {1: "delete", 2: "keep", 3: "keep", 4: "delete"}
    prune(plan)
    assert steps_in(root) == [2, 3]
    assert restored(root) == (3, 33)


def test_leased_step_is_kept_and_a_dead_lease_expires(tmp_path: Path) -> None:
    """An evaluator would lose the step under its hands, or a reader that died would keep one without an end."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    store = open_store(root)
    plan = plan_prune(str(root), [KeepNewest(1)])
    with Lease(store, 1, lease_s=60.0) as lease:  # begins after the plan was made
        assert lease.granted()
        assert acts(prune(plan))[1] == ("keep", ("in use, or pinned",))
    assert steps_in(root) == [1, 3]
    store.put(f"{paths.LEASES_DIR}/{'0' * 32}.json", json.dumps({"step": 1, "beat": 4, "lease_s": 0.05}).encode())
    assert acts(plan_prune(str(root), [KeepNewest(1)]))[1] == ("keep", ("in use",)), "one look cannot tell"
    store.delete(f"{paths.LEASES_DIR}/{'0' * 32}.json")
    plan = plan_prune(str(root), [KeepNewest(1)])
    store.put(f"{paths.LEASES_DIR}/{'0' * 32}.json", json.dumps({"step": 1, "beat": 4, "lease_s": 0.05}).encode())
    assert acts(prune(plan, wait_s=30.0))[1][0] == "delete"
    assert steps_in(root) == [3]


def test_concurrent_deletion_notices_do_not_overwrite(tmp_path: Path) -> None:
    """Two that delete at a time would overwrite each other's word, and a reader begin with a step that goes."""
    store = MemoryStore()
    with DeletionNotice(store, [1]) as one, DeletionNotice(store, [2, 3]):
        assert announced_deletions(store) == {1, 2, 3}
        with Lease(store, 2, lease_s=60.0) as lease:
            assert not lease.granted()
        assert not one.lost
    assert announced_deletions(store) == set()
    with (
        DeletionNotice(store, [4]),
        pytest.raises(CheckpointError, match="step 4 in memory: is being deleted; it cannot be pinned"),
    ):
        put_pin(store, 4)
    assert pinned_steps(store) == set()


@pytest.mark.parametrize("change", ["rollback", "gone", "run"])
def test_changed_root_is_not_pruned_by_an_old_plan(tmp_path: Path, change: str) -> None:
    """The plan of a minute ago would delete what a run needs now."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    plan = plan_prune(str(root), [KeepNewest(1)])
    if change == "run":  # it may go back to any step yet
        with manager_of(root) as manager:
            save(manager, 4)
        with pytest.raises(CheckpointError, match="changed since it was looked at"):
            prune(plan)
        assert steps_in(root) == [1, 2, 3, 4]
        return
    if change == "gone":
        shutil.rmtree(root / "1")
        assert acts(prune(plan))[1] == ("leave", ("it was deleted or saved anew meanwhile",))
        assert steps_in(root) == [3]
        return
    with manager_of(root) as manager:
        manager.restore(1)
        save(manager, 2, 22)
    with pytest.raises(CheckpointError, match="a run began, or went back; nothing was deleted"):
        prune(plan)
    assert restored(root) == (2, 22)


def test_step_saved_again_during_the_deletion_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new save of a running job would be deleted for the old one of its number."""
    root = tmp_path / "run"
    make_root(root, (1, 2))
    plan = plan_prune(str(root), [KeepNewest(1)])
    rename = os.rename

    def replaced_before(source: str, target: str) -> None:
        if source == str(root / "1"):
            monkeypatch.setattr(os, "rename", rename)
            shutil.rmtree(source)
            make_root(root.with_name("other"), (0, 1))
            shutil.copytree(root.with_name("other") / "1", source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", replaced_before)
    assert acts(prune(plan))[1] == ("leave", ("it was saved anew meanwhile",))
    assert steps_in(root) == [1, 2]
    assert not list((root / paths.LEAVING_DIR).iterdir())


def test_crashed_deletion_leaves_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle would leave half a step that a restart takes."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    plan = plan_prune(str(root), [KeepNewest(1)])

    def interrupted(path: str) -> None:
        assert str(path).startswith(str(root / paths.LEAVING_DIR / "1-"))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune(plan)
    assert steps_in(root) == [2, 3]
    assert announced_deletions(open_store(root)) == set(), "what is left may be read again"
    assert restored(root) == (3, 3)


def test_prune_of_a_running_job_is_safe(tmp_path: Path) -> None:
    """A job would fail when steps of its books were deleted, or delete pinned steps."""
    root = tmp_path / "run"
    with manager_of(root, max_to_keep=3) as manager:
        for step in range(1, 4):
            save(manager, step)
        pin(str(root), 2)
        prune(plan_prune(str(root), [KeepNewest(1)]))
        assert steps_in(root) == [2, 3]
        for step in range(4, 8):
            save(manager, step)
        assert steps_in(root) == [2, 5, 6, 7], "the job's own pruning leaves what is pinned"
        unpin(str(root), 2)
        save(manager, 8)
        manager.reload()
        assert steps_in(root) == [6, 7, 8]
    assert restored(root) == (8, 8)


def test_pinned_step_number_is_not_saved_again(tmp_path: Path) -> None:
    """A rollback would replace the step that was pinned to be kept."""
    root = tmp_path / "run"
    make_root(root, (1, 2, 3))
    pin(str(root), 2)
    with manager_of(root) as manager:
        manager.restore(1)
        manager.save(2, args=ocp.args.StandardSave({"w": 22}))  # pyright: ignore[reportCallIssue]
        with pytest.raises(CheckpointError, match="pinned: it is not replaced"):
            manager.wait_until_finished()
        save(manager, 3, 33)
    assert restored(root) == (3, 33)
    assert steps_in(root) == [1, 2, 3]


def test_steps_are_pinned_and_unpinned(tmp_path: Path) -> None:
    """A pin would be put on nothing, or one could not be taken out."""
    root = tmp_path / "run"
    make_root(root, (1, 2))
    with pytest.raises(StepNotFoundError, match="no committed durable step 7"):
        pin(str(root), 7)
    assert pin(str(root), 1, dry_run=True).pinned == (1,)
    assert pinned_steps(open_store(root)) == set()
    assert pin(str(root), 1).changed
    assert not pin(str(root), 1, reason="again").changed
    (root / paths.LEASES_DIR / paths.pin_name(1)).write_bytes(b"\xff")
    assert acts(plan_prune(str(root), [KeepNewest(1)]))[1] == ("keep", ("pinned",)), "its name alone holds"
    with pytest.raises(StepNotFoundError, match="no pin of step 2; pinned are: 1"):
        unpin(str(root), 2)
    assert unpin(str(root), 1, dry_run=True).pinned == ()
    assert unpin(str(root), 1).pinned == ()
    assert acts(plan_prune(str(root), [KeepNewest(1)]))[1][0] == "delete"


def test_unreadable_records_prevent_pruning(tmp_path: Path) -> None:
    """Which steps are abandoned is not known then: nothing may go."""
    root = tmp_path / "run"
    make_root(root, (1, 2))
    for path in (root / paths.EPOCHS_DIR).iterdir():
        path.write_text("{}")
    with pytest.raises(CorruptCheckpointError, match="epoch record"):
        plan_prune(str(root), [KeepNewest(1)])


def test_prunes_and_pins_on_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most checkpoints are, nothing could be pruned or pinned."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["upkeep"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        root = "gs://upkeep/run"
        make_root(root, (1, 2, 3, 4))
        pin(root, 2)
        with manager_of(root) as manager:
            manager.restore(3)
            save(manager, 5)
        with manager_of(root) as manager:
            manager.restore(3)
            save(manager, 4, 44)
        plan = plan_prune(root, [KeepNewest(1)])
        assert {step: act for step, (act, _) in acts(plan).items()} == {
            1: "delete",
            2: "keep",
            3: "delete",
            4: "keep",
            5: "leave",  # abandoned, and its number is still to come
        }
        prune(plan)
        assert steps_in(root) == [2, 4, 5]
        assert restored(root) == (4, 44)


def test_step_saved_again_on_a_bucket_during_a_prune_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pruning of a thousand steps takes minutes: the newest step of a run that went back meanwhile would go."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["upkeep"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        root = "gs://upkeep/run"
        make_root(root, (1, 2, 3, 4))
        plan = plan_prune(root, [KeepNewest(1), EverySteps(2)])
        assert [each.step for each in plan.doomed] == [1, 3]
        remove_step = pruning.remove_step

        def goes_back_after(where: str, *args: Any) -> Any:
            removed = remove_step(where, *args)
            if where.endswith("/1"):
                with manager_of(root) as manager:
                    manager.restore(2)
                    save(manager, 3, 33)
            return removed

        monkeypatch.setattr(pruning, "remove_step", goes_back_after)
        done = acts(prune(plan))
        assert done[1][0] == "delete"
        assert done[3] == ("leave", ("it was saved anew meanwhile",))
        assert steps_in(root) == [2, 3, 4]
        assert restored(root) == (3, 33)


def test_link_does_not_take_the_place_of_a_step(tmp_path: Path) -> None:
    """The link would be kept as the newest step, and what it leads to, the only checkpoint, be deleted."""
    make_root(tmp_path, [100, 200, 300])
    os.symlink(tmp_path / "300", tmp_path / "best_300")
    os.symlink(tmp_path / "300", tmp_path / "400")
    plan = prune(plan_prune(str(tmp_path), [KeepNewest(1)]))
    assert {each.name: each.act for each in plan.steps} == {"100": "delete", "200": "delete", "300": "keep"}
    assert plan.notes == ("links, which are never steps: 400, best_300",)
    assert restored(tmp_path) == (300, 300)


def test_directories_of_another_name_format_are_not_judged(tmp_path: Path) -> None:
    """A base model next to the run would be deleted, and a copy of its best step push one of the run's out."""
    make_root(tmp_path, [100, 200, 300])
    ocp.PyTreeCheckpointer().save(tmp_path / "gemma_3", {"w": jnp.ones(3)})
    shutil.copytree(tmp_path / "200", tmp_path / "best_250")
    plan = prune(plan_prune(str(tmp_path), [KeepNewest(2)]))
    assert {each.name: each.act for each in plan.steps} == {"100": "delete", "200": "keep", "300": "keep"}
    assert (tmp_path / "gemma_3/_METADATA").exists()
    assert (tmp_path / "best_250/default").is_dir()
    assert any("best_250, gemma_3" in note for note in plan.notes)
    chosen = plan_prune(str(tmp_path), [KeepNewest(1)], step_prefix="best")
    assert [each.name for each in chosen.steps] == ["best_250"]


def test_prune_prints_directories_and_what_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody could tell from the plan which files go."""
    root = tmp_path / "run"
    make_root(root, [1, 2], step_prefix="run")
    (root / "notes_2024").mkdir()
    assert main(["prune", str(root), "--keep", "newest=1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "run_1" in printed
    assert "left: not steps: nothing in them shows that Orbax or ckptkit wrote them: notes_2024" in printed
    assert (root / "run_1").is_dir()


def test_damaged_records_do_not_stop_commands_or_pruning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged lease would stop a job's pruning for good, and every command with an internal error."""
    make_root(tmp_path, [1, 2, 3])
    leases = tmp_path / "_ckptkit/leases"
    leases.mkdir(exist_ok=True)
    for text in ("{", '{"steps": 1}', "[]", '{"steps": [1e999]}'):
        (tmp_path / "_ckptkit/doomed.json").write_text(text)
        assert announced_deletions(open_store(str(tmp_path))) == set()
        assert main(["pin", str(tmp_path), "1"]) == 0
        assert main(["unpin", str(tmp_path), "1"]) == 0
    for text in ('{"step": 1e999, "lease_s": 60}', '{"step": 1, "lease_s": NaN}', "[]", '{"steps": 7}'):
        (leases / "bad.json").write_text(text)
        plan = plan_prune(str(tmp_path), [KeepNewest(1)])
        assert [each.act for each in plan.steps] == ["keep"] * 3, "a lease that cannot be read counts for every step"
    (leases / "bad.json").write_text('{"step": 1, "lease_s": 1e999}')
    assert [each.act for each in plan_prune(str(tmp_path), [KeepNewest(1)]).steps] == ["keep", "delete", "keep"]
    capsys.readouterr()


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_deletion_of_a_dead_process_is_ended_and_one_in_progress_is_not(
    where: str, server: BucketServer, tmp_path: Path
) -> None:
    """Half of a step would never be removed; or a step would be lost that another command is about to give back."""
    root = "gs://runs/cut" if where == "bucket" else str(tmp_path / "run")
    make_root(root, (1, 2))
    store = open_store(root)
    left = [f"{paths.INTENTS_DIR}/{paths.going_name('7')}", "7/state/_METADATA"]
    for key in left if where == "bucket" else [f"{paths.LEAVING_DIR}/7-{'0' * 32}/state/_METADATA"]:
        store.put(key, b"{}")

    def there() -> list[str]:
        return [*store.list_all(paths.INTENTS_DIR), *store.list_all("7"), *store.list_all(paths.LEAVING_DIR)]

    before = there()
    with DeletionNotice(store, [7]):
        prune(plan_prune(root, [KeepNewest(2)]))
        assert there() == before
    prune(plan_prune(root, [KeepNewest(2)]))
    assert there() == []


def test_step_of_another_root_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It counts as the oldest, whatever its number: a restart that does not take it, and its deletion, surprise."""
    root, other = tmp_path / "run", tmp_path / "other"
    make_root(root, (1, 2))
    make_root(other, (50,))
    shutil.copytree(other / "50", root / "50")
    assert restored(root) == (2, 2)
    (warning,) = [each.getMessage() for each in caplog.records if "holds steps of another root" in each.getMessage()]
    assert f"ckptkit copy OTHER_ROOT/50 {root} --as newest" in warning
    assert main(["steps", str(root)]) == 0
    assert "of another root, so they count as older" in capsys.readouterr().out
    assert main(["prune", str(root), "--keep", "newest=2"]) == 0
    assert "of another root, so the oldest, and no rule keeps it" in capsys.readouterr().out
    assert steps_in(root) == [1, 2]
    assert main(["copy", str(other / "50"), str(root), "--as", "newest"]) == 0
    assert restored(root) == (50, 50)
