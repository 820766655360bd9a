"""The best rates of the machine, in the same run: copies of the same list of leaves, and direct I/O."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from bench.measure import now_s

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_DISK_PIECE_BYTES = 16 << 20  # the fastest size of a direct write
_DISK_THREADS = 2
_memcpy: Any = ctypes.CDLL(None).memcpy  # ctypes releases the GIL for the call
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p

Piece = tuple[int, int]  # offset in the mapping, bytes


@final
class MemoryLimit:
    """Copies a state into a warm mapping on the ramdisk, and from there into fresh memory.

    Addresses and shares are worked out before the clock starts: what is timed is the copy, and one hand-over to
    each thread.
    """

    def __init__(self, path: Path, state: Any):
        sizes = [view.nbytes for view in host_views(state)]
        self.state_bytes = sum(sizes)
        starts = np.concatenate([[0], np.cumsum([_page_aligned(size) for size in sizes])])
        self._pieces: list[Piece] = [(int(start), size) for start, size in zip(starts[:-1], sizes, strict=True)]
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, max(int(starts[-1]), mmap.PAGESIZE))
            self._mapping = mmap.mmap(fd, max(int(starts[-1]), mmap.PAGESIZE))
        finally:
            os.close(fd)
        with suppress(OSError):  # an older kernel: the warm-up copy faults the pages in
            self._mapping.madvise(_POPULATE_WRITE)
        self._memory = np.frombuffer(self._mapping, np.uint8)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="bench-limit")
        self.copy_in(state, threads=2)

    def copy_in(self, state: Any, *, threads: int) -> float:
        """Seconds of a copy of every leaf into the warm mapping, on 1 or 2 threads."""
        base = self._memory.ctypes.data
        views = host_views(state)
        copies = [
            (base + offset, view.ctypes.data, size)
            for view, (offset, size) in zip(views, self._pieces, strict=True)
            if size
        ]

        def copy(share: Sequence[tuple[int, int, int]]) -> None:
            for target, source, size in share:
                _memcpy(target, source, size)

        return self._timed(copy, _shares(copies, threads))

    def copy_out(self, *, threads: int) -> float:
        """Seconds of a copy of every leaf out of the mapping into memory that nobody has touched, leaf by leaf."""
        base = self._memory.ctypes.data
        copies = [(0, base + offset, size) for offset, size in self._pieces if size]
        kept: list[np.ndarray] = []  # freeing is not what is measured

        def copy(share: Sequence[tuple[int, int, int]]) -> None:
            for _, source, size in share:
                fresh = np.empty(size, np.uint8)
                _memcpy(fresh.ctypes.data, source, size)
                kept.append(fresh)

        return self._timed(copy, _shares(copies, threads))

    def close(self) -> None:
        """Ends the threads and unmaps."""
        self._pool.shutdown()
        self._memory = np.empty(0, np.uint8)
        self._mapping.close()

    def _timed(self, copy: Callable[[Sequence[tuple[int, int, int]]], None], shares: list[Any]) -> float:
        start_s = now_s()
        if len(shares) == 1:
            copy(shares[0])
        else:
            list(self._pool.map(copy, shares))
        return now_s() - start_s


@final
class DiskLimit:
    """Writes as many bytes as the state has with direct I/O over a file that exists, and syncs it."""

    def __init__(self, path: Path, state_bytes: int):
        self._bytes = _page_aligned(max(state_bytes, mmap.PAGESIZE))
        self._buffer = mmap.mmap(-1, min(self._bytes, _DISK_PIECE_BYTES))
        self._buffer.write(np.random.default_rng(0).bytes(len(self._buffer)))
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # a file system without direct I/O: the limit is then what its cache and sync give
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, self._bytes)
        self._pool = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="bench-disk")
        self.write()  # preallocated blocks are only promised: the first write makes them

    def write(self) -> float:
        """Seconds until every byte is on the disk."""

        def put(start: int) -> None:
            with memoryview(self._buffer) as view, view[: min(len(view), self._bytes - start)] as piece:
                written = os.pwrite(self._fd, piece, start)
            if written != min(len(self._buffer), self._bytes - start):
                raise OSError(f"the disk took {written} bytes of a piece: is it full?")

        start_s = now_s()
        list(self._pool.map(put, range(0, self._bytes, len(self._buffer))))
        os.fdatasync(self._fd)
        return now_s() - start_s

    def close(self) -> None:
        """Ends the threads and closes the file."""
        self._pool.shutdown()
        os.close(self._fd)
        self._buffer.close()


def host_views(state: Any) -> list[np.ndarray]:
    """The bytes of every distinct box, without a copy on the CPU backend. Drop them before the state is donated."""
    views = []
    for leaf in jax.tree.leaves(state):
        boxes = {str(shard.index): shard.data for shard in leaf.addressable_shards}
        views += [np.asarray(data).reshape(-1).view(np.uint8) for data in boxes.values()]
    return views


def _page_aligned(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _shares(copies: list[tuple[int, int, int]], threads: int) -> list[list[tuple[int, int, int]]]:
    """Equal shares by bytes, in order; a leaf that crosses a border is cut there."""
    each = -(-sum(size for _, _, size in copies) // threads)
    shares: list[list[tuple[int, int, int]]] = [[]]
    room = each
    for target, source, size in copies:
        done = 0
        while done < size:
            if room == 0:
                shares.append([])
                room = each
            part = min(size - done, room)
            shares[-1].append((target + done, source + done, part))
            done += part
            room -= part
    return shares
