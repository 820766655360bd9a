"""Blocks of fresh memory whose pages are there before they are taken."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import numpy as np

from ckptkit.util.pages import ALIGNMENT_BYTES, PAGE_BYTES, FreshBlocks, flat_block, is_cached, populate

BYTES = 8 << 20


def test_blocks_after_the_first_have_their_pages_before_they_are_taken() -> None:
    """A restore would wait for the kernel at each page, or read into memory that is too small."""
    with FreshBlocks() as fresh:
        fresh.expect([BYTES, BYTES, 3 * PAGE_BYTES, BYTES])
        wait([block for block in fresh._ahead if block is not None])
        for number, size_bytes in enumerate((BYTES, BYTES, 2 * PAGE_BYTES + 1, BYTES)):
            block = fresh.take(size_bytes)
            assert (block.shape, block.dtype) == ((size_bytes,), np.uint8)
            assert block.ctypes.data % ALIGNMENT_BYTES == 0
            if number and size_bytes == BYTES:
                assert is_cached(block[size_bytes // 2 :])
            block[:] = 1


def test_a_block_that_is_too_small_or_was_not_expected_is_made_anew() -> None:
    """Leaves that lie farther apart than expected would end outside of their memory."""
    with FreshBlocks() as fresh:
        fresh.expect([PAGE_BYTES, PAGE_BYTES])
        assert fresh.take(PAGE_BYTES + 1).nbytes == PAGE_BYTES + 1
        assert fresh.take(PAGE_BYTES + 1).nbytes == PAGE_BYTES + 1
        assert fresh.take(5).nbytes == 5
        assert fresh.take(0).nbytes == 0
        fresh.expect([])
        assert fresh.take(7).nbytes == 7


def test_thread_ends_with_the_block_and_blocks_are_never_given_twice() -> None:
    """A failed restore would leave a thread that takes memory; or two leaves would share their bytes."""
    before = threading.active_count()
    with FreshBlocks() as fresh:
        fresh.expect([1 << 20] * 16)
        blocks = [fresh.take(1 << 20) for _ in range(16)]
        for number, block in enumerate(blocks):
            block[:] = number
    assert threading.active_count() == before
    assert [set(map(int, block[:: 1 << 16])) for block in blocks] == [{number} for number in range(16)]


def test_pages_are_faulted_in_and_keep_what_they_hold() -> None:
    """A slot would lose the bytes of a committed save, or the last page of a block would be left out."""
    block = flat_block(BYTES - 5)
    block[::PAGE_BYTES] = 7
    assert populate(block, at_once_bytes=3 * PAGE_BYTES)
    assert (block[::PAGE_BYTES] == 7).all()
    assert is_cached(block[-1:])
