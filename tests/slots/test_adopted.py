"""Directories of processes that have ended, in the hands of one that lives."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.slots.arena import Arena
from tests.slots.arenas import die, new_host, proven, save_of, write


@pytest.fixture
def host() -> Iterator[Path]:
    """A host's directory on the ramdisk, in which ranks 0 and 1 and a copy of another host have saved 1, 2 and 3."""
    host = new_host()
    for name in ("0", "1", "buddy-1-0"):
        arena = Arena.open(host, name, slots=3, synced=False)
        for step in (1, 2, 3):
            write(arena, step)
        die(arena)
    Arena.open(host, "0.1", slots=3, synced=False).close()  # a start that met a lock for a moment
    yield host
    shutil.rmtree(host, ignore_errors=True)


def opened(host: Path) -> Arena:
    arena = Arena.open(host, 0, slots=3, synced=False, processes=1)
    arena.adopt()
    return arena


def steps(directory: Path) -> set[int]:
    return {save.step for save in proven(directory)}


def test_adopted_saves_stay_until_a_newer_one_is_committed(host: Path) -> None:
    arena = opened(host)
    assert not (host / "0.1").exists()
    assert steps(host / "1") == steps(host / "buddy-1-0") == {1, 2, 3}
    arena.protect(save_of(2))  # restored
    assert steps(host / "1") == steps(host / "buddy-1-0") == {2}
    write(arena, 4)
    assert steps(host / "1") == {2}, "not committed by all"
    arena.protect(save_of(4))
    assert sorted(path.name for path in host.iterdir()) == ["0"]
    arena.close()


def test_first_save_without_a_restore_makes_room_and_keeps_the_newest(host: Path) -> None:
    arena = opened(host)
    write(arena, 4)
    assert steps(host / "1") == {3}
    assert len(list((host / "1").glob("slot-*"))) == 1
    arena.close()


def test_death_before_the_commit_leaves_whole_saves_to_the_next(host: Path) -> None:
    arena = opened(host)
    arena.protect(save_of(3))
    die(arena)
    for each in arena._adopted:
        die(each)
    again = opened(host)
    assert steps(host / "1") == {3}
    write(again, 4)
    again.protect(save_of(4))
    assert not (host / "1").exists()
    again.close()


def test_directory_of_a_live_process_is_not_adopted(host: Path) -> None:
    alive = Arena.open(host, 1, slots=3, synced=False)
    arena = opened(host)
    write(arena, 4)
    arena.protect(save_of(4))
    assert steps(host / "1") == {1, 2, 3}
    alive.close()
    arena.close()


def test_adopted_directory_is_locked(host: Path) -> None:
    arena = opened(host)
    other = Arena.open(host, 1, slots=3, synced=False)
    assert other.directory == host / "1.1"
    other.close()
    arena.close()


def test_damaged_manifest_stays_until_this_run_has_committed(host: Path) -> None:
    for path in (host / "1").glob("step-*.json"):
        path.write_bytes(b"{")
    arena = opened(host)
    arena.protect(save_of(3))
    assert len(list((host / "1").glob("step-*.json"))) == 3
    write(arena, 4)
    arena.protect(save_of(4))
    assert not (host / "1").exists()
    arena.close()


def test_deleted_step_is_deleted_in_adopted_directories(host: Path) -> None:
    arena = opened(host)
    arena.forget({save_of(3)})
    assert steps(host / "1") == {1, 2}
    arena.close()
