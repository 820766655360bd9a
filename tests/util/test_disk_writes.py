"""Files that are being made, written past the page cache."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptkit.util import disk_file
from ckptkit.util.disk_file import PIECE_BYTES, FileWrites
from ckptkit.util.pages import PAGE_BYTES, empty_block, is_cached

pytestmark = pytest.mark.disk

SIZE = PIECE_BYTES + (3 << 20) + 123
UINT8 = np.dtype(np.uint8)


@pytest.fixture
def data() -> np.ndarray:
    block = empty_block((SIZE,), UINT8)
    block[:] = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    return block


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "made", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("start", [0, 1, PAGE_BYTES, 3 * PAGE_BYTES - 7])
@pytest.mark.parametrize(("first", "last"), [(0, SIZE), (8, SIZE - 5), (PAGE_BYTES - 7, 2 << 20), (1, 1), (3, 4096)])
def test_any_byte_range_is_written(
    tmp_path: Path, fd: int, data: np.ndarray, direct: bool, start: int, first: int, last: int
) -> None:
    """Bytes would be shifted, lost at the ends of pages, or written over their neighbours."""
    os.pwrite(fd, b"\x07" * (SIZE + 4 * PAGE_BYTES), 0)
    writes = FileWrites(fd, str(tmp_path / "made") if direct else None)
    writes.write(data[first:last], start)
    writes.close()
    stop = start + last - first
    expected = b"\x07" * start + data[first:last].tobytes() + b"\x07" * (SIZE + 4 * PAGE_BYTES - stop)
    assert (tmp_path / "made").read_bytes() == expected


def test_whole_pages_bypass_the_page_cache(tmp_path: Path, fd: int, data: np.ndarray) -> None:
    """A conversion would push everything else out of memory, and its closing sync wait for all of it."""
    os.ftruncate(fd, SIZE)
    writes = FileWrites(fd, str(tmp_path / "made"))
    if writes._direct_fd < 0:
        pytest.skip("the file system of temporary files has no direct I/O")
    writes.write(data, 0)
    writes.close()
    assert not is_cached(np.memmap(tmp_path / "made", np.uint8, "r")[1 << 20 :])


def test_refused_direct_writes_fall_back_to_the_page_cache(
    tmp_path: Path, fd: int, data: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems open a file for direct I/O and then refuse each write."""
    writes = FileWrites(fd, str(tmp_path / "made"))
    refused, plain = writes._direct_fd, os.pwrite

    def refuse(to: int, *args: object) -> int:
        if to == refused:
            raise OSError(errno.EINVAL, "no")
        return plain(to, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(disk_file.os, "pwrite", refuse)
    writes.write(data, 0)
    writes.close()
    assert (tmp_path / "made").read_bytes() == data.tobytes()


def test_disk_error_is_raised(tmp_path: Path, fd: int, data: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk would be taken for one without direct I/O."""
    writes = FileWrites(fd, str(tmp_path / "made"))

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(disk_file.os, "pwrite", fail)
    with pytest.raises(OSError, match="full"):
        writes.write(data, 0)
    writes.close()
