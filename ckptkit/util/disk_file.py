"""Files on a disk by direct I/O: one that is preallocated and overwritten in place, and reads and writes of others.

Direct I/O goes from the caller's memory to the device without the page cache: no copy, no dirty pages that the kernel
writes back when it likes. It needs page-aligned addresses, and not every file system has it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Literal, final

import numpy as np

from ckptkit.util import clock
from ckptkit.util.pages import PAGE_BYTES, is_cached

Method = Literal["direct", "mapping"]
PIECE_BYTES = 16 << 20  # of one write; measured best on a local SSD, alone and with a second one at the same time
_BUFFER_BYTES = 2 << 20
_DIRECT_BYTES = 1 << 20  # smaller ones are read ahead by the kernel, together
_PROBE_BYTES = 64 << 20
_PROBES = 2  # of each method, alternating; the faster one counts
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def open_slot(path: Path) -> int:
    """A descriptor of a slot's file of mode 0600, which is made where there is none. A link, a pipe or a device in its
    place is removed: what it leads to is not this tier's. Raises `OSError`, also for another user's file."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        refuse_other_owner(os.fstat(fd), path)
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_other_owner(status: os.stat_result, path: Path) -> None:
    """Raises `PermissionError` where another user owns what `path` names: that user could change it at any time."""
    if status.st_uid != os.geteuid():
        why = f"{path} belongs to user {status.st_uid}, this process runs as user {os.geteuid()}"
        raise PermissionError(errno.EPERM, why, str(path))


@final
class DiskFile:
    """An open slot file of `size_bytes` (whole pages), its blocks allocated. `memory` is a shared mapping of it.

    Raises OSError (ENOSPC, EDQUOT, EFBIG) if the room does not suffice; the file then stays as it was.
    """

    def __init__(self, path: Path, size_bytes: int):
        self._fd = open_slot(path)
        self._direct_fd = -1
        self._refuses_direct = False
        try:
            found_bytes = os.fstat(self._fd).st_size
            self.size_bytes = max(size_bytes, found_bytes)  # a larger slot of an earlier state is kept
            os.posix_fallocate(self._fd, 0, self.size_bytes)
            self.is_new = found_bytes < self.size_bytes
            self._mapping = mmap.mmap(self._fd, self.size_bytes)
            with suppress(OSError):  # a file system without direct I/O
                self._direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            os.close(self._fd)
            raise
        self.memory = np.frombuffer(self._mapping, np.uint8)

    @property
    def methods(self) -> tuple[Method, ...]:
        """How the file can be written, as far as is known."""
        return ("mapping",) if self._direct_fd < 0 or self._refuses_direct else ("direct", "mapping")

    def write(self, source: np.ndarray, start: int, method: Method) -> None:
        """Overwrites the file from byte `start` (of a page) with flat, page-aligned bytes; `sync` makes it durable.

        Runs without the GIL. Bytes that direct I/O refuses go through the mapping.
        """
        if method == "direct" and "direct" in self.methods:
            try:
                write_all(self._direct_fd, source, start)
                return
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._refuses_direct = True
        np.copyto(self.memory[start : start + source.nbytes], source)

    def sync(self) -> None:
        """Returns once the device has everything that was written, by either method."""
        os.fdatasync(self._fd)  # and not mmap.flush, which keeps the GIL

    def fill(self) -> None:
        """Writes zeros over the whole file: a first write to blocks that were only allocated takes twice as long."""
        zeros = np.frombuffer(mmap.mmap(-1, min(self.size_bytes, PIECE_BYTES)), np.uint8)
        for start in range(0, self.size_bytes, zeros.nbytes):
            self.write(zeros[: self.size_bytes - start], start, "direct")
        self.sync()
        self.is_new = False

    def faster_method(self) -> Method:
        """Which of `methods` writes and syncs faster here. Overwrites up to 64 MiB with zeros, 4 times."""
        if len(self.methods) == 1:
            return self.methods[0]
        size_bytes = min(self.size_bytes, _PROBE_BYTES)
        zeros = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        taken_s: dict[Method, float] = {}
        for method in self.methods * _PROBES:
            start_s = clock.monotonic_s()
            self.write(zeros, 0, method)
            self.sync()
            taken_s[method] = min(taken_s.get(method, float("inf")), clock.monotonic_s() - start_s)
        return min(taken_s, key=lambda method: taken_s[method])

    def close(self) -> None:
        """Unmaps and closes; views of `memory` that are still held keep the mapping until they go."""
        self.memory = np.empty(0, np.uint8)
        with suppress(BufferError):
            self._mapping.close()
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)


@final
class FileReads:
    """Reads a file on disk into the caller's memory. Large reads that are not in the page cache bypass it: this avoids
    a copy, and fills no pages that nobody needs again. A sector that cannot be read, or a truncated file, raises an
    error; with a mapping it would kill the process. Safe from several threads. Raises `OSError` if the path is not a
    file, ValueError if the file is empty.
    """

    def __init__(self, path: Path):
        self._local = threading.local()
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe
        self._fd = os.open(path, flags)
        weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        self.size_bytes = status.st_size
        # Never touched: only to ask what is cached. A read that must not wait would begin to read ahead.
        self._mapped = np.frombuffer(mmap.mmap(self._fd, self.size_bytes, prot=mmap.PROT_READ), np.uint8)
        self._direct_fd = -1
        with suppress(OSError):  # a file system without direct I/O
            self._direct_fd = os.open(path, flags | os.O_DIRECT)
            weakref.finalize(self, os.close, self._direct_fd)

    def fill(self, target: np.ndarray, start: int) -> None:
        """Fills flat `target` with the file's bytes from `start` on. Runs without the GIL.

        Raises OSError where the disk does not give them, EOFError where the file ends before.
        """
        if (
            self._direct_fd >= 0
            and _DIRECT_BYTES <= target.nbytes <= self.size_bytes - start
            and not is_cached(self._mapped[start:])
        ):
            try:
                self._fill_direct(target, start)
                return
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
            except EOFError:  # in the last page, which direct I/O reads whole
                pass
        _read(self._fd, memoryview(target.data), start)

    def _fill_direct(self, target: np.ndarray, start: int) -> None:
        """Bytes whose page alignment differs between memory and file are read through a buffer."""
        head, stop = -start % PAGE_BYTES, start + target.nbytes
        whole_bytes = (target.nbytes - head) // PAGE_BYTES * PAGE_BYTES
        first, last = start + head, start + head + whole_bytes
        if (target.ctypes.data + head) % PAGE_BYTES:
            first = last = stop
        self._fill_buffered(target, start, first, start)
        if first < last:
            _read(self._direct_fd, memoryview(target.data)[first - start : last - start], first)
            self._fill_buffered(target, last, stop, start)

    def _fill_buffered(self, target: np.ndarray, first: int, last: int, start: int) -> None:
        """The file's bytes `[first, last)` into `target`, which begins at `start`."""
        if first >= last:
            return
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)
        at = first
        while at < last:
            page = at - at % PAGE_BYTES
            size_bytes = min(_BUFFER_BYTES, -(-(last - page) // PAGE_BYTES) * PAGE_BYTES)
            least_bytes = min(last, page + size_bytes) - page
            got = _read(self._direct_fd, memoryview(buffer.data)[:size_bytes], page, least=least_bytes)
            until = min(last, page + got)
            target[at - start : until - start] = buffer[at - page : until - page]
            at = until


@final
class FileWrites:
    """Writes anywhere in a file that is being made. Whole pages bypass the page cache: this avoids a copy, and leaves
    little work for the closing sync. Smaller parts, and ends that do not fill a page, go through the cache.

    `path` is the file that `fd` has open to write; None: all goes through the page cache, for what is read again at
    once. Memory that begins in a page where its place in the file does costs no copy, other memory one. For one thread.
    """

    def __init__(self, fd: int, path: str | None):
        self._fd = fd
        self._direct_fd = -1
        self._buffer: np.ndarray | None = None
        if path is not None:
            with suppress(OSError):  # a file system without direct I/O
                self._direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, source: np.ndarray, start: int) -> None:
        """Writes flat bytes at `start`; they are safe once the file is synced. Runs without the GIL. Raises OSError."""
        first = start + -start % PAGE_BYTES
        last = (start + source.nbytes) // PAGE_BYTES * PAGE_BYTES
        if self._direct_fd >= 0 and last - first >= _DIRECT_BYTES:
            write_all(self._fd, source[: first - start], start)
            self._write_pages(source[first - start : last - start], first)
            source, start = source[last - start :], last
        write_all(self._fd, source, start)

    def close(self) -> None:
        """Ends it; `fd` stays open."""
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
            self._direct_fd = -1

    def _write_pages(self, source: np.ndarray, start: int) -> None:
        lies_well = source.ctypes.data % PAGE_BYTES == 0
        for at in range(0, source.nbytes, PIECE_BYTES):
            piece = source[at : at + PIECE_BYTES]
            try:
                if self._direct_fd >= 0:
                    write_all(self._direct_fd, piece if lies_well else self._copied(piece), start + at)
                    continue
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self.close()
            write_all(self._fd, piece, start + at)

    def _copied(self, piece: np.ndarray) -> np.ndarray:
        if self._buffer is None:
            self._buffer = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)
        np.copyto(self._buffer[: piece.nbytes], piece)
        return self._buffer[: piece.nbytes]


def write_all(fd: int, data: bytes | np.ndarray, start: int) -> None:
    """Writes flat bytes at `start`: one call of the system may write fewer. Runs without the GIL. Raises OSError."""
    view, done = memoryview(data), 0  # pyright: ignore[reportArgumentType]
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], start + done)


def _read(fd: int, into: memoryview, start: int, *, least: int | None = None) -> int:
    """Fills `into`, or `least` bytes of it where the file ends there; returns how many."""
    done, least = 0, into.nbytes if least is None else least
    while done < into.nbytes:
        got = os.preadv(fd, [into[done : done + PIECE_BYTES]], start + done)
        done += got
        if got == 0 or (done >= least and got % PAGE_BYTES):
            break
    if done < least:
        raise EOFError(f"the file ends at byte {start + done}")
    return done
