"""Slots on a disk, read past the page cache."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.slots.reader import SlotReader
from ckptkit.util.disk_file import FileReads
from ckptkit.util.pages import PAGE_BYTES, empty_block, is_cached

pytestmark = pytest.mark.disk

BYTES = (3 << 20) + 1234
UINT8 = np.dtype(np.uint8)


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, BYTES, np.uint8)


@pytest.fixture(params=[0, 1000], ids=["whole pages", "a part of one at the end"])
def path(request: pytest.FixtureRequest, tmp_path: Path, data: np.ndarray) -> Path:
    """The data in a file, out of the page cache."""
    path = tmp_path / "slot-0.bin"
    path.write_bytes(data.tobytes() + bytes(-data.nbytes % PAGE_BYTES + request.param))
    forget(path)
    reads = FileReads(path)
    if reads._direct_fd < 0 or is_cached(reads._mapped):
        pytest.skip("the file system of temporary files has no direct I/O")
    return path


def forget(path: Path) -> None:
    """Out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("start", [0, 1, PAGE_BYTES, 3 * PAGE_BYTES - 7])
@pytest.mark.parametrize("size", [1, PAGE_BYTES + 5, (2 << 20) + 99])
@pytest.mark.parametrize("shift", [0, 64])
def test_any_byte_range_is_read(path: Path, data: np.ndarray, start: int, size: int, shift: int) -> None:
    block = empty_block((BYTES,), UINT8)
    block[:] = 7
    first, last = start % PAGE_BYTES + shift, start % PAGE_BYTES + shift + size
    FileReads(path).fill(block[first:last], start)
    assert np.array_equal(block[first:last], data[start : start + last - first])
    assert (block[:first] == 7).all()
    assert (block[last:] == 7).all()


@pytest.mark.parametrize("size", [1, PAGE_BYTES, 2 << 20])
@pytest.mark.parametrize("shift", [0, 64])
def test_file_is_read_exactly_to_its_last_byte(path: Path, size: int, shift: int) -> None:
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    forget(path)
    block = empty_block((4 << 20,), UINT8)[shift:]
    start = whole.nbytes - size
    FileReads(path).fill(block[:size], start)
    assert np.array_equal(block[:size], whole[start:])
    with pytest.raises(EOFError):
        FileReads(path).fill(block[: size + 1], start)


@pytest.mark.parametrize("name", ["absent", "pipe", "link", "."])
def test_path_that_is_not_a_file_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(OSError, match=str(tmp_path)):
        FileReads(tmp_path / name)


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


def test_slot_read_leaves_no_pages_in_the_cache(path: Path, data: np.ndarray) -> None:
    """The cache would take memory, and processor time, for what is read once."""
    reader, leaf, record = slot(path, data)
    into = empty_block((BYTES,), UINT8)
    reader.read(leaf, record, record.box, into)
    assert np.array_equal(into, data)
    assert not is_cached(FileReads(path)._mapped[1 << 20 :])


def test_damage_on_the_disk_is_detected(path: Path, data: np.ndarray) -> None:
    with path.open("r+b") as file:
        file.seek(2 << 20)
        file.write(bytes([data[2 << 20] ^ 1]))
    reader, leaf, record = slot(path, data)
    with pytest.raises(CorruptCheckpointError, match="has digest"):
        reader.read(leaf, record, record.box, empty_block((BYTES,), UINT8))


@pytest.mark.parametrize("fault", ["unreadable", "ends"])
def test_failing_disk_is_a_damaged_slot_not_a_crash(
    path: Path, data: np.ndarray, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Through a mapping it is SIGBUS; as an error, the next tier is asked."""
    reader, leaf, record = slot(path, data)
    if fault == "ends":
        os.truncate(path, PAGE_BYTES)
    else:

        def preadv(fd: int, buffers: Any, start: int, flags: int = 0) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        reader.read(leaf, record, record.box, empty_block((BYTES,), UINT8))


def test_refused_direct_reads_fall_back_to_buffered_reads(
    path: Path, data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, leaf, record = slot(path, data)
    assert reader._reads is not None
    direct, real = reader._reads._direct_fd, os.preadv

    def preadv(fd: int, buffers: Any, start: int, flags: int = 0) -> int:
        if fd == direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, start, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    into = empty_block((BYTES,), UINT8)
    reader.read(leaf, record, record.box, into)
    assert np.array_equal(into, data)
