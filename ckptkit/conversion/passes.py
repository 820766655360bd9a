"""In which blocks an array is read to be stored in other chunks: as few bytes as possible twice, within a budget.

A block is a whole number of target chunks. Source chunks are read whole, so those that lie across the border of two
blocks are read for both."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

_Job = TypeVar("_Job")
Data = TypeVar("Data")
BytesProgress = Callable[[int, int], None]  # bytes that this process has written, of how many


def counted(total: int, progress: BytesProgress | None) -> Callable[[int], None]:
    """A function of the bytes that were written just now: `progress` gets their sum."""
    written = 0

    def count(done: int) -> None:
        nonlocal written
        written += done
        if progress is not None:
            progress(written, total)

    return count


def read_ahead(read: Callable[[_Job], Data], jobs: Iterable[_Job], ahead: int = 1) -> Iterator[tuple[_Job, Data]]:
    """Each job with what `read` gives for it, in order; up to `ahead` more are read while one is with the caller."""
    reader = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-read")
    under_way: deque[tuple[_Job, Future[Data]]] = deque()
    try:
        for job in jobs:
            under_way.append((job, reader.submit(read, job)))
            if len(under_way) > ahead:
                first, data = under_way.popleft()
                yield first, data.result()
        while under_way:
            first, data = under_way.popleft()
            yield first, data.result()
    finally:
        reader.shutdown(cancel_futures=True)


_SIZES_MAX = 4096  # of the search


@lru_cache(maxsize=4096)
def block_shape(
    shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...], limit: int, handy: int
) -> tuple[int, ...]:
    """The block of at most `limit` elements (or one target chunk) for which the fewest are read.

    Of those that read the fewest, the largest up to `handy` elements: larger ones cost memory and are not faster.
    """
    choices = [_sizes(*each) for each in zip(shape, source, target, strict=True)]
    while math.prod(map(len, choices)) > _SIZES_MAX:
        longest = max(choices, key=len)
        longest[:] = longest[::2] if longest[-1] in longest[::2] else [*longest[::2], longest[-1]]
    blocks = [each for each in itertools.product(*choices) if math.prod(each) <= limit] or [target]

    def cost(block: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        size = math.prod(block)
        return reads(shape, source, block), (limit - size if size <= handy else limit + size), block

    return min(blocks, key=cost)


def reads(shape: Sequence[int], source: Sequence[int], block: Sequence[int]) -> int:
    """Elements of the source chunks that are read, block by block."""
    return math.prod(_along(*each) for each in zip(shape, source, block, strict=True))


@lru_cache(maxsize=4096)
def _along(size: int, step: int, rows: int) -> int:
    if rows >= size:
        return -(-size // step) * step
    count = -(-size // rows)  # of blocks, which may be 2^60: never counted one by one
    begun = _floors(count, rows, step, 0)  # chunks before the begin of each block
    ended = _floors(count, rows, step, step - 1) - (step - 1) // step + -(-size // step)  # up to the end of each
    return step * (ended - begun)


def _floors(count: int, by: int, step: int, more: int) -> int:
    """The sum of `(by * k + more) // step` over `k` below `count`, as fast as Euclid finds a common divisor."""
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (by // step) + count * (more // step)
        by, more = by % step, more % step
        top = by * count + more
        if top < step:
            break
        # The lattice points below a line, counted by columns, are those below it counted by rows.
        count, by, step, more = top // step, step, by, top % step
    return total


def _sizes(size: int, source: int, target: int) -> list[int]:
    """The possible sizes of a block along a dimension: multiples of the target's rows, up to the whole dimension."""
    whole = max(1, -(-size // target)) * target
    found = {whole}
    for unit in (target, math.lcm(max(1, source), target), -(-max(1, source) // target) * target):
        rows = unit
        while rows < whole:
            found.add(rows)
            rows *= 2
    return sorted(found)
