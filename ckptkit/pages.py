"""Host memory by the page: blocks that a device may take over without a copy, and pages made before they are needed."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64  # what XLA's CPU backend asks of memory that it uses as it is
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: fault pages in, touch nothing they hold
_madvise: Any = ctypes.CDLL(None, use_errno=True).madvise  # of ctypes, for it releases the GIL; mmap.madvise does not
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def empty_block(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array of its own memory, aligned so that a CPU device takes it without a copy."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


def populate(memory: np.ndarray) -> bool:
    """Faults in all pages of a flat, page-aligned mapping, keeping what they hold; False on a kernel that cannot.

    Runs without the GIL. Cost of pages touched for the first time: 0.2 to 4 s per GB.
    """
    if not memory.nbytes:
        return True
    return _madvise(memory.ctypes.data, memory.nbytes, _POPULATE_WRITE) == 0


def map_file(path: Path, size_bytes: int) -> mmap.mmap:
    """A file of at least so many bytes, allocated and mapped for writing; a larger one that is there is kept so."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size_bytes = max(size_bytes, os.fstat(fd).st_size)
        os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
