"""Files of slots on a disk, and copies to them that begin while their source is still being filled."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit.errors import StoreFullError
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import Manifest, SaveId, Writer
from ckptkit.save import disk_copy
from ckptkit.save.disk_copy import DiskCopy
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot
from ckptkit.snapshot.describe import SlotExtent
from ckptkit.util import disk_file
from ckptkit.util.disk_file import DiskFile

pytestmark = pytest.mark.disk

PAGE = 4096
_serial = itertools.count()


def aligned(size: int, seed: int = 0) -> np.ndarray:
    memory = np.empty(size + PAGE, np.uint8)
    memory = memory[-memory.ctypes.data % PAGE :][:size]
    memory[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return memory


@pytest.mark.parametrize("method", ["direct", "mapping"])
def test_synced_writes_are_in_the_file(tmp_path: Path, method: Any) -> None:
    path = tmp_path / "slot"
    file = DiskFile(path, 5 * PAGE)
    assert file.is_new
    file.fill()
    assert path.read_bytes() == bytes(5 * PAGE)
    data = aligned(2 * PAGE)
    file.write(data, PAGE, method)
    file.sync()
    expected = bytes(PAGE) + data.tobytes() + bytes(2 * PAGE)
    assert path.read_bytes() == expected
    assert file.memory.tobytes() == expected  # the mapping shows what direct I/O wrote
    file.close()
    again = DiskFile(path, PAGE)
    assert (again.size_bytes, again.is_new) == (5 * PAGE, False)
    assert path.read_bytes() == expected
    again.close()


def test_direct_io_falls_back_to_the_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems open a file for direct I/O and then refuse each write."""
    file = DiskFile(tmp_path / "slot", 4 * PAGE)
    if file.methods == ("mapping",):
        pytest.skip("this file system has no direct I/O")
    refusals = []

    def refuse(*_: object) -> int:
        refusals.append(1)
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(disk_file.os, "pwrite", refuse)
    data = aligned(4 * PAGE)
    file.write(data, 0, "direct")
    file.write(data, 0, "direct")
    file.sync()
    assert (tmp_path / "slot").read_bytes() == data.tobytes()
    assert (len(refusals), file.methods, file.faster_method()) == (1, ("mapping",), "mapping")
    file.close()


def test_disk_error_is_not_hidden_by_the_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path / "slot", PAGE)
    if file.methods == ("mapping",):
        pytest.skip("this file system has no direct I/O")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk_file.os, "pwrite", fail)
    with pytest.raises(OSError, match="broken"):
        file.write(aligned(PAGE), 0, "direct")
    file.close()


def test_probe_chooses_the_faster_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path / "slot", PAGE)
    if file.methods == ("mapping",):
        pytest.skip("this file system has no direct I/O")
    for slow in ("direct", "mapping"):
        now_s = itertools.accumulate(
            [0.0] + [d for method in file.methods * 2 for d in (2.0 if method == slow else 1.0, 5.0)]
        )
        monkeypatch.setattr(disk_file.clock, "monotonic_s", now_s.__next__)
        assert file.faster_method() != slow
    file.close()


def test_preparing_slots_does_not_overwrite_saves(tmp_path: Path) -> None:
    """If a probe ever wrote over a slot that holds a save, a restart would lose it."""
    arena = Arena.open(tmp_path, 0, slots=2, synced=True)
    slot = arena.acquire(3 * PAGE)
    assert slot is not None
    data = aligned(3 * PAGE, seed=4)
    arena.write(slot, data, 0)
    save = SaveId(1, 1, 0)
    manifest = Manifest(save_id=save, writer=Writer(process=0, count=1, host="h"), slot=slot.name, arrays={}, inline={})
    arena.commit(slot, save, manifest.to_bytes())
    arena.release(slot)
    arena.close()
    again = Arena.open(tmp_path, 0, slots=2, synced=True)
    again.reserve(3 * PAGE)
    assert (tmp_path / "0" / slot.name).read_bytes() == data.tobytes()
    assert [manifest.save_id for manifest in again.manifests()] == [save]
    assert again.method in ("direct", "mapping")
    again.close()


class Source:
    """A staging slot with boxes of the given sizes, and their extents."""

    def __init__(self, sizes: list[int], seed: int = 0):
        self.extents: list[SlotExtent] = []
        at = 0
        for number, size in enumerate(sizes):
            cells = tuple((at + start, at + min(size, start + 700)) for start in range(0, size, 700))
            self.extents.append(SlotExtent(number, at, at + size, cells, False))
            at += -(-size // PAGE) * PAGE
        self.size = at
        self.final = aligned(max(at, PAGE), seed)
        self.slot = Slot("slot-0.bin", np.zeros_like(aligned(max(at, PAGE))))

    def fill(self, copy: DiskCopy, start: int, stop: int) -> None:
        self.slot.memory[start:stop] = self.final[start:stop]
        copy.filled(start, stop, digest_of(self.final[start:stop]))


def committed(arena: Arena, copied: Slot, save: SaveId = SaveId(1, 1, 0)) -> bytes:  # noqa: B008  frozen
    writer = Writer(process=0, count=1, host="h")
    manifest = Manifest(save_id=save, writer=writer, slot=copied.name, arrays={}, inline={})
    arena.commit(copied, save, manifest.to_bytes())
    assert [(m.save_id, m.slot) for m in arena.manifests()] == [(save, copied.name)]
    assert arena.directory is not None
    return (arena.directory / copied.name).read_bytes()


@given(sizes=st.lists(st.integers(0, 5 * PAGE), max_size=6), order=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_copy_is_complete_in_any_fill_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], order: Any
) -> None:
    """If a piece were written before its last box was there, the disk tier would hold parts of two saves."""
    monkeypatch.setattr(disk_copy, "PIECE_BYTES", 2 * PAGE)
    arena = Arena.open(tmp_path / str(next(_serial)), 0, slots=2, synced=True)
    source = Source(sizes)
    copy = DiskCopy(source.slot, source.extents, source.size, arena)
    cells = [cell for extent in source.extents for cell in extent.cells]
    order.shuffle(cells)
    done: list[Slot | None] = []
    thread = threading.Thread(target=lambda: done.append(copy.run()))
    thread.start()
    for start, stop in cells:
        assert not done
        source.fill(copy, start, stop)
    thread.join(30)
    (copied,) = done
    assert copied is not None
    assert (arena.held(), copied.leases) == ([], 1)
    on_disk = committed(arena, copied)
    for extent in source.extents:
        assert on_disk[extent.offset : extent.stop] == source.final[extent.offset : extent.stop].tobytes()
    arena.close()


def copied_again(arena: Arena, source: Source, save: SaveId) -> tuple[bytes, int]:
    """The content of the slot after a copy of all of `source`, and how many bytes of it were not written."""
    copy = DiskCopy(source.slot, source.extents, source.size, arena)
    for extent in source.extents:
        for start, stop in extent.cells:
            source.fill(copy, start, stop)
    copied = copy.run()
    assert copied is not None
    found = committed(arena, copied, save)
    arena.release(copied)
    return found, copy.kept_bytes


@given(
    sizes=st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=6),
    changes=st.lists(st.sets(st.integers(0, 5)), min_size=2, max_size=6),
)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slot_holds_the_save_whatever_did_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], changes: list[set[int]]
) -> None:
    """A cell that changed, or that lies on a page with one, would keep its old bytes."""
    monkeypatch.setattr(disk_copy, "PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(disk_copy, "KEPT_BYTES_MIN", PAGE)
    arena = Arena.open(tmp_path / str(next(_serial)), 0, slots=1, synced=True)
    source = Source(sizes)
    for step, changed in enumerate(changes):
        for extent in source.extents:
            if extent.number in changed:
                source.final[extent.offset : extent.stop : 900] ^= 1 + step
        on_disk, kept_bytes = copied_again(arena, source, SaveId(1, step, 0))
        for extent in source.extents:
            assert on_disk[extent.offset : extent.stop] == source.final[extent.offset : extent.stop].tobytes()
        assert step == 0 or changed or kept_bytes == source.size
    arena.close()


@pytest.mark.parametrize("fails", ["write", "sync", "abandoned"])
def test_nothing_is_kept_of_a_slot_whose_last_write_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Half of an older save would be committed under the name of a new one."""
    arena = Arena.open(tmp_path, 0, slots=1, synced=True)
    source = Source([300 * PAGE])
    copied_again(arena, source, SaveId(1, 1, 0))
    source.final[:PAGE] ^= 1
    copy = DiskCopy(source.slot, source.extents, source.size, arena)
    with monkeypatch.context() as broken, suppress(OSError):
        if fails == "abandoned":
            copy.abandon()
        else:
            broken.setattr(DiskFile, fails, _broken)
        for start, stop in source.extents[0].cells:
            source.fill(copy, start, stop)
        if (copied := copy.run()) is not None:
            try:
                committed(arena, copied, SaveId(1, 2, 0))
            finally:
                arena.release(copied)
    on_disk, kept_bytes = copied_again(arena, source, SaveId(1, 3, 0))
    assert kept_bytes == 0
    assert on_disk[: source.size] == source.final[: source.size].tobytes()
    assert copied_again(arena, source, SaveId(1, 4, 0))[1] == source.size
    arena.close()


def _broken(*_: object) -> None:
    raise OSError(errno.EIO, "broken")


def test_cells_are_written_again_after_many_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the disk that has lost its bytes would be damage of every save of a long run."""
    monkeypatch.setattr(disk_copy, "KEPT_SAVES_MAX", 3)
    arena = Arena.open(tmp_path, 0, slots=1, synced=True)
    source = Source([300 * PAGE])
    kept = [copied_again(arena, source, SaveId(1, step, 0))[1] > 0 for step in range(9)]
    assert kept == [False, True, True, True, False, True, True, True, False]
    arena.close()


def test_abandoned_copy_ends_and_releases_its_slot(tmp_path: Path) -> None:
    """If it did not end, a save that was dropped by vote would hang the disk tier and `close`."""
    arena = Arena.open(tmp_path, 0, slots=2, synced=True)
    source = Source([3 * PAGE])
    copy = DiskCopy(source.slot, source.extents, source.size, arena)
    done: list[Slot | None] = []
    thread = threading.Thread(target=lambda: done.append(copy.run()))
    thread.start()
    source.fill(copy, 0, 700)
    copy.abandon()
    thread.join(30)
    assert done == [None]
    free = [arena.acquire(1), arena.acquire(1)]
    assert None not in free
    arena.close()


def test_failed_copy_ends_both_writers_and_releases_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_copy, "PIECE_BYTES", PAGE)
    arena = Arena.open(tmp_path, 0, slots=2, synced=True)
    source = Source([4 * PAGE])
    copy = DiskCopy(source.slot, source.extents, source.size, arena)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Arena, "write", fail)
    source.fill(copy, 0, 700)
    for start, stop in source.extents[0].cells[1:6]:
        source.fill(copy, start, stop)
    with pytest.raises(OSError, match="broken"):
        copy.run()
    assert None not in [arena.acquire(1), arena.acquire(1)]
    arena.close()


def test_full_arena_error_names_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_copy, "SLOT_WAIT_S", 0.1)
    arena = Arena.open(tmp_path, 0, slots=2, synced=True)
    taken = [arena.acquire(1), arena.acquire(1)]
    assert None not in taken
    source = Source([PAGE])
    with pytest.raises(StoreFullError, match=rf"^no free slot in {os.fspath(tmp_path)}/0 within 0.1 s$"):
        DiskCopy(source.slot, (), source.size, arena).run()
    arena.close()


def test_slot_under_construction_is_waited_for(tmp_path: Path) -> None:
    """The first steps of a run would be missing on the disk, and the tier called degraded."""
    arena = Arena.open(tmp_path, 0, slots=2, synced=True)
    taken = [arena.acquire(1), arena.acquire(1)]
    assert taken[0] is not None
    threading.Timer(0.2, arena.release, [taken[0]]).start()
    source = Source([PAGE])
    assert DiskCopy(source.slot, (), source.size, arena).run() is taken[0]
    arena.close()


def test_restart_from_the_disk_gives_frozen_and_changed_leaves(tmp_path: Path) -> None:
    """A LoRA run that comes back from the SSD would train on another base than it had, or write its base every time."""
    kept = dict[int | None, int]()
    log = ckptkit.EventLog()
    log.observe(
        lambda event: kept.update({event.step: event.fields.get("kept_bytes", 0)}) if event.tier == "ssd" else None
    )
    options = ocp.CheckpointManagerOptions(save_interval_steps=1000)
    base = np.random.default_rng(1).standard_normal((256, 1024)).astype(np.float32)

    def state(step: int) -> dict[str, Any]:
        return {"base": jnp.asarray(base), "adapter": jnp.full((40, 30), float(step))}

    def tiers(*, ram: bool) -> list[ckptkit.Tier]:
        ssd = ckptkit.Tier.ssd(str(tmp_path / "ssd"), save=ckptkit.EverySteps(1), slots=2)
        return [ckptkit.Tier.ram(str(tmp_path / "ram"), slots=2)] * ram + [ssd]

    with ckptkit.CheckpointManager(
        tmp_path / "root", options=options, tiers=tiers(ram=True), host_id="h", events=log
    ) as manager:
        for step in range(1, 7):
            manager.save(step, args=ocp.args.StandardSave(state(step)))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
    assert kept == {1: 0, 2: 0, 3: base.nbytes, 4: base.nbytes, 5: base.nbytes, 6: base.nbytes}
    assert {(each.step, each.state) for each in ckptkit.verify(str(tmp_path / "ssd")).steps} == {
        (5, "proven"),
        (6, "proven"),
    }
    with ckptkit.CheckpointManager(tmp_path / "root", options=options, tiers=tiers(ram=False), host_id="h") as manager:
        assert manager.latest_step() == 6
        found = manager.restore(6, args=ocp.args.StandardRestore(state(0)))  # pyright: ignore[reportCallIssue]
    assert np.asarray(found["base"]).tobytes() == base.tobytes()
    assert np.asarray(found["adapter"]).tobytes() == np.asarray(state(6)["adapter"]).tobytes()
