"""Reads of byte ranges of one file, local or remote: nothing is read that was not asked for."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, final

import numpy as np

from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.inspection.places import nothing_at, require_regular
from ckptkit.model.boxes import Box
from ckptkit.store.backends import properties_of
from ckptkit.store.remote import RemoteStore
from ckptkit.store.roots import root_url

_REACH_TIMES = 4  # times the bytes wanted that are read at once rather than one run after the other
METADATA_BYTES_MAX = 32 << 20  # of a header, index, pickle or zip directory; parsed, it takes up to 20 times as much


class BytesInto(Protocol):
    """Bytes that are read by range."""

    def read_into(self, start: int, into: np.ndarray) -> None:
        """Fills flat uint8 memory from `start`."""
        ...


class Ranges(BytesInto, Protocol):
    """A file of a known size whose bytes are read by range."""

    path: str
    size: int

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start`; raises `CorruptCheckpointError` where the file ends before."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


def open_ranges(path: str) -> Ranges:
    """The file at a local path or URL.

    Raises `StepNotFoundError`, `StoreError`, and `CorruptCheckpointError` for a path that is not a regular file.
    """
    return _LocalRanges(root_url(path)) if properties_of(path).file_system else _RemoteRanges(path.rstrip("/"))


@contextmanager
def ranges_to_keep(path: str) -> Iterator[Ranges]:
    """The ranges of `open_ranges`, closed if the block raises."""
    ranges = open_ranges(path)
    try:
        yield ranges
    except BaseException:
        ranges.close()
        raise


@final
class _LocalRanges:
    def __init__(self, path: str):
        self.path = path
        require_regular(path)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise nothing_at(path, "there is no such file; check the path") from None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}; look at its permissions", path=path) from error
        self.size = os.fstat(self._fd).st_size

    def read(self, start: int, count: int) -> bytes:
        _check_range(self, start, count)
        found = bytearray(count)
        self.read_into(start, np.frombuffer(found, np.uint8))
        return bytes(found)

    def read_into(self, start: int, into: np.ndarray) -> None:
        _check_range(self, start, into.nbytes)
        view, at = memoryview(into), 0  # pyright: ignore[reportArgumentType]
        while at < into.nbytes:
            try:
                count = os.preadv(self._fd, [view[at : at + (1 << 30)]], start + at)
            except OSError as error:
                raise StoreError(f"{self.path}: {error.strerror} at byte {start + at}", path=self.path) from error
            if count == 0:
                raise CorruptCheckpointError(f"{self.path} became shorter while it was read", path=self.path)
            at += count

    def close(self) -> None:
        os.close(self._fd)


@final
class _RemoteRanges:
    def __init__(self, url: str):
        self.path = url
        directory, _, self._name = url.rpartition("/")
        self._store = RemoteStore(directory)
        found = self._store.stat(self._name)
        if found is None:
            raise nothing_at(url, "there is no such object; check bucket and name")
        self.size = found.size_bytes

    def read(self, start: int, count: int) -> bytes:
        _check_range(self, start, count)
        found = self._store.get_range(self._name, start, start + count) if count else b""
        if len(found) != count:
            raise CorruptCheckpointError(f"{self.path} became shorter while it was read", path=self.path)
        return found

    def read_into(self, start: int, into: np.ndarray) -> None:
        into[:] = np.frombuffer(self.read(start, into.nbytes), np.uint8)

    def close(self) -> None:
        pass


def _check_range(ranges: Ranges, start: int, count: int) -> None:
    if start < 0 or count < 0 or start + count > ranges.size:
        raise CorruptCheckpointError(
            f"{ranges.path} ends at byte {ranges.size}, and bytes {start} to {start + count} are named in it; it is "
            "truncated or damaged",
            path=ranges.path,
        )


@final
class RangeFile(io.RawIOBase):
    """The same as a file object, for libraries that want one. No read is larger than metadata can be."""

    def __init__(self, ranges: Ranges):
        self._ranges = ranges
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`."""
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._ranges.size}[whence]
        if at < 0:
            raise OSError(f"{self._ranges.path}: a seek before its begin")
        self._at = at
        return at

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes."""
        left = max(0, self._ranges.size - self._at)
        count = left if size < 0 else min(size, left)
        if count > METADATA_BYTES_MAX:
            raise CorruptCheckpointError(
                f"{self._ranges.path} announces {count} bytes of metadata, and at most {METADATA_BYTES_MAX} are read",
                path=self._ranges.path,
            )
        found = self._ranges.read(self._at, count)
        self._at += count
        return found


def fetch_strided(
    ranges: BytesInto, start: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], box: Box
) -> np.ndarray:
    """A box of an array that starts at byte `start` of a file, with `strides` in elements.

    Cost: one read if the box, with the bytes between its elements, is at most four times as large as the box alone.
    Else one read for each run of elements that follow each other.
    """
    into = np.empty(box.shape, dtype)
    if box.size == 0:
        return into
    start_at = start + dtype.itemsize * sum(a * s for a, s in zip(box.start, strides, strict=True))
    reach = 1 + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))
    if reach == box.size and _is_c_order(box.shape, strides):
        ranges.read_into(start_at, into.reshape(-1).view(np.uint8))
        return into
    if reach <= _REACH_TIMES * box.size:
        raw = np.empty(reach * dtype.itemsize, np.uint8)
        ranges.read_into(start_at, raw)
        # A plain view, because NumPy's own stride tricks do not know the small dtypes.
        return np.ndarray(box.shape, dtype, raw, strides=[s * dtype.itemsize for s in strides]).copy()
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    view = into.transpose(order)
    inner, run = len(order), 1  # the axes from `inner` on are one run of `run` elements
    while inner > 0 and (box.shape[order[inner - 1]] == 1 or strides[order[inner - 1]] == run):
        run *= box.shape[order[inner - 1]]
        inner -= 1
    outer = [box.shape[axis] for axis in order[:inner]]
    for index in np.ndindex(*outer):
        at = start_at + dtype.itemsize * sum(i * strides[axis] for i, axis in zip(index, order, strict=False))
        raw = np.empty(run * dtype.itemsize, np.uint8)
        ranges.read_into(at, raw)
        view[index] = raw.view(dtype).reshape(view[index].shape)
    return into


@lru_cache(maxsize=4096)
def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of an array in C order."""
    strides, size = [], 1
    for rows in reversed(shape):
        strides.append(size)
        size *= max(1, rows)
    return tuple(reversed(strides))


def _is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = c_strides(shape)
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))
