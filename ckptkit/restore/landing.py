"""Host memory for reads whose bytes are then sent to accelerators: used again as soon as its transfer is over."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, final

import jax
import numpy as np

from ckptkit.snapshot.shards import PINNED, is_read_from_pinned, on_device, unless_full, view_of
from ckptkit.util.pages import flat_block

PINNED_MAX_BYTES = 1 << 30
_WASTE_MAX = 1.5  # of a block that is used again, over what is asked for


@final
class Landing:
    """Blocks for the boxes of one restore. First touch of fresh memory takes longer than the copy into it: on 16 cores
    7 GB/s against 33. A GPU reads pinned memory 2 to 5 times as fast as other memory (bench/LOG.md).

    Pinned memory is taken for GPUs, `PINNED_MAX_BYTES` at most; JAX keeps it in its pool afterwards. As much at most
    waits to be used again. Safe from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._lent: dict[int, np.ndarray] = {}  # by address
        self._pinned: dict[int, int] = {}  # bytes, by address
        self._left_bytes = PINNED_MAX_BYTES
        self._pins = True  # until JAX has no room for it

    def take(
        self, shape: tuple[int, ...], dtype: np.dtype, device: Any, reclaim: Callable[[], bool] = lambda: False
    ) -> np.ndarray:
        """An uninitialised array, for a box that `device` wants. Where the pinned memory is spent, `reclaim` is called:
        it waits for a transfer and gives its blocks back, or returns False if none is under way."""
        size_bytes = math.prod(shape) * dtype.itemsize
        fits = size_bytes <= PINNED_MAX_BYTES and is_read_from_pinned(device)
        while (block := self._reused(size_bytes)) is None:
            with self._lock:
                wanted = fits and self._pins
                while wanted and size_bytes > self._left_bytes and any(_address(b) in self._pinned for b in self._free):
                    self._drop_oldest()
                if has_room := wanted and size_bytes <= self._left_bytes:
                    self._left_bytes -= size_bytes
            if has_room:
                block = self._new_pinned(size_bytes, device)
                break
            if not wanted or not reclaim():
                block = flat_block(size_bytes)
                break
        with self._lock:
            self._lent[_address(block)] = block
        return block[:size_bytes].view(dtype).reshape(shape)

    def _reused(self, size_bytes: int) -> np.ndarray | None:
        """A free block that fits."""
        with self._lock:
            fitting = [block for block in self._free if size_bytes <= block.nbytes <= _WASTE_MAX * size_bytes]
            block = min(fitting, key=lambda block: block.nbytes, default=None)
            self._free = [each for each in self._free if each is not block]
        return block

    def _drop_oldest(self) -> None:
        self._left_bytes += self._pinned.pop(_address(self._free.pop(0)), 0)

    def _new_pinned(self, size_bytes: int, device: Any) -> np.ndarray:
        """Pinned memory of the room that was taken for it. Where JAX has none after all, it is not asked again."""
        block = _pinned_block(size_bytes, device)
        with self._lock:
            if block is None:
                self._pins = False
            else:
                self._pinned[_address(block)] = size_bytes
        return flat_block(size_bytes) if block is None else block

    def give_back(self, blocks: Iterable[np.ndarray]) -> None:
        """The transfers of these arrays are over. Those that are not of this memory are left alone."""
        with self._lock:
            self._free += [lent for each in blocks if (lent := self._lent.pop(_address(each), None)) is not None]
            while sum(block.nbytes for block in self._free) > PINNED_MAX_BYTES:
                self._drop_oldest()


def _pinned_block(size_bytes: int, device: Any) -> np.ndarray | None:
    """Flat pinned memory; None where JAX has no room for it. The device does not see it."""
    memory = np.empty(size_bytes, np.uint8)  # untouched: its pages are not made to be read
    with jax.transfer_guard("allow"):
        made = unless_full(lambda: jax.block_until_ready(jax.device_put(memory, on_device(device, PINNED))))
    return None if made is None else view_of(made)


def _address(block: np.ndarray) -> int:
    return block.__array_interface__["data"][0]
