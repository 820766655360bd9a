"""Slots: what is committed stays whole, who holds them, how large they are, and what their readers believe."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import CorruptCheckpointError, StoreError, StoreFullError, TierUnusableError
from ckptkit.model.manifest import Manifest
from ckptkit.slots import reader as slot_reader
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import SlotReader, read_manifest, read_manifests, slot_directories
from ckptkit.store import LocalStore
from ckptkit.util.words import size_text
from tests.mounts import Mounts
from tests.slots.arenas import PAGE, commit, die, fill, prove, proven, save_of, write

# The other holder.

CHILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from ckptkit.slots.arena import Arena
    arena = Arena.open(Path(sys.argv[1]), 0, slots=2, synced=False)
    print(arena.directory.name, flush=True)
    sys.stdin.read()
    """
)


@contextmanager
def another_process(host: Path) -> Iterator[subprocess.Popen[str]]:
    """A real process that holds the first slot directory."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(host)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "0\n"
        yield child
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()
        child.wait()


def test_directory_locked_by_a_live_process_is_skipped(host: Path) -> None:
    """If it failed, a process of the last run that has not died yet would overwrite the new run's saves."""
    with another_process(host) as child:
        mine = Arena.open(host, 0, slots=2, synced=False)
        assert mine.directory == host / "0.1"
        write(mine, 1)
        assert [path.name for path in slot_directories(host)] == ["0", "0.1"]
        assert proven(host / "0") == set()
        child.send_signal(signal.SIGKILL)
        child.wait()
        after = Arena.open(host, 0, slots=2, synced=False)  # the kernel has released the dead one's lock
        assert after.directory == host / "0"
        after.close()
        mine.close()


FORKED = textwrap.dedent(
    """
    import os, signal, sys, time
    from pathlib import Path
    from ckptkit.slots.arena import Arena
    arena = Arena.open(Path(sys.argv[1]), 0, slots=1, synced=False)
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b"1")
        time.sleep(600)
    os.read(begun, 1)
    arena.close()
    arena = Arena.open(Path(sys.argv[1]), 0, slots=1, synced=False)
    print(arena.directory.name, flush=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    """
)


def test_forked_process_does_not_hold_the_lock(host: Path) -> None:
    """If it failed, data loaders' workers that outlive a job would keep its slots: the next run had to make others."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(host)], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "0\n"


def test_closed_arena_releases_its_lock_and_keeps_its_saves(host: Path) -> None:
    """If it failed, every restart would begin a new directory, and memory would fill with old ones."""
    first = Arena.open(host, 0, slots=2, synced=False)
    write(first, 1)
    first.close()
    second = Arena.open(host, 0, slots=2, synced=False)
    assert second.directory == first.directory == host / "0"
    assert second.held() == [save_of(1)]
    assert (host / "0").stat().st_mode & 0o777 == 0o700
    second.close(remove=True)
    assert os.listdir(host / "0") == ["lock"]


def test_newest_found_save_is_protected_until_released(host: Path) -> None:
    """If it failed, the first save after a restart would overwrite the only whole one."""
    first = Arena.open(host, 0, slots=2, synced=False)
    write(first, 1)
    write(first, 2)
    die(first)
    second = Arena.open(host, 0, slots=2, synced=False)
    slot = second.acquire(PAGE)
    assert slot is not None
    assert second.held() == [save_of(2)]
    assert second.acquire(PAGE) is None
    second.close()


def test_acquire_waits_for_a_lease_to_end(host: Path) -> None:
    """If it failed, a durable save that is due would be dropped although a slot is about to be free."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    slots = [arena.acquire(PAGE), arena.acquire(PAGE)]
    waits: list[float | None] = []
    wait_for = arena._changed.wait_for

    def told(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        waits.append(timeout)
        assert slots[0] is not None
        slots[0].leases -= 1  # what another thread's release does meanwhile
        return wait_for(predicate, timeout)

    arena._changed.wait_for = told
    assert arena.acquire(PAGE, timeout_s=30.0) is slots[0]
    assert waits == [pytest.approx(30.0, abs=1)]
    arena.close()


def test_unusable_directory_is_reported(tmp_path: Path) -> None:
    """If it failed, a mistyped tier path would end in a traceback after the first step."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnusableError, match=r"tier directory .*/file/host/0 cannot be used: Not a directory; give"):
        Arena.open(tmp_path / "file" / "host", 0, slots=2, synced=False)


def test_hundred_locked_directories_are_an_error(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a host full of zombies would be searched without an end."""

    def held(fd: int, operation: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", held)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnusableError, match=rf"^every slot directory below {host} is held by another process$"):
        Arena.open(host, 0, slots=2, synced=False)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSYS, r"its file system has no locks \(flock\); .* mount Lustre with -o flock"),
        (errno.ENOLCK, "its file system has no locks"),
        (errno.EIO, "flock: Input/output error"),
    ],
)
def test_directory_without_locks_is_unusable(
    host: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """Lustre without `-o flock` answers ENOSYS, NFS without a lock service ENOLCK: a user would see a bare OSError."""

    def refused(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnusableError, match=f"tier directory {host}.* cannot be used: {words}"):
        Arena.open(host, 0, slots=2, synced=False)
    assert len(os.listdir("/proc/self/fd")) == before


# Room.


def test_full_tmpfs_error_reports_needed_and_free_bytes(tmp_path: Path, mounts: Mounts) -> None:
    """If it failed, a full ramdisk would kill the trainer with SIGBUS instead of degrading the tier."""
    mount = mounts.small(tmp_path / "small", "2m")
    arena = Arena.open(mount / "host", 0, slots=3, synced=False)
    write(arena, 1, 256 * PAGE)  # 1 MiB of 2
    arena.protect(save_of(1))
    with pytest.raises(StoreFullError) as caught:
        arena.acquire(300 * PAGE)
    free = os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize
    assert str(caught.value) == (
        f"slot {mount}/host/0/slot-1.bin needs 1.2 MiB, {size_text(free)} are free in {mount}/host/0; "
        "the whole mount has 2.0 MiB, as a container's own /dev/shm does: run Docker with --shm-size, or "
        "mount a Kubernetes emptyDir with medium: Memory and give its path to Tier.ram, give fewer slots "
        "(`slots` or `keep` of the tier, `in_flight_max`), or leave this tier out"
    )
    assert isinstance(caught.value, OSError)
    assert proven(mount / "host" / "0") == {save_of(1)}
    write(arena, 2, 100 * PAGE)  # what fits still goes in
    assert proven(mount / "host" / "0") == {save_of(1), save_of(2)}
    with pytest.raises(StoreFullError):
        arena.reserve(300 * PAGE)
    arena.close()


def test_manifest_is_removed_before_slot_reuse(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a sync that fails and makes the file system read-only would leave a manifest over the bytes of
    later saves."""
    put = LocalStore.put

    def unsynced(self: LocalStore, key: str, data: bytes, *, mode: Any = "replace") -> None:
        put(self, key, data, mode=mode)
        raise StoreError("Input/output error")

    def read_only(self: LocalStore, key: str) -> None:
        raise StoreError("Read-only file system")

    arena = Arena.open(host, 0, slots=1, synced=True)
    slot = arena.acquire(2 * PAGE)
    assert slot is not None
    with monkeypatch.context() as broken:
        broken.setattr(LocalStore, "put", unsynced)
        broken.setattr(LocalStore, "delete", read_only)
        with pytest.raises(StoreError, match="Input/output error"):
            commit(arena, slot, fill(slot, save_of(1), 2 * PAGE))
        arena.release(slot)
    assert arena.acquire(2 * PAGE) is slot
    assert read_manifests([host / "0"])[0] == []
    arena.release(slot)
    arena.close()


def test_a_slot_is_reused_after_the_state_has_grown_and_shrunk(host: Path) -> None:
    """If it failed, a new state size would leave stale mappings, or take new memory for every save."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    for step, pages in enumerate([1, 1, 7, 2, 12, 3], start=1):
        write(arena, step, pages * PAGE - 5)
        arena.protect(save_of(step))
        assert save_of(step) in proven(host / "0")
    sizes = [(host / "0" / f"slot-{n}.bin").stat().st_size // PAGE for n in range(2)]
    assert sizes == [12, 3]  # steps 1, 3, 5 and 2, 4, 6: each slot as large as its largest save
    arena.close()
    again = Arena.open(host, 0, slots=2, synced=False)
    slot = again.acquire(PAGE)
    assert slot is not None
    assert slot.memory.nbytes >= 3 * PAGE  # a larger slot of an earlier state is kept
    again.close()


def test_reserve_creates_free_slots_and_keeps_saves(host: Path) -> None:
    """If it failed, making room early would destroy what is there."""
    arena = Arena.open(host, 0, slots=3, synced=False)
    write(arena, 1)
    arena.reserve(9 * PAGE)
    assert proven(host / "0") == {save_of(1)}
    sizes = sorted((host / "0" / f"slot-{n}.bin").stat().st_size // PAGE for n in range(3))
    assert sizes == [2, 9, 9]
    arena.close()


def test_mapped_slots_are_advised_as_read_once(host: Path) -> None:
    """Else the kernel activates each page when the process ends: with 4.5 GB a loss is noticed 0.2 s later."""
    arena = Arena.open(host, 0, slots=1, synced=False)
    write(arena, 1)
    reader = SlotReader(host / "0", read_manifests([host / "0"])[0][0][1])
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    flags = [re.findall(r"^VmFlags: (.*)$", one, re.MULTILINE)[0].split() for one in maps if f"{host}/0/slot-0" in one]
    assert len(flags) == 2, "of the arena and the reader"
    assert all("sr" in each for each in flags)
    assert reader.size_bytes > 0
    arena.close()


def test_lower_slot_count_frees_memory(host: Path) -> None:
    """If it failed, a job restarted with fewer slots would never free the old ones."""
    first = Arena.open(host, 0, slots=4, synced=False)
    for step in range(1, 5):
        write(first, step, 8 * PAGE)
    first.close()
    second = Arena.open(host, 0, slots=2, synced=False)
    for step in range(5, 9):
        write(second, step, 8 * PAGE)
        second.protect(save_of(step))
    assert proven(host / "0") == {save_of(7), save_of(8)}
    assert sorted(name for name in os.listdir(host / "0") if name.endswith(".bin")) == ["slot-0.bin", "slot-1.bin"]
    second.close()


def test_temporary_files_of_a_crashed_put_are_deleted(host: Path) -> None:
    """If it failed, every process that dies in a commit would leave a manifest's worth of memory behind."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    (host / "0" / ".put-abc123").write_bytes(b"half a manifest")
    arena.close()
    again = Arena.open(host, 0, slots=2, synced=False)
    assert sorted(os.listdir(host / "0")) == ["lock"]
    again.close()


def test_anonymous_arena_writes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a run without a fast tier would write slots into the working directory."""

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("no file is opened")

    monkeypatch.setattr(os, "open", forbidden)
    arena = Arena(None, slots=2, synced=False)
    slot = arena.acquire(3 * PAGE)
    assert slot is not None
    slot.memory[:] = 7
    assert (arena.manifests(), arena.held()) == ([], [])
    arena.discard(slot)
    arena.release(slot)
    assert arena.acquire(PAGE) is not None
    arena.close()


# Manifests and readers.


def test_damaged_manifest_is_skipped_and_reported(host: Path) -> None:
    """If it failed, one bad manifest would hide the good ones, or be restored."""
    arena = Arena.open(host, 0, slots=3, synced=False)
    write(arena, 1)
    write(arena, 2)
    (bad,) = (host / "0").glob("step-000000000002-*")
    bad.write_bytes(bad.read_bytes().replace(b'"step":2', b'"step":3'))
    found, damaged = read_manifests([host / "0"])
    assert [manifest.save_id for _, manifest in found] == [save_of(1)]
    assert [str(error) for error in damaged] == [f"manifest {bad} does not match its own digest"]
    arena.close()


def test_manifest_with_a_wrong_name_or_slot_is_refused(host: Path, tmp_path: Path) -> None:
    """If it failed, a renamed manifest would pass for a newer save, or name a file outside its directory."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1)
    (path,) = (host / "0").glob("step-*")
    renamed = path.with_name("step-000000000009-e00000001-n00000009.json")
    path.rename(renamed)
    with pytest.raises(
        CorruptCheckpointError, match=rf"^manifest {renamed} names slot 'slot-\d\.bin' and save 1@1\.1$"
    ):
        read_manifest(renamed)
    manifest = Manifest.from_bytes(renamed.read_bytes(), path="")
    hostile = Manifest(
        save_id=manifest.save_id, writer=manifest.writer, slot="../../secret", arrays=manifest.arrays, inline={}
    )
    path.write_bytes(hostile.to_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"names slot '\.\./\.\./secret'"):
        read_manifest(path)
    arena.close()


def test_a_huge_manifest_is_refused_before_it_is_read(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a sparse file of a terabyte would be read into memory at start."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1)
    (path,) = (host / "0").glob("step-*")
    monkeypatch.setattr(slot_reader, "MANIFEST_BYTES_MAX", 100)
    with pytest.raises(CorruptCheckpointError, match=rf"^manifest {path} is larger than 100 bytes$"):
        read_manifest(path)
    arena.close()


def test_read_of_a_reused_slot_is_superseded(host: Path) -> None:
    """If it failed, a reader in another process would call a save corrupt that was only replaced."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1)
    (_, manifest), *_ = read_manifests([host / "0"])[0]
    reader = SlotReader(host / "0", manifest)
    assert not reader.gone()
    write(arena, 2)
    arena.protect(save_of(2))
    write(arena, 3)  # over save 1
    assert reader.gone()
    (leaf,) = manifest.arrays["state"]
    with pytest.raises(CorruptCheckpointError, match=r"/slot-\d\.bin: leaf w, cell \(0,\) to "):
        reader.read(leaf, leaf.boxes[0], leaf.boxes[0].box, np.empty(leaf.shape, np.uint8))
    arena.close()


def test_truncated_slot_is_refused(host: Path) -> None:
    """If it failed, reading beyond the end of a slot would kill the process with SIGBUS."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1, 4 * PAGE)
    (directory, manifest), *_ = read_manifests([host / "0"])[0]
    arena.close()
    os.truncate(directory / manifest.slot, PAGE)
    with pytest.raises(CorruptCheckpointError, match=rf"slot-0\.bin has {PAGE} bytes, leaf w ends at \d+"):
        prove(directory, manifest)


def test_every_flipped_bit_of_a_slot_is_detected(host: Path) -> None:
    """If it failed, memory that rots would be restored into the model."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    slot = write(arena, 1, 100)
    (directory, manifest), *_ = read_manifests([host / "0"])[0]
    for bit in range(800):
        slot.memory[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError, match="leaf w, cell"):
            prove(directory, manifest)
        slot.memory[bit // 8] ^= 1 << bit % 8
    prove(directory, manifest)
    arena.close()


def test_hosts_without_a_directory_have_no_slots(host: Path) -> None:
    """If it failed, a fresh host could not join a job."""
    assert slot_directories(host) == []
    assert read_manifests([]) == ([], [])
