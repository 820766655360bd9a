"""Steps that share data files: bytes count once, and a deletion frees what no other step has."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptkit
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


def test_repair_of_one_step_leaves_the_bytes_of_the_others(tmp_path: Path) -> None:
    """A repair that wrote into a shared file would change steps that nobody asked it to touch."""
    root, ram = tmp_path / "root", tmp_path / "ram"
    options = {"tiers": [ckptkit.Tier.ram(str(ram), slots=2)], "host_id": "host"}
    with ckptkit.CheckpointManager(root, **options) as manager:  # pyright: ignore[reportArgumentType]
        for step in range(4):
            _save(manager, step, _state(step))
    shared = next(iter((root / "3/default/d").glob("unchanged.*")))
    with shared.open("r+b") as file:  # bit rot: in place, so in all steps that have the file
        file.seek(1000)
        file.write(b"damaged")
    damaged, inode = shared.read_bytes(), shared.stat().st_ino
    found = ckptkit.verify(str(root))
    assert sorted(each.step for each in found.steps if each.state == "corrupt") == [1, 2, 3]
    done = ckptkit.scrub(str(root), [str(ram)], repair=True, host_id="host")
    assert [(each.step, each.done) for each in done.treatments if each.act == "repair"] == [(2, True), (3, True)], done
    assert next(each for each in ckptkit.verify(str(root)).steps if each.step == 3).state == "proven"
    others = [path for path in root.rglob("unchanged.*") if path.stat().st_ino == inode]
    assert len(others) == 3, "each step that had the file keeps it, in its place or in quarantine"
    assert others[0].read_bytes() == damaged
