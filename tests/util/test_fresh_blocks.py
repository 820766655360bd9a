"""Blocks of fresh memory whose pages are there before they are taken."""

from __future__ import annotations

import threading

import numpy as np

from ckptkit.util.pages import ALIGNMENT_BYTES, PAGE_BYTES, FreshBlocks, is_cached


def test_blocks_have_their_pages_and_their_size() -> None:
    """A restore would wait for the kernel at each page, or read into memory that is too small."""
    with FreshBlocks() as fresh:
        fresh.expect([8 << 20, 3 * PAGE_BYTES, 8 << 20])
        while fresh.missing:  # not cancelled by being taken first
            threading.Event().wait(0.001)
        for size_bytes in (8 << 20, 2 * PAGE_BYTES + 1, 8 << 20):
            block = fresh.take(size_bytes)
            assert (block.shape, block.dtype) == ((size_bytes,), np.uint8)
            assert block.ctypes.data % ALIGNMENT_BYTES == 0
            assert is_cached(block[size_bytes // 2 :])
            block[:] = 1


def test_a_block_that_is_too_small_or_was_not_expected_is_made_anew() -> None:
    """Leaves that lie farther apart than expected would end outside of their memory."""
    with FreshBlocks() as fresh:
        fresh.expect([PAGE_BYTES])
        assert fresh.take(PAGE_BYTES + 1).nbytes == PAGE_BYTES + 1
        assert fresh.take(5).nbytes == 5
        assert fresh.take(0).nbytes == 0


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
