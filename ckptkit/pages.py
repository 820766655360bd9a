"""Host memory by the page: blocks that a device may take over without a copy, and pages made before they are needed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64  # what XLA's CPU backend asks of memory that it uses as it is
_HUGE_PAGE_BYTES = 2 << 20
_HUGE_FROM_BYTES = 4 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: fault pages in, touch nothing they hold
_madvise: Any = ctypes.CDLL(None, use_errno=True).madvise  # of ctypes, for it releases the GIL; mmap.madvise does not
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def empty_block(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array of its own memory, aligned so that a CPU device takes it without a copy.

    From 4 MiB on it begins with a huge page, where the kernel gives them to who asks: NumPy asks, from that size on.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    alignment = _HUGE_PAGE_BYTES if size_bytes >= _HUGE_FROM_BYTES else ALIGNMENT_BYTES
    memory = np.empty(size_bytes + alignment, np.uint8)
    start = -memory.__array_interface__["data"][0] % alignment
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


def populate(memory: np.ndarray) -> bool:
    """Faults in all pages of a flat, page-aligned mapping, keeping what they hold; False on a kernel that cannot.

    Runs without the GIL. Cost of pages touched for the first time: 0.2 to 4 s per GB.
    """
    if not memory.nbytes:
        return True
    return _madvise(memory.ctypes.data, memory.nbytes, _POPULATE_WRITE) == 0
