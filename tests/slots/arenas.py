"""Slots to test with: each save has a pattern of its own, and every byte of it can be proven."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np

from ckptkit.model.boxes import Box
from ckptkit.model.cells import cell_ranges
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot
from ckptkit.slots.reader import SlotReader, read_manifests

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
    """The leftovers of a process after SIGKILL: its lock is released, its files remain."""
    assert arena._lock_fd is not None
    os.close(arena._lock_fd)
    arena._lock_fd = None


def new_host() -> Path:
    """The path of a host directory on the ramdisk, of nobody else's; whoever makes it removes it."""
    return Path(f"/dev/shm/ckptkit-test-arena-{os.getpid()}-{next(_serial)}")
