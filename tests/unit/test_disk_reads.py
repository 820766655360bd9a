"""Slots on a disk, read past the page cache."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.disk_file import DirectReads
from ckptkit.errors import CorruptCheckpointError
from ckptkit.layout import PAGE_BYTES
from ckptkit.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer, digest_of
from ckptkit.pages import empty_block, is_cached
from ckptkit.sharding import Box
from ckptkit.slot_reader import SlotReader

BYTES = (3 << 20) + 1234
UINT8 = np.dtype(np.uint8)


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, BYTES, np.uint8)


@pytest.fixture
def path(tmp_path: Path, data: np.ndarray) -> Path:
    """The data as a slot of whole pages, out of the page cache."""
    path = tmp_path / "slot-0.bin"
    path.write_bytes(data.tobytes() + bytes(-data.nbytes % PAGE_BYTES))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if not DirectReads(path).fill(empty_block((BYTES,), UINT8), 0):
        pytest.skip("the file system of temporary files has no direct I/O")
    return path


@pytest.mark.parametrize("start", [0, 1, PAGE_BYTES, 3 * PAGE_BYTES - 7])
@pytest.mark.parametrize("size", [1, PAGE_BYTES + 5, (2 << 20) + 99])
@pytest.mark.parametrize("shift", [0, 64])
def test_any_bytes_are_filled_wherever_they_begin(
    path: Path, data: np.ndarray, start: int, size: int, shift: int
) -> None:
    block = empty_block((BYTES,), UINT8)
    block[:] = 7
    first, last = start % PAGE_BYTES + shift, start % PAGE_BYTES + shift + size
    assert DirectReads(path).fill(block[first:last], start)
    assert np.array_equal(block[first:last], data[start : start + last - first])
    assert (block[:first] == 7).all()
    assert (block[last:] == 7).all()


def test_a_file_that_cannot_be_read_so_is_left_to_others(path: Path) -> None:
    assert not DirectReads(path.with_name("absent")).fill(empty_block((BYTES,), UINT8), 0)


def slot(path: Path, data: np.ndarray) -> tuple[SlotReader, LeafRecord, BoxRecord]:
    """A reader of one leaf, which begins where the slot does."""
    record = BoxRecord(box=Box.whole(data.shape), offset=0, digests=(digest_of(data),))
    leaf = LeafRecord(
        path=("w",),
        keys="d",
        kind="numpy",
        shape=data.shape,
        dtype="uint8",
        cell=data.shape,
        extra={},
        boxes=(record,),
    )
    manifest = Manifest(
        save_id=SaveId(1, 1, 1),
        writer=Writer(process=0, count=1, host="h"),
        slot=path.name,
        arrays={"state": (leaf,)},
        inline={},
    )
    return SlotReader(path.parent, manifest, on_disk=True), leaf, record


def test_a_slot_comes_from_the_disk_and_leaves_no_pages_behind(path: Path, data: np.ndarray) -> None:
    """The cache would take memory, and processor time, for what is read once."""
    reader, leaf, record = slot(path, data)
    into = empty_block((BYTES,), UINT8)
    reader.read(leaf, record, record.box, into)
    assert np.array_equal(into, data)
    assert not is_cached(np.memmap(path, np.uint8, mode="r")[1 << 20 :])


def test_damage_on_the_disk_is_seen(path: Path, data: np.ndarray) -> None:
    with path.open("r+b") as file:
        file.seek(2 << 20)
        file.write(bytes([data[2 << 20] ^ 1]))
    reader, leaf, record = slot(path, data)
    with pytest.raises(CorruptCheckpointError, match="has digest"):
        reader.read(leaf, record, record.box, empty_block((BYTES,), UINT8))


@pytest.mark.parametrize("fault", ["unreadable", "ends"])
def test_a_disk_that_fails_is_a_damaged_slot_and_not_a_dead_process(
    path: Path, data: np.ndarray, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Through a mapping it is SIGBUS; as an error, the next tier is asked."""
    reader, leaf, record = slot(path, data)
    if fault == "ends":
        os.truncate(path, PAGE_BYTES)
    else:

        def preadv(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        reader.read(leaf, record, record.box, empty_block((BYTES,), UINT8))


def test_what_direct_reads_refuse_comes_through_the_mapping(
    path: Path, data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(*_: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    reader, leaf, record = slot(path, data)
    monkeypatch.setattr(os, "preadv", preadv)
    into = empty_block((BYTES,), UINT8)
    reader.read(leaf, record, record.box, into)
    assert np.array_equal(into, data)
