"""Slots: what is committed stays whole, whoever dies when, and nobody writes where somebody reads."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckptkit import arena as arena_module
from ckptkit import slot_reader
from ckptkit.arena import Arena, Slot
from ckptkit.errors import CorruptCheckpointError, StoreError, StoreFullError, TierUnusableError
from ckptkit.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer, cell_ranges, digest_of
from ckptkit.newest import lost_newest
from ckptkit.sharding import Box
from ckptkit.slot_reader import SlotReader, read_manifest, read_manifests, slot_directories
from tests.mounts import Mounts

PAGE = 4096
_serial = itertools.count()


def save_of(step: int, epoch: int = 1) -> SaveId:
    return SaveId(epoch, step, step)


def fill(slot: Slot, save: SaveId, size: int) -> Manifest:
    """Writes a pattern that only `save` has into the slot, and returns the manifest that proves it."""
    data = np.random.default_rng([save.epoch, save.step, save.number, size]).integers(0, 256, size, np.uint8)
    slot.memory[:size] = data
    cell = max(1, size // 3)
    leaf = LeafRecord(path=("w",), keys="d", kind="jax", shape=(size,), dtype="uint8", cell=(cell,))
    box = BoxRecord(box=Box((0,), (size,)), offset=0, digests=())
    digests = tuple(digest_of(data[start:stop]) for _, start, stop in cell_ranges(box, leaf))
    whole = LeafRecord(
        path=leaf.path,
        keys=leaf.keys,
        kind=leaf.kind,
        shape=leaf.shape,
        dtype=leaf.dtype,
        cell=leaf.cell,
        boxes=(BoxRecord(box=box.box, offset=0, digests=digests),),
    )
    writer = Writer(process=0, count=1, host="h")
    return Manifest(save_id=save, writer=writer, slot=slot.name, arrays={"state": (whole,)}, inline={})


def commit(arena: Arena, slot: Slot, manifest: Manifest) -> None:
    arena.commit(slot, manifest.save_id, manifest.to_bytes())


def write(arena: Arena, step: int, size: int = 2 * PAGE) -> Slot:
    """A committed save, its lease given back."""
    slot = arena.acquire(size)
    assert slot is not None
    commit(arena, slot, fill(slot, save_of(step), size))
    arena.release(slot)
    return slot


def prove(directory: Path, manifest: Manifest) -> None:
    """Reads every byte that the manifest names; raises `CorruptCheckpointError` where one is not its own."""
    (leaf,) = manifest.arrays["state"]
    (record,) = leaf.boxes
    into = np.empty(record.box.shape, np.uint8)
    SlotReader(directory, manifest).read(leaf, record, record.box, into)
    expected = np.random.default_rng(
        [*(manifest.save_id.epoch, manifest.save_id.step, manifest.save_id.number), into.size]
    )
    np.testing.assert_array_equal(into, expected.integers(0, 256, into.size, np.uint8))


def proven(directory: Path) -> set[SaveId]:
    """The saves of a directory, every byte of each proven; a damaged manifest or a slot named twice is an error."""
    manifests, damaged = read_manifests([directory])
    assert damaged == []
    for _, manifest in manifests:
        prove(directory, manifest)
    slots = [manifest.slot for _, manifest in manifests]
    assert len(set(slots)) == len(slots), f"two manifests name one slot: {sorted(slots)}"
    return {manifest.save_id for _, manifest in manifests}


def die(arena: Arena) -> None:
    """What is left of a process after SIGKILL: its lock is gone, its files are not."""
    assert arena._lock_fd is not None
    os.close(arena._lock_fd)
    arena._lock_fd = None


@pytest.fixture
def host() -> Iterator[Path]:
    """A host directory on the ramdisk."""
    path = Path(f"/dev/shm/ckptkit-test-arena-{os.getpid()}-{next(_serial)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


# Any sequence of operations, against a model.


class ArenaAgainstModel(RuleBasedStateMachine):
    """An arena of three slots, with every operation that the manager uses, and deaths in between."""

    SLOTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.host = Path(f"/dev/shm/ckptkit-test-machine-{os.getpid()}-{next(_serial)}")
        self.arena = self.opened()
        self.step = 0
        self.protected: SaveId | None = None
        self.held: dict[str, SaveId] = {}  # slot -> the save that its manifest names
        self.leases: dict[str, int] = {}
        self.writing: dict[str, Slot] = {}  # handed out and not committed
        self.reading: list[Slot] = []
        self.bytes_of: dict[str, int] = {}  # the largest that each slot was asked to be

    def opened(self) -> Arena:
        return Arena.open(self.host, 0, slots=self.SLOTS, synced=False)

    def teardown(self) -> None:
        self.arena.close()
        shutil.rmtree(self.host, ignore_errors=True)

    def free(self) -> list[str]:
        """The slots that may be handed out now."""
        names = [f"slot-{n}.bin" for n in range(self.SLOTS)]
        return [
            name
            for name in names
            if not self.leases.get(name) and (name not in self.held or self.held[name] != self.protected)
        ]

    @rule(pages=st.integers(0, 4), odd=st.integers(1, PAGE))
    def acquire(self, pages: int, odd: int) -> None:
        size = pages * PAGE + odd
        free = self.free()
        slot = self.arena.acquire(size)
        assert (slot is None) == (not free)
        if slot is None:
            return
        assert slot.name in free, "a slot that is protected or leased was handed out"
        empty = [name for name in free if name not in self.held]
        oldest = empty or [min(free, key=lambda name: self.held[name])]
        assert slot.name in oldest
        assert slot.memory.nbytes >= size
        assert slot.memory.nbytes % PAGE == 0
        self.held.pop(slot.name, None)
        self.leases[slot.name] = 1
        self.writing[slot.name] = slot
        slot.memory[:] = 0xEE  # as soon as it is ours it is overwritten

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), size=st.integers(1, PAGE))
    def commit(self, data: st.DataObject, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(name)
        self.step += 1
        commit(self.arena, slot, fill(slot, save_of(self.step), size))
        self.held[name] = save_of(self.step)
        self.reading.append(slot)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A save that could not be written, or was vetoed before it was committed here."""
        name = data.draw(st.sampled_from(sorted(self.writing)))
        slot = self.writing.pop(name)
        self.arena.discard(slot)
        self.arena.release(slot)
        self.leases[name] -= 1

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), veto=st.booleans())
    def finish(self, data: st.DataObject, veto: bool) -> None:
        """The vote on a committed save: all have it, or it goes."""
        slot = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        if slot.name in self.held and not veto:
            self.protected = self.held[slot.name]
            self.arena.protect(self.protected)
        elif slot.name in self.held:
            self.arena.discard(slot)
            del self.held[slot.name]
        self.arena.release(slot)
        self.leases[slot.name] -= 1

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def flush_begins(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.reading))
        self.arena.lease(slot)
        self.leases[slot.name] += 1
        self.reading.append(slot)

    @rule(closes=st.booleans())
    def reopen(self, closes: bool) -> None:
        """The process ends or dies; what it had committed is what the next one finds."""
        if closes:
            self.arena.close()
        else:
            die(self.arena)
        self.arena = self.opened()
        self.writing.clear()
        self.reading.clear()
        self.leases.clear()
        self.protected = max(self.held.values(), default=None)

    @invariant()
    def every_manifest_names_its_own_bytes(self) -> None:
        """If it failed, a restart would find a save whose bytes are another's."""
        assert proven(self.host / "0") == set(self.held.values())
        assert sorted(self.arena.held()) == sorted(self.held.values())

    @invariant()
    def the_directory_holds_nothing_else(self) -> None:
        """If it failed, files would pile up in memory until the host has none."""
        manifests = len(self.held)
        names = os.listdir(self.host / "0")
        assert len([name for name in names if name.startswith("step-")]) == manifests
        assert len(names) <= manifests + self.SLOTS + 2  # the lock, and which save is the newest

    @invariant()
    def nothing_seems_to_be_lost(self) -> None:
        """If it failed, every restart would report damage that is none."""
        assert lost_newest(self.host / "0", self.held.values()) is None


TestArena = ArenaAgainstModel.TestCase
TestArena.settings = settings(
    deadline=None, max_examples=50, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)


# Crash points.


class Died(BaseException):
    """The process dies here."""


class Dying:
    """Every storage operation of the arena, of which the n-th kills the process before, in or after its effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool):
        self.at, self.after, self.count, self.dead = at, after, 0, False
        for name in ("open", "fsync", "link", "unlink", "replace", "posix_fallocate", "fdopen", "close"):
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name)))
        monkeypatch.setattr(np, "copyto", self.wrapped(np.copyto))
        monkeypatch.setattr(Path, "unlink", self.wrapped(Path.unlink))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise Died
            self.count += 1
            if self.count != self.at:
                return call(*args, **kwargs)
            self.dead = True
            if self.after:
                call(*args, **kwargs)
            raise Died

        return counted


@pytest.mark.parametrize("synced", [False, True], ids=["ram", "ssd"])
@pytest.mark.parametrize("grows", [False, True], ids=["same size", "grown"])
def test_a_save_that_dies_anywhere_leaves_the_newest_committed_whole(
    host: Path, tmp_path: Path, synced: bool, grows: bool
) -> None:
    """If it failed, a process that dies in mid-save would leave its host with no whole save at all."""
    outcomes: set[frozenset[int]] = set()
    size = 5 * PAGE if grows else 2 * PAGE
    # Enumerated, not sampled: one run per operation and side of it, until a run meets no death.
    for after in (False, True):
        for at in itertools.count(1):
            here = (tmp_path if synced else host) / f"{after}-{at}"
            arena = Arena.open(here, 0, slots=2, synced=synced)
            write(arena, 1)
            write(arena, 2)
            arena.protect(save_of(2))  # committed by all; 1 may go
            with pytest.MonkeyPatch.context() as monkeypatch:
                dying = Dying(monkeypatch, at, after=after)
                with suppress(Died):
                    slot = arena.acquire(size)
                    assert slot is not None
                    manifest = fill(slot, save_of(3), size)
                    half = size // 2  # the bytes go in two halves, so that one death falls between them
                    whole = slot.memory[:size].copy()
                    slot.memory[:size] = 0
                    np.copyto(slot.memory[:half], whole[:half])
                    np.copyto(slot.memory[half:size], whole[half:])
                    commit(arena, slot, manifest)
            die(arena)
            found = proven(here / "0")
            outcomes.add(frozenset(save.step for save in found))
            assert save_of(2) in found, (at, after)
            again = Arena.open(here, 0, slots=2, synced=synced)
            assert set(again.held()) == found
            write(again, 4, size)  # and the next run goes on
            assert save_of(4) in proven(here / "0")
            again.close()
            if not dying.dead:
                assert at > 5, "the operations that are counted are not those that are made"
                break
    assert outcomes == {frozenset({1, 2}), frozenset({2}), frozenset({2, 3})}


@pytest.mark.parametrize("operation", ["link", "unlink", "fsync of the directory"])
def test_a_commit_that_fails_after_its_name_is_there_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """If it failed, a manifest would stay behind and name a slot that the next save overwrites."""
    arena = Arena.open(tmp_path, 0, slots=2, synced=True)
    write(arena, 1)
    slot = arena.acquire(PAGE)
    assert slot is not None
    manifest = fill(slot, save_of(2), PAGE)
    real_link, real_unlink, real_fsync = os.link, os.unlink, os.fsync

    def link(source: Any, target: Any) -> None:
        real_link(source, target)
        if operation == "link":
            raise OSError(5, "Input/output error")

    def unlink(path: Any, **kwargs: Any) -> None:
        if operation == "unlink" and ".put-" in str(path):
            monkeypatch.setattr(os, "unlink", real_unlink)
            raise OSError(5, "Input/output error")
        real_unlink(path, **kwargs)

    def fsync(fd: int) -> None:
        if operation == "fsync of the directory" and os.path.isdir(f"/proc/self/fd/{fd}"):
            monkeypatch.setattr(os, "fsync", real_fsync)
            raise OSError(5, "Input/output error")
        real_fsync(fd)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "unlink", unlink)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="Input/output error"):
        commit(arena, slot, manifest)
    monkeypatch.undo()
    arena.discard(slot)  # as the manager does when a save has failed
    arena.release(slot)
    assert proven(tmp_path / "0") == {save_of(1)}
    write(arena, 3, PAGE)
    assert proven(tmp_path / "0") == {save_of(1), save_of(3)}
    arena.close()


def test_a_slot_that_cannot_grow_keeps_the_save_it_has(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a state that has grown too large would cost the saves that are there, one after the other."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1)
    write(arena, 2)
    arena.protect(save_of(2))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", full)
    for _ in range(3):
        with pytest.raises(StoreFullError):
            arena.acquire(100 * PAGE)
    monkeypatch.undo()
    assert save_of(2) in proven(host / "0")
    assert set(arena.held()) == proven(host / "0")
    assert write(arena, 3).memory.nbytes >= 2 * PAGE  # what fits goes on
    assert proven(host / "0") >= {save_of(2), save_of(3)}
    arena.close()


# Who else holds it.

CHILD = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from ckptkit.arena import Arena
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


def test_a_directory_that_a_living_process_holds_is_left_to_it(host: Path) -> None:
    """If it failed, a process of the last run that has not died yet would overwrite the new run's saves."""
    with another_process(host) as child:
        mine = Arena.open(host, 0, slots=2, synced=False)
        assert mine.directory == host / "0.1"
        write(mine, 1)
        assert [path.name for path in slot_directories(host)] == ["0", "0.1"]
        assert proven(host / "0") == set()
        child.send_signal(signal.SIGKILL)
        child.wait()
        after = Arena.open(host, 0, slots=2, synced=False)  # the kernel has given up the dead one's lock
        assert after.directory == host / "0"
        after.close()
        mine.close()


def test_a_closed_arena_gives_up_its_lock_and_keeps_its_saves(host: Path) -> None:
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


def test_the_newest_save_found_is_protected_until_the_run_says_otherwise(host: Path) -> None:
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


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    """If it failed, a mistyped tier path would end in a traceback after the first step."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnusableError, match=r"tier directory .*/file/host/0 cannot be used: Not a directory; give"):
        Arena.open(tmp_path / "file" / "host", 0, slots=2, synced=False)


def test_a_hundred_held_directories_are_an_error(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a host full of zombies would be searched for ever."""

    def held(fd: int, operation: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", held)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnusableError, match=rf"^every slot directory below {host} is held by another process$"):
        Arena.open(host, 0, slots=2, synced=False)
    assert len(os.listdir("/proc/self/fd")) == before


# Room.


def test_a_tmpfs_that_is_too_small_says_what_is_needed_and_free(tmp_path: Path, mounts: Mounts) -> None:
    """If it failed, a full ramdisk would kill the trainer with SIGBUS instead of degrading the tier."""
    mount = mounts.small(tmp_path / "small", "2m")
    arena = Arena.open(mount / "host", 0, slots=3, synced=False)
    write(arena, 1, 256 * PAGE)  # 1 MiB of 2
    arena.protect(save_of(1))
    with pytest.raises(StoreFullError) as caught:
        arena.acquire(300 * PAGE)
    free = os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize
    assert str(caught.value) == (
        f"slot {mount}/host/0/slot-1.bin needs {300 * PAGE} bytes, {free} are free in {mount}/host/0; "
        "the whole mount has 2097152 bytes, as a container's own /dev/shm does: run Docker with --shm-size, or "
        "mount a Kubernetes emptyDir with medium: Memory and give its path to Tier.ram, give fewer slots, or leave "
        "this tier out"
    )
    assert isinstance(caught.value, OSError)
    assert proven(mount / "host" / "0") == {save_of(1)}
    write(arena, 2, 100 * PAGE)  # what fits still goes in
    assert proven(mount / "host" / "0") == {save_of(1), save_of(2)}
    with pytest.raises(StoreFullError):
        arena.reserve(300 * PAGE)
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


def test_reserve_makes_every_free_slot_and_touches_no_save(host: Path) -> None:
    """If it failed, making room early would destroy what is there."""
    arena = Arena.open(host, 0, slots=3, synced=False)
    write(arena, 1)
    arena.reserve(9 * PAGE)
    assert proven(host / "0") == {save_of(1)}
    sizes = sorted((host / "0" / f"slot-{n}.bin").stat().st_size // PAGE for n in range(3))
    assert sizes == [2, 9, 9]
    arena.close()


def test_fewer_slots_than_before_give_the_memory_back(host: Path) -> None:
    """If it failed, a job restarted with fewer slots would keep the old ones in memory for ever."""
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


def test_junk_of_a_put_that_died_is_swept_away(host: Path) -> None:
    """If it failed, every process that dies in a commit would leave a manifest's worth of memory behind."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    (host / "0" / ".put-abc123").write_bytes(b"half a manifest")
    arena.close()
    again = Arena.open(host, 0, slots=2, synced=False)
    assert sorted(os.listdir(host / "0")) == ["lock"]
    again.close()


def test_an_anonymous_arena_touches_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_damaged_manifest_is_left_out_and_reported(host: Path) -> None:
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


def test_a_manifest_under_another_name_or_of_another_file_is_refused(host: Path, tmp_path: Path) -> None:
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


def test_a_reader_of_a_slot_that_was_reused_says_superseded(host: Path) -> None:
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


def test_a_slot_that_was_cut_short_is_refused(host: Path) -> None:
    """If it failed, reading beyond the end of a slot would kill the process with SIGBUS."""
    arena = Arena.open(host, 0, slots=2, synced=False)
    write(arena, 1, 4 * PAGE)
    (directory, manifest), *_ = read_manifests([host / "0"])[0]
    arena.close()
    os.truncate(directory / manifest.slot, PAGE)
    with pytest.raises(CorruptCheckpointError, match=rf"slot-0\.bin has {PAGE} bytes, leaf w ends at \d+"):
        prove(directory, manifest)


def test_every_flipped_bit_of_a_slot_is_seen(host: Path) -> None:
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
