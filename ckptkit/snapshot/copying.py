"""From arrays into a slot: transfers from devices within a window, and copies that are digested on the way."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, zip_longest
from typing import Any, final

import jax
import numpy as np

from ckptkit.model.digests import copy_digested, digest_of
from ckptkit.snapshot.describe import Digests, SlotExtent
from ckptkit.snapshot.shards import Shard, in_pinned_memory, is_read_from_pinned, unless_full
from ckptkit.util.sharing import SMALL_BYTES, copy_threads, host_processes, share_work

Copied = Callable[[int, int, str], None]  # of a cell: its byte range in the slot, and its digest
WINDOW_BYTES = 256 << 20  # of host memory for each device whose boxes are being transferred, at least
# Of all devices of a host together. A cell (64 MiB) is copied by one thread: twelve of them have one each, and as much
# is being transferred meanwhile. With 512 MB a save of 14.5 GB took 0.93 s on a GPU, with four to five threads at work.
WINDOWS_BYTES = 1536 << 20


def copy_shards(
    shards: list[Shard], memory: np.ndarray, copied: Copied = lambda start, stop, digest: None
) -> dict[int, Digests]:
    """Copies shards into a slot and returns the digests of their cells, by the number of the box.

    Waits for the arrays to be ready, then runs at memory speed on several threads: each byte is read from memory
    once, digested, and copied from the cache. `copied` is called from these threads as soon as the bytes of a cell
    are in the slot. Empties `shards` and drops each array as soon as its cells are in the slot. No view of
    an array is kept: on the CPU backend a held view would make the next donating step allocate afresh.

    Transfers from all devices run in parallel. Host memory in addition to the slot: `transfer_bytes`.
    """
    digests = {extent.number: [""] * len(extent.cells) for _, extent in shards}
    # Large ones first: what is left for the end is short, so no thread waits long for another.
    large_bytes = sum(_nbytes(shard) for shard in shards if _nbytes(shard) >= SMALL_BYTES)
    window = window_bytes(len({extent.device for _, extent in shards} - {None}))
    large = _Transfers(
        sorted((each for each in shards if _nbytes(each) >= SMALL_BYTES), key=lambda each: -_nbytes(each)), window
    )
    small = _Transfers([each for each in shards if _nbytes(each) < SMALL_BYTES], window)
    shards.clear()
    cells: deque[tuple[np.ndarray, int, int, int, SlotExtent]] = deque()
    opening = threading.Lock()

    def take(piece: np.ndarray, start: int, stop: int, index: int, extent: SlotExtent) -> None:
        found = digests[extent.number]
        if extent.kept:
            found[index] = copy_digested(piece, memory[start:stop])
            copied(start, stop, found[index])
        else:
            found[index] = digest_of(piece)

    def copy_large() -> None:
        while True:
            with opening:  # in the order of the transfers, which are waited for here
                if not cells:
                    opened = large.next()
                    if opened is None:
                        return
                    data, extent = opened
                    del opened
                    cells.extend(_pieces(data, extent))
                    del data
                piece, start, stop, index, extent = cells.popleft()
            try:
                take(piece, start, stop, index, extent)
            finally:
                del piece
                large.done(extent)

    def copy_small() -> None:
        while (opened := small.next()) is not None:
            data, extent = opened
            try:
                for piece, start, stop, index, _ in _pieces(data, extent):
                    take(piece, start, stop, index, extent)
                    small.done(extent)
            finally:
                del data, opened

    share_work(partial(_allowed, copy_large), copy_threads(large_bytes), meanwhile=partial(_allowed, copy_small))
    return {number: tuple(found) for number, found in digests.items()}


def _allowed(work: Callable[[], None]) -> None:
    """Does `work` under any `jax.transfer_guard`: a guard is for the caller's transfers, and these are asked for. Once
    for each thread, for it takes 3 microseconds."""
    with jax.transfer_guard("allow"):
        work()


def transfer_bytes(extents: Iterable[SlotExtent], *, pinned: bool = False) -> int:
    """The most host memory that transfers of these boxes take in addition to a slot: a window for each device, or its
    largest box; 0 if the boxes are already in host memory. With `pinned` all of them are copied to pinned memory first.
    Cost: 0.1 microseconds per box."""
    total, largest = Counter[Any](), Counter[Any]()
    for extent in extents:
        if extent.device is not None:
            nbytes = extent.stop - extent.offset
            total[extent.device] += nbytes
            largest[extent.device] = max(largest[extent.device], nbytes)
    if pinned:
        return total.total()
    # Boxes of two sizes have a window each, and the small ones of a state seldom fill theirs.
    window = window_bytes(len(total))
    return sum(min(total[device], max(2 * window, window + largest[device])) for device in total)


def window_bytes(devices: int) -> int:
    """The window of each of so many devices of this process."""
    return max(WINDOW_BYTES, WINDOWS_BYTES // (max(1, devices) * host_processes()))


@final
class _Transfers:
    """Shards in the order in which they are copied, with transfers of at most a window for each device under way or not
    yet copied. A box that is larger than the window is transferred alone.

    `next` is called by one thread at a time, `done` by any.
    """

    def __init__(self, shards: list[Shard], window: int):
        self._window = window
        self._pins = True  # until JAX has no room for pinned memory: it may wait for seconds before it reports that
        self._waiting = deque(_by_turns(shards))
        self._begun: deque[Shard] = deque()
        self._missing = {extent.number: len(extent.cells) for _, extent in shards if extent.device is not None}
        self._used = Counter[Any]()
        self._changed = threading.Condition()

    def next(self) -> tuple[np.ndarray, SlotExtent] | None:
        """The bytes of the next shard, once they are on the host; None after the last."""
        with self._changed:
            if not self._begun:
                self._changed.wait_for(self._begin_some)
            if not self._begun:
                return None
            array, extent = self._begun.popleft()
        try:
            data = _bytes_of(array)
        except BaseException:
            with self._changed:
                self._end()
            raise
        if not extent.cells:
            self._release(extent)
        return data, extent

    def done(self, extent: SlotExtent) -> None:
        """One cell of a shard is copied. After the last one its host copy is freed, and others are begun."""
        if extent.device is None:
            return
        with self._changed:
            self._missing[extent.number] -= 1
            last = not self._missing[extent.number]
        if last:
            self._release(extent)

    def _release(self, extent: SlotExtent) -> None:
        if extent.device is not None:
            with self._changed:
                self._used[extent.device] -= extent.stop - extent.offset
                self._begin_some()
                self._changed.notify_all()

    def _begin_some(self) -> bool:
        """Begins what the windows have room for; whether `next` has something to give, or nothing is left."""
        opened: list[Shard] = []
        while self._waiting:
            _, extent = self._waiting[0]
            if extent.device is not None:
                nbytes = extent.stop - extent.offset
                if self._used[extent.device] and self._used[extent.device] + nbytes > self._window:
                    break
                self._used[extent.device] += nbytes
            opened.append(self._waiting.popleft())
        try:
            self._begun += self._transferred(opened)
        except BaseException:
            self._end()
            raise
        return bool(self._begun) or not self._waiting

    def _end(self) -> None:
        """The other shards are not copied either, and no thread waits for them."""
        self._waiting.clear()
        self._begun.clear()
        self._changed.notify_all()

    def _transferred(self, shards: list[Shard]) -> list[Shard]:
        """The shards, the transfers of those on devices begun. None of them is waited for."""
        pinned = [at for at, (_, extent) in enumerate(shards) if extent.device and is_read_from_pinned(extent.device)]
        if pinned and self._pins:
            copies = unless_full(lambda: in_pinned_memory([shards[at] for at in pinned]))
            self._pins = copies is not None  # pageable memory is slower, and there is more of it
            for at, copy in zip(pinned, copies or (), strict=self._pins):
                shards[at] = copy
        for at in set(range(len(shards))).difference(pinned if self._pins else ()):
            array, extent = shards[at]
            if extent.device is not None:
                array.copy_to_host_async()
        return shards


def _by_turns(shards: Iterable[Shard]) -> list[Shard]:
    """The shards in rotation over the devices, so that all of them transfer at the same time; else in their order."""
    queues: dict[Any, list[Shard]] = {}
    for shard in shards:
        queues.setdefault(shard[1].device, []).append(shard)
    if len(queues) < 2:
        return list(*queues.values())
    return [shard for shard in chain.from_iterable(zip_longest(*queues.values())) if shard is not None]


def _pieces(data: np.ndarray, extent: SlotExtent) -> list[tuple[np.ndarray, int, int, int, SlotExtent]]:
    offset = extent.offset
    return [
        (data[start - offset : stop - offset], start, stop, index, extent)
        for index, (start, stop) in enumerate(extent.cells)
    ]


def _nbytes(shard: Shard) -> int:
    return shard[1].stop - shard[1].offset


def _bytes_of(array: Any) -> np.ndarray:
    data = np.asarray(array)
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    return data.reshape(-1).view(np.uint8)
