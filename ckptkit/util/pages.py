"""Host memory by the page: blocks that a device may take over without a copy, and pages made before they are needed."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, final

import numpy as np

PAGE_BYTES = 4096  # boxes begin at multiples of it in a slot
ALIGNMENT_BYTES = 64  # what XLA's CPU backend asks of memory that it uses as it is
_HUGE_PAGE_BYTES = 2 << 20
_HUGE_FROM_BYTES = 4 << 20
_PAGE_FROM_BYTES = 1 << 20
_POPULATED_BYTES = 32 << 20  # at a time: the kernel locks the process's memory map meanwhile
_FAULTED_BYTES = 2 << 20  # the same, where another thread of this process is at work
_ADVISE_HUGE = 14  # MADV_HUGEPAGE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: fault pages in, touch nothing they hold
_madvise: Any = ctypes.CDLL(None, use_errno=True).madvise  # of ctypes, for it releases the GIL; mmap.madvise does not
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mincore: Any = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def whole_pages(size_bytes: int) -> int:
    """The bytes of the pages that `size_bytes` take: what a box takes of a slot, for each box begins a page."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def empty_block(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array of its own memory, aligned so that a CPU device takes it without a copy.

    From 4 MiB on it begins with a huge page, where the kernel gives them to who asks: NumPy asks, from that size on.
    From 1 MiB on it begins a page, so that a disk can write into it.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    alignment = PAGE_BYTES if size_bytes >= _PAGE_FROM_BYTES else ALIGNMENT_BYTES
    if size_bytes >= _HUGE_FROM_BYTES:
        alignment = _HUGE_PAGE_BYTES
    memory = np.empty(size_bytes + alignment, np.uint8)
    start = -memory.__array_interface__["data"][0] % alignment
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


def flat_block(size_bytes: int) -> np.ndarray:
    """So many uninitialised bytes, as `empty_block`."""
    return empty_block((size_bytes,), np.dtype(np.uint8))


def advise_huge(start: int, size_bytes: int) -> None:
    """Asks for huge pages for what of this memory they can hold; nothing where the kernel gives none."""
    first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    if (last := (start + size_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES) > first:
        _madvise(first, last - first, _ADVISE_HUGE)


def populate(
    memory: np.ndarray, between: Callable[[], bool] = lambda: True, at_once_bytes: int = _POPULATED_BYTES
) -> bool:
    """Faults in all pages of a flat, page-aligned mapping, keeping what they hold; False on a kernel that cannot.

    Runs without the GIL, and lets others map memory in between; `between` is called there, may wait, and returns False
    to leave the rest. Cost of pages touched for the first time: 0.2 to 4 s per GB.
    """
    start, stop = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    for at in range(start, stop, at_once_bytes):
        if not between():
            return False
        if _madvise(at, min(at_once_bytes, stop - at), _POPULATE_WRITE) != 0:
            return False
    return True


@final
class FreshBlocks:
    """Blocks of fresh memory, in the order in which they are taken. A thread faults their pages in ahead of that.

    For one thread that fills block after block and is bound by the interpreter (`populate` has the cost). The first
    block is needed at once: its pages are made as it is filled.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-pages")
        self._ahead = deque[Future[np.ndarray] | None]()

    def expect(self, sizes_bytes: Sequence[int]) -> None:
        """The sizes of the blocks that will be taken, before the first one is."""
        self._ahead += [None, *[self._pool.submit(_faulted_block, size_bytes) for size_bytes in sizes_bytes[1:]]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, size_bytes: int) -> np.ndarray:
        """So much memory: of the next block, where it has that much."""
        block = self._ahead.popleft() if self._ahead else None
        if block is None or block.cancel() or block.result().nbytes < size_bytes:
            return flat_block(size_bytes)
        return block.result()[:size_bytes]


def _faulted_block(size_bytes: int) -> np.ndarray:
    block = flat_block(size_bytes)
    populate(block, at_once_bytes=_FAULTED_BYTES)  # a block below 1 MiB begins no page, and is left as it is
    return block


def is_cached(mapped: np.ndarray) -> bool:
    """Whether the first page of a mapped file's part is in memory, so that reading it asks no disk. Touches nothing.

    Where the kernel does not tell (another user's file), all looks cached.
    """
    found = (ctypes.c_ubyte * 1)()
    start = mapped.ctypes.data // PAGE_BYTES * PAGE_BYTES
    return _mincore(start, 1, found) != 0 or bool(found[0] & 1)
