"""Whose slots they are: what another user made in a tier's place is not written to, and nobody else reads ours."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.errors import TierUnusableError
from ckptkit.slots.arena import Arena
from ckptkit.slots.directory import keep_to_owner

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@contextmanager
def opened(base: Path, *, synced: bool = False) -> Iterator[Arena]:
    arena = Arena.open(base / "job" / "host", 0, slots=2, synced=synced)
    try:
        yield arena
    finally:
        arena.close()


def modes(base: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in sorted((base / "job").rglob("*"))}


@pytest.mark.parametrize("synced", [False, True])
def test_directories_and_slots_are_private(tmp_path: Path, synced: bool) -> None:
    """Every user of the host could read the parameters."""
    with opened(tmp_path, synced=synced) as arena:
        arena.reserve(4096)
        assert modes(tmp_path) == {"host": 0o700, "0": 0o700, "lock": 0o600, "slot-0.bin": 0o600, "slot-1.bin": 0o600}
        assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o700


def test_open_permissions_of_own_directories_are_taken_back(tmp_path: Path) -> None:
    """Directories of an earlier version, or of a provisioning script, would stay open to all."""
    slots = tmp_path / "job" / "host" / "0"
    slots.mkdir(parents=True)
    (slots / "slot-0.bin").write_bytes(b"")
    for path in (slots / "slot-0.bin", slots, slots.parent, slots.parent.parent):
        path.chmod(0o777)
    with opened(tmp_path) as arena:
        arena.reserve(4096)
        assert set(modes(tmp_path).values()) == {0o700, 0o600}


@needs_root
@pytest.mark.parametrize("place", ["job", "job/host", "job/host/0", "job/host/0/slot-0.bin", "job/host/0/lock"])
def test_what_another_user_owns_is_refused(tmp_path: Path, place: str) -> None:
    """Another user would read every save, change it under its digest, or keep all locks."""
    path = tmp_path / place
    if path.suffix or path.name == "lock":
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    else:
        path.mkdir(parents=True)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(
        TierUnusableError, match=rf"{path.name} belongs to user {STRANGER}, this process runs as user 0"
    ):
        Arena.open(tmp_path / "job" / "host", 0, slots=2, synced=False)


@needs_root
def test_slot_that_another_user_made_since_is_refused(tmp_path: Path) -> None:
    """The check at the start would be passed by a file that comes later."""
    with opened(tmp_path) as arena:
        assert arena.directory is not None
        (arena.directory / "slot-0.bin").write_bytes(b"")
        os.chown(arena.directory / "slot-0.bin", STRANGER, STRANGER)
        with pytest.raises(PermissionError, match="belongs to user"):
            arena.reserve(4096)


def test_shared_directory_keeps_its_permissions(tmp_path: Path) -> None:
    """A tier right below /dev/shm would lock every other user out of it."""
    tmp_path.chmod(0o1777)
    keep_to_owner(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777
