"""Host memory of a checkpointer's saves: the next save uses the block of the last one again."""

from __future__ import annotations

import weakref
from collections import deque
from typing import final

import numpy as np

from ckptkit.util.pages import empty_block


@final
class StagingMemory:
    """Keeps one block between saves, so that only the first save touches fresh pages (0.2 to 4 s per GB).

    A block is free again when nothing refers to its bytes any more: no leaf of the save, and no write in TensorStore.
    Safe from several threads, without a lock: blocks come back in the garbage collector, too.
    """

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=1)
        self._is_closed = False

    def take(self, size_bytes: int) -> np.ndarray:
        """A flat array of bytes. Its block is the one of an earlier save if that is free and large enough."""
        try:
            block = self._free.pop()
        except IndexError:
            block = None
        if block is None or block.nbytes < size_bytes:
            block = None  # before the larger one is allocated
            block = empty_block((size_bytes,), np.dtype(np.uint8))
        if not size_bytes:
            return block
        # NumPy has a view keep its root alive: the memoryview makes `taken` that root, and not the block.
        taken = np.frombuffer(block.data, np.uint8, size_bytes)
        weakref.finalize(taken, self._put_back, block).atexit = False
        return taken

    def close(self) -> None:
        """Frees the block, one that is in use as soon as it is not."""
        self._is_closed = True
        self._free.clear()

    def _put_back(self, block: np.ndarray) -> None:
        if not self._is_closed:
            self._free.append(block)
