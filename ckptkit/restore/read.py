"""Reads and verifies the boxes of a plan, on several threads, into host memory of the restore's own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import eq, ge, itemgetter
from typing import NamedTuple, Protocol, final

import numpy as np

from ckptkit.errors import CheckpointError, CorruptCheckpointError, PeerUnreachableError
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import BoxRecord, LeafRecord
from ckptkit.restore.plan import BoxRead, Key, RestorePlan, in_reading_order
from ckptkit.slots.reader import SlotReader
from ckptkit.util.gc_pause import collection_paused
from ckptkit.util.pages import ALIGNMENT_BYTES, PAGE_BYTES, FreshBlocks, empty_block, flat_block
from ckptkit.util.sharing import SMALL_BYTES, copy_threads, share_work

_HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_REMOTE_READS = 8  # at a time: each waits for a store's answer
# Leaves up to this size share one block of fresh memory, which is freed with the last of them. First touch of 64 MB
# takes 26 ms of processor time in blocks of 16 KB, and 8 ms in huge pages. A block has to have several huge pages.
_BLOCK_BYTES = 16 << 20
_ANNOUNCED_BLOCK_BYTES = 1 << 20  # so that the last leaf of a block is fetched soon after the first
_OWN_BYTES = 1 << 20  # a leaf of this size has a block of its own
_PARTS_MAX = 16  # of a large box, for as many threads


Fresh = Callable[[int], np.ndarray]  # so many bytes of memory


class BoxReader(Protocol):
    """Reads a part of one stored box into the caller's host memory, and verifies it."""

    def __call__(self, item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        """Raises `CorruptCheckpointError` where the bytes do not match their digest."""
        ...


OnRejected = Callable[[str, CheckpointError], None]
OnProven = Callable[[Key, dict[Box, np.ndarray]], None]
MakeBlock = Callable[[Key, Box, np.dtype], np.ndarray]  # memory for a box of a leaf; from several threads


def _fresh(key: Key, box: Box, dtype: np.dtype) -> np.ndarray:
    del key
    return empty_block(box.shape, dtype)


def execute(
    plan: RestorePlan,
    readers: Sequence[BoxReader],
    rejected: OnRejected,
    proven: OnProven,
    make_block: MakeBlock = _fresh,
    *,
    announced: frozenset[int] = frozenset(),
    counted: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, int]:
    """Reads and verifies every box of the plan into host memory; returns the bytes read by tier.

    `proven(key, blocks)` is called for each leaf as soon as all of its boxes are read, on the thread that read the last
    one, while others are still being read. If a box is damaged, or a process does not answer, the box is read from the
    next source of the same save (`rejected` is called). The error of the last source is raised.

    `counted` is called with the number of bytes as they are read, from several threads. `announced` are the sources
    that know what will be read, and fetch it meanwhile in reading order.

    Cost: a copy at memory speed, and 10 microseconds per leaf. `make_block` gives the memory of leaves from 1 MiB on.
    Smaller leaves share blocks. From a remote source, only announced ones do, in blocks of 1 MiB.
    """
    _check(plan.reads)
    reading = _Reading(plan, readers, rejected, proven, make_block, counted)
    waits = plan.waits
    leaves = _by_leaf(plan.reads)
    # One thread reads small leaves that are at hand: several threads are slower, they wait for the interpreter.
    at_hand = announced | {source for source, remote in enumerate(plan.remote) if not remote}
    all_at_hand = len(at_hand) == len(plan.remote)
    small: list[_Leaf] = []
    large: list[_Leaf] = []
    for leaf in leaves:
        is_small = leaf.box_bytes < SMALL_BYTES and (
            all_at_hand or at_hand.issuperset([read.sources[0][0] for read in leaf.reads])
        )
        (small if is_small else large).append(leaf)
    threads = _REMOTE_READS if waits else copy_threads(sum(leaf.nbytes for leaf in large))
    units = reading.each_box(large) if waits else reading.shared_out(large)
    # The largest first: what is left for the end is short, so no thread waits long for another.
    waiting = deque(sorted(units, key=lambda unit: -unit.nbytes))

    def read_large() -> None:
        while True:
            try:
                unit = waiting.popleft()
            except IndexError:
                return
            run(unit)

    def read_small() -> None:
        if waits:
            for unit in reading.shared_out(sorted(small, key=lambda leaf: -leaf.box_bytes), _ANNOUNCED_BLOCK_BYTES):
                run(unit)
            return
        with FreshBlocks() as fresh:
            units = list(reading.shared_out(small, fresh=fresh.take))
            fresh.expect([unit.pages_bytes for unit in units])
            for unit in units:
                run(unit)

    def run(unit: _Unit) -> None:
        try:
            unit.read()
        except BaseException:
            waiting.clear()  # the other units are not needed any more
            raise

    with collection_paused() if plan.is_brief else nullcontext():
        if not waits:
            share_work(read_large, threads, meanwhile=read_small)
        else:  # what is small was announced last
            if large:
                share_work(read_large, threads)
            read_small()
    return reading.read_bytes


class _Leaf(NamedTuple):
    """The boxes that are wanted of one leaf."""

    key: Key
    reads: tuple[BoxRead, ...]
    nbytes: int  # of all of its boxes
    box_bytes: int  # of its largest box


def _by_leaf(reads: Sequence[BoxRead]) -> list[_Leaf]:
    keys = [read.key for read in reads]
    if not any(map(eq, keys, keys[1:])):  # one box of each: 1 microsecond less
        return [_Leaf(read.key, (read,), read.nbytes, read.nbytes) for read in reads]
    leaves = []
    for key, group in groupby(reads, key=itemgetter(0)):
        several = tuple(group)
        sizes = [read.nbytes for read in several]
        leaves.append(_Leaf(key, several, sum(sizes), max(sizes)))
    return leaves


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit that one thread reads at a time."""

    nbytes: int
    read: Callable[[], None]
    pages_bytes: int = 0  # of small leaves that are read together, as they lie in a slot: each begins a page


@dataclass(slots=True)
class _Shared:
    """A leaf that several threads read: its blocks, each made when it is needed, and how many parts are missing."""

    key: Key
    missing: int
    blocks: dict[Box, np.ndarray] = field(default_factory=dict)
    making: threading.Lock = field(default_factory=threading.Lock)


@final
class _Reading:
    """One execution of a plan."""

    def __init__(
        self,
        plan: RestorePlan,
        readers: Sequence[BoxReader],
        rejected: OnRejected,
        proven: OnProven,
        make_block: MakeBlock,
        counted: Callable[[int], None],
    ):
        self._make_block = make_block
        self._counted = counted
        self._tiers = plan.tiers
        self._readers = readers
        self._rejected = rejected
        self._proven = proven
        self._counting = threading.Lock()
        self.read_bytes: dict[str, int] = {}

    def each_box(self, leaves: Sequence[_Leaf]) -> list[_Unit]:
        """A unit for each box, in the order that was announced to the sources that read ahead."""
        shared = {leaf.key: _Shared(leaf.key, len(leaf.reads)) for leaf in leaves}
        return [
            _Unit(read.nbytes, partial(self._read_part, read, read.wanted, shared[read.key]))
            for read in in_reading_order([read for leaf in leaves for read in leaf.reads])
        ]

    def shared_out(
        self, leaves: Iterable[_Leaf], block_bytes: int = _BLOCK_BYTES, fresh: Fresh = flat_block
    ) -> Iterable[_Unit]:
        """The leaves in units: several small ones together, up to `block_bytes`, or parts of a large one."""
        together: list[_Leaf] = []
        together_bytes = pages_bytes = 0
        for leaf in leaves:
            nbytes = leaf.nbytes
            if nbytes > block_bytes:
                yield from self._parts_of(leaf)
                continue
            if together_bytes + nbytes > block_bytes:
                yield _Unit(together_bytes, partial(self._read_together, together, fresh), pages_bytes)
                together, together_bytes, pages_bytes = [], 0, 0
            together.append(leaf)
            together_bytes += nbytes
            pages_bytes += -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if together:
            yield _Unit(together_bytes, partial(self._read_together, together, fresh), pages_bytes)

    def _parts_of(self, leaf: _Leaf) -> Iterable[_Unit]:
        parts = [(read, part) for read in leaf.reads for part in _parts(read)]
        shared = _Shared(leaf.key, len(parts))
        for read, part in parts:
            yield _Unit(part.size * read.dtype.itemsize, partial(self._read_part, read, part, shared))

    def _read_together(self, leaves: Sequence[_Leaf], fresh: Fresh) -> None:
        reads = [read for leaf in leaves for read in leaf.reads]
        blocks, read_bytes = self._in_runs(reads, fresh)
        self._read_alone(reads, blocks, read_bytes)
        at = 0
        for leaf in leaves:
            found = {}
            for read in leaf.reads:
                found[read.wanted] = blocks[at]
                at += 1
            self._proven(leaf.key, found)
        with self._counting:
            self._count(read_bytes)

    def _in_runs(self, reads: Sequence[BoxRead], fresh: Fresh) -> tuple[list[np.ndarray | None], dict[str, int]]:
        """The boxes that their first source gives together and verified, with their bytes by tier. None for the others:
        they are read alone, and that read reports the reason."""
        by_source: dict[int, tuple[list[int], list[tuple[LeafRecord, BoxRecord]]]] = {}
        for at, read in enumerate(reads):
            source, records = read.sources[0]
            record = records[0][1]
            if len(records) == 1 == len(record.digests) and read.nbytes < _OWN_BYTES and record.box == read.wanted:
                if (run := by_source.get(source)) is None:
                    by_source[source] = run = ([], [])
                run[0].append(at)
                run[1].append(records[0])
        blocks: list[np.ndarray | None] = [None] * len(reads)
        read_bytes: dict[str, int] = {}
        for source, (places, records) in by_source.items():
            reader = self._readers[source]
            if not isinstance(reader, SlotReader) or len(places) == 1:
                continue
            nbytes = 0
            for at, block in zip(places, reader.read_run(records, fresh), strict=True):
                if block is not None:
                    blocks[at] = block
                    nbytes += reads[at].nbytes
            if nbytes:
                read_bytes[self._tiers[source]] = read_bytes.get(self._tiers[source], 0) + nbytes
        return blocks, read_bytes

    def _read_alone(
        self, reads: Sequence[BoxRead], blocks: list[np.ndarray | None], read_bytes: dict[str, int]
    ) -> None:
        """Reads the boxes that are missing in `blocks`; small ones share memory."""
        missing = [at for at, block in enumerate(blocks) if block is None]
        small_bytes = sum([_aligned(reads[at].nbytes) for at in missing if reads[at].nbytes < _OWN_BYTES])
        memory = empty_block((small_bytes,), np.dtype(np.uint8))
        begin = 0
        for at in missing:
            box_read = reads[at]
            wanted, nbytes = box_read.wanted, box_read.nbytes
            if nbytes < _OWN_BYTES:
                block = np.ndarray(wanted.shape, box_read.dtype, memory, begin)
                begin += _aligned(nbytes)
            else:
                block = self._block(box_read)
            blocks[at] = block
            tier = self._read(box_read, wanted, block)
            read_bytes[tier] = read_bytes.get(tier, 0) + nbytes

    def _block(self, box_read: BoxRead) -> np.ndarray:
        make_block = _fresh if box_read.nbytes < _OWN_BYTES else self._make_block
        return make_block(box_read.key, box_read.wanted, box_read.dtype)

    def _read_part(self, box_read: BoxRead, part: Box, shared: _Shared) -> None:
        with shared.making:
            if (block := shared.blocks.get(box_read.wanted)) is None:
                block = self._block(box_read)
                shared.blocks[box_read.wanted] = block
        into = block if part == box_read.wanted else block[part.slices(box_read.wanted.start)]
        tier = self._read(box_read, part, into)
        with self._counting:
            self._count({tier: into.nbytes})
            shared.missing -= 1
            whole = not shared.missing
        if whole:
            self._proven(shared.key, shared.blocks)

    def _read(self, box_read: BoxRead, wanted: Box, into: np.ndarray) -> str:
        """Fills `into` from the first source that verifies; returns its tier.

        If none verifies, the error of a process that did not answer is raised first: its copy may be intact.
        """
        unreachable: PeerUnreachableError | None = None
        for index, records in box_read.sources:
            try:
                for leaf, record in records:
                    if np.dtype(leaf.dtype) != into.dtype:
                        raise CorruptCheckpointError(f"leaf {box_read.key} has boxes of two dtypes, one {leaf.dtype}")
                    self._readers[index](box_read.key[0], leaf, record, wanted, into)
                return self._tiers[index]
            except (CorruptCheckpointError, PeerUnreachableError) as error:
                self._rejected(self._tiers[index], error)
                if isinstance(error, PeerUnreachableError):
                    unreachable = error
                if index == box_read.sources[-1][0]:
                    if unreachable is not None:
                        raise unreachable from None
                    raise
        raise AssertionError("a planned box has a source")

    def _count(self, read_bytes: dict[str, int]) -> None:
        for tier, nbytes in read_bytes.items():
            self.read_bytes[tier] = self.read_bytes.get(tier, 0) + nbytes
            self._counted(nbytes)


def _check(reads: Sequence[BoxRead]) -> None:
    """Raises `CorruptCheckpointError` for impossible boxes, before anything is allocated for them."""
    for read in reads:
        if () in [records for _, records in read.sources]:
            raise CorruptCheckpointError(f"leaf {read.key} has no box of the shape {read.wanted.shape}")
        if read.nbytes > _HOST_BYTES:
            raise CorruptCheckpointError(
                f"leaf {read.key} has a box of {read.nbytes} bytes, and this host has {_HOST_BYTES} bytes of memory"
            )


def _parts(box_read: BoxRead) -> list[Box]:
    """A large box in whole cells one after the other, where it is stored as one and its cells are rows of it."""
    wanted = box_read.wanted
    leaf, record = box_read.sources[0][1][0]
    if record.box != wanted or len(record.digests) < 2 or not all(map(ge, leaf.cell[1:], wanted.shape[1:])):
        return [wanted]
    start, stop, cell = wanted.start[0], wanted.stop[0], leaf.cell[0]
    rows = cell * -(-len(record.digests) // _PARTS_MAX)
    return [Box((at, *wanted.start[1:]), (min(at + rows, stop), *wanted.stop[1:])) for at in range(start, stop, rows)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
