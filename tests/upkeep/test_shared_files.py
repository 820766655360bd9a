"""Steps that share data files: bytes count once, and a deletion frees what no other step has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.model.tiers import KeepNewest
from ckptkit.upkeep.disk_usage import usage
from ckptkit.upkeep.pruning import plan_prune, prune
from tests.durable.test_unchanged import _save, _state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five steps of 2.4 MB; the last four share their frozen leaves."""
    with ckptkit.CheckpointManager(tmp_path / "root") as manager:
        for step in range(5):
            _save(manager, step, _state(step))
    return tmp_path / "root"


def _taken_bytes(root: Path) -> int:
    files = {at.st_ino: at.st_size for path in root.rglob("*") if path.is_file() and (at := path.stat())}
    return sum(files.values())


def test_du_counts_shared_files_once(root: Path) -> None:
    """A full disk would be searched for bytes that are not there."""
    found = usage(str(root))
    assert found.stored_bytes == _taken_bytes(root)
    assert [each.shared_bytes for each in found.steps] == [0, 2_400_000, 2_400_000, 2_400_000, 2_400_000]
    assert found.repeated_bytes == 3 * 2_400_000


def test_prune_frees_what_it_says(root: Path) -> None:
    """A person would delete four steps to make room, and get a quarter of it."""
    before = _taken_bytes(root)
    plan = plan_prune(str(root), keep=[KeepNewest(1)])
    assert [each.step for each in plan.doomed] == [0, 1, 2, 3]
    done = prune(plan)
    assert done.freed_bytes == plan.freed_bytes
    records = 4096  # the notice of the deletion, and what was moved away
    assert before - _taken_bytes(root) == pytest.approx(plan.freed_bytes, abs=records)
    assert plan.freed_bytes < 2 * 2_600_000


def _shared_file(root: Path, step: int) -> Path:
    return next(iter((root / f"{step}/default/d").glob("unchanged.*")))


def _damage(path: Path) -> None:
    with path.open("r+b") as file:  # bit rot: in place, so in all steps that have the file
        file.seek(1000)
        file.write(b"damaged")


def test_inspect_names_the_steps_that_have_the_same_bytes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person could not know which steps one bad block of the disk takes."""
    assert not ckptkit.inspect(str(root / "0")).shared
    for path, key in ((root / "3", "default/d/"), (root / "3/default", "d/")):
        ((name, found),) = ckptkit.inspect(str(path)).shared.items()
        assert name.startswith(f"{key}unchanged.")
        assert (found.size_bytes, found.steps, found.elsewhere) == (2_400_000, (1, 2, 4), 0)
    put_aside = root / "_ckptkit/quarantine"
    put_aside.mkdir()
    (root / "2").rename(put_aside / "2")
    (found,) = ckptkit.inspect(str(root)).shared.values()
    assert (found.steps, found.elsewhere) == ((1, 3), 1)
    assert main(["inspect", str(root / "4")]) == 0
    said = "shares 2.3 MiB in 1 file (hard links) with steps 1, 3 and 1 name outside of steps"
    assert said in capsys.readouterr().out
    assert main(["inspect", "--json", str(root / "4")]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["shared"]
    assert (listed["bytes"], listed["steps"], listed["elsewhere"]) == (2_400_000, [1, 3], 1)


def test_damaged_shared_file_is_reported_for_every_step_that_has_it(root: Path) -> None:
    """A person who looks at one step would trust the others, or take four reports for four bad blocks."""
    _damage(_shared_file(root, 3))
    found = ckptkit.verify(str(root))
    expected = {1: (2, 3, 4), 2: (1, 3, 4), 3: (1, 2, 4), 4: (1, 2, 3)}
    assert {each.step: each.findings[0].shared_with for each in found.steps if each.findings} == expected
    for path in (root / "2", root / "2/default"):
        (proof,) = ckptkit.verify(str(path)).steps
        assert proof.reason == "1 damaged, in files that steps 1, 3, 4 have too"
        (finding,) = proof.findings
        assert str(finding).endswith("; the file is also damaged in steps 1, 3, 4")
        assert finding.to_json()["shared_with"] == (1, 3, 4)


def test_damage_of_a_file_of_one_step_names_no_other(root: Path) -> None:
    """Steps that are whole would be taken for damaged."""
    own = max((each for each in (root / "3/default/d").iterdir() if each.stat().st_nlink == 1), key=_size)
    _damage(own)
    found = ckptkit.verify(str(root))
    assert [each.step for each in found.steps if each.state == "corrupt"] == [3]
    assert all(not finding.shared_with for each in found.steps for finding in each.findings)


def _size(path: Path) -> int:
    return path.stat().st_size


def test_quarantine_and_deletion_of_one_step_leave_the_bytes_of_the_others(root: Path) -> None:
    """A step that is put aside or deleted would take the frozen weights of good steps along."""
    own = max((each for each in (root / "4/default/d").iterdir() if each.stat().st_nlink == 1), key=_size)
    _damage(own)
    before = _shared_file(root, 1).read_bytes()
    done = ckptkit.scrub(str(root), [], repair=True, host_id="host")
    assert [(each.step, each.act, each.done) for each in done.treatments] == [(4, "quarantine", True)]
    with ckptkit.CheckpointManager(root) as manager:
        manager.delete(1)
        manager.delete(3)
    shared = _shared_file(root, 2)
    assert shared.read_bytes() == before
    assert shared.stat().st_nlink == 2, "its own name, and the one in quarantine"
    assert [each.state for each in ckptkit.verify(str(root)).steps] == ["proven", "proven"]


def test_repair_of_one_step_leaves_the_bytes_of_the_others(tmp_path: Path) -> None:
    """A repair that wrote into a shared file would change steps that nobody asked it to touch."""
    root, ram = tmp_path / "root", tmp_path / "ram"
    options = {"tiers": [ckptkit.Tier.ram(str(ram), slots=2)], "host_id": "host"}
    with ckptkit.CheckpointManager(root, **options) as manager:  # pyright: ignore[reportArgumentType]
        for step in range(4):
            _save(manager, step, _state(step))
    shared = _shared_file(root, 3)
    _damage(shared)
    damaged, inode = shared.read_bytes(), shared.stat().st_ino
    found = ckptkit.verify(str(root))
    assert sorted(each.step for each in found.steps if each.state == "corrupt") == [1, 2, 3]
    done = ckptkit.scrub(str(root), [str(ram)], repair=True, host_id="host")
    assert [(each.step, each.done) for each in done.treatments if each.act == "repair"] == [(2, True), (3, True)], done
    assert next(each for each in ckptkit.verify(str(root)).steps if each.step == 3).state == "proven"
    others = [path for path in root.rglob("unchanged.*") if path.stat().st_ino == inode]
    assert len(others) == 3, "each step that had the file keeps it, in its place or in quarantine"
    assert others[0].read_bytes() == damaged
