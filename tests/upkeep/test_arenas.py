"""`list_arenas` and `clean_arenas`: a running job's slots are never touched, a dead one's can go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.errors import StepNotFoundError
from ckptkit.upkeep import clean_arenas, list_arenas
from tests.jobs import job_of
from tests.upkeep.conftest import HOST, make_root, manager_of, restored, save


def test_live_arenas_are_kept_and_dead_ones_cleaned(tmp_path: Path) -> None:
    """A cleaning would take the slots of a running job, and with them its newest steps."""
    ram, dead, live = tmp_path / "ram", tmp_path / "dead", tmp_path / "live"
    make_root(dead, (1, 2), ram=ram, save_interval_steps=10)
    with manager_of(live, ram=ram) as manager:
        save(manager, 7)
        found = list_arenas([str(ram)])
        assert {each.job: (each.live, [save[0] for save in each.saves]) for each in found} == {
            job_of(dead): (False, [1, 2]),
            job_of(live): (True, [7]),
        }
        assert all(each.stored_bytes >= each.slots * 4096 > 0 for each in found)
        assert [each.job for each in list_arenas([str(ram)], root=str(live))] == [job_of(live)]
        assert list_arenas([str(ram)], host_id="h1") == []

        assert clean_arenas([str(ram)], host_id="h1", idle_s=0).removed == ()
        planned = clean_arenas([str(ram)], host_id=HOST, idle_s=0, dry_run=True)
        assert ([each.live for each in planned.removed], planned.done) == ([False], False)
        assert list_arenas([str(ram)]) == found
        assert clean_arenas([str(ram)], host_id=HOST, idle_s=3600).removed == ()
        done = clean_arenas([str(ram)], host_id=HOST, idle_s=0)
        assert [each.job for each in done.removed] == [job_of(dead)]
        assert [(each.live, why) for each, why in done.kept] == [(True, "a process of the job is running")]
        assert done.freed_bytes == done.removed[0].stored_bytes
        save(manager, 8)
    assert [each.job for each in list_arenas([str(ram)])] == [job_of(live)]
    assert restored(live, ram=ram) == (8, 8)
    make_root(dead, (3,), ram=ram, save_interval_steps=10)  # what is left can be used again
    assert restored(dead, ram=ram, save_interval_steps=10) == (3, 3)


def test_one_live_process_keeps_the_whole_job(tmp_path: Path) -> None:
    """A job that is half restarted would lose the shares of its other processes."""
    ram, root = tmp_path / "ram", tmp_path / "run"
    make_root(root, (1,), ram=ram)
    (rank,) = ram.glob(f"*/{HOST}/0")
    other = rank.with_name("1")
    other.mkdir()
    for path in rank.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    with manager_of(root, ram=ram):
        done = clean_arenas([str(ram)], host_id=HOST, root=str(root))
        assert (done.removed, len(done.kept)) == ((), 2)
    done = clean_arenas([str(ram)], host_id=HOST, root=str(root))
    assert len(done.removed) == 2
    assert sorted(path.name for path in ram.rglob("*") if path.is_file()) == ["lock", "lock"]


def test_job_that_starts_during_a_clean_keeps_its_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new slots would be deleted: whether it runs is asked again under the locks."""
    ram, root = tmp_path / "ram", tmp_path / "run"
    make_root(root, (1,), ram=ram)
    listed = list_arenas([str(ram)])
    with manager_of(root, ram=ram) as manager:
        monkeypatch.setattr("ckptkit.upkeep.arenas.list_arenas", lambda *_, **__: listed)  # of a moment ago
        done = clean_arenas([str(ram)], host_id=HOST, job=listed[0].job)
        assert (done.removed, [each.live for each, _ in done.kept]) == ((), [True])
        save(manager, 2)
    assert restored(root, ram=ram) == (2, 2)


def test_quarantine_is_cleaned_with_its_job(tmp_path: Path) -> None:
    """A quarantine on a ramdisk would never free its memory, after its job was cleaned."""
    ram, root = tmp_path / "ram", tmp_path / "run"
    make_root(root, (1,), ram=ram)
    (rank,) = ram.glob(f"*/{HOST}/0")
    (rank / "_quarantine").mkdir()
    (rank / "_quarantine/slot-0.bin").write_bytes(os.urandom(10_000))
    (entry,) = list_arenas([str(ram)])
    assert entry.quarantine_bytes >= 10_000
    assert clean_arenas([str(ram)], host_id=HOST, job=entry.job).freed_bytes > entry.stored_bytes
    assert not (rank / "_quarantine").exists()


def test_clean_without_a_selection_is_refused(tmp_path: Path) -> None:
    """A slip would clean every job of the host."""
    with pytest.raises(ValueError, match="choose the arenas"):
        clean_arenas([str(tmp_path)], host_id=HOST)
    with pytest.raises(StepNotFoundError, match="no such directory"):
        clean_arenas([str(tmp_path / "none")], host_id=HOST, idle_s=0)
    (tmp_path / "stray/x/y").mkdir(parents=True)
    assert list_arenas([str(tmp_path)]) == []
