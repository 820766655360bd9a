"""Runs many reads on a few threads, never holding more than a stated number of bytes at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.boxes import Box
from ckptkit.util.sharing import share_items
from ckptkit.verification.records import Finding, VerifyProgress

THREADS = 8  # a disk or a bucket answers several reads at once; digests release the GIL
MEMORY_BYTES_MAX = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCheck:
    """One cell that is to be read. `read` returns the digest that it found, or raises `CorruptCheckpointError`.

    `expected` None: without a digest the bytes are only read. `memory_bytes` are held meanwhile.
    """

    path: str
    item: str
    leaf: str
    box: Box
    size_bytes: int
    memory_bytes: int
    expected: str | None
    read: Callable[[], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of parallel work, and the progress callback (called from any thread, one call at a time)."""

    threads: int = THREADS
    memory_bytes_max: int = MEMORY_BYTES_MAX
    progress: Callable[[VerifyProgress], None] | None = None

    def __post_init__(self) -> None:
        if self.threads < 1 or self.memory_bytes_max < 1:
            raise ValueError(f"threads={self.threads}, memory_bytes_max={self.memory_bytes_max}: at least 1 each")


def check_cells(
    checks: Iterable[CellCheck], total_bytes: int, limits: Limits, *, path: str, step: int
) -> tuple[tuple[int, int], list[Finding]]:
    """Reads every cell, and gives how many cells and bytes were read, and what is wrong with them, in their order.

    Memory: at most `limits.memory_bytes_max`, and no cell takes more than that alone. Raises what a read raises other
    than damage (no permission, no connection): unreachable is not damaged.
    """
    budget = _Budget(limits.memory_bytes_max)
    lock = threading.Lock()
    findings: dict[int, Finding] = {}
    done = [0, 0]

    def look(numbered: tuple[int, CellCheck]) -> None:
        number, check = numbered
        finding = _look(check, budget)
        with lock:
            done[0] += 1
            done[1] += check.size_bytes
            if finding is not None:
                findings[number] = finding
            if limits.progress is not None:
                limits.progress(VerifyProgress(path=path, step=step, checked_bytes=done[1], total_bytes=total_bytes))

    share_items(enumerate(checks), look, limits.threads)
    return (done[0], done[1]), [findings[number] for number in sorted(findings)]


def _look(check: CellCheck, budget: _Budget) -> Finding | None:
    def finding(problem: str, found: str | None = None) -> Finding:
        return Finding(
            path=check.path,
            problem=problem,
            item=check.item,
            leaf=check.leaf,
            box=check.box,
            expected=check.expected,
            found=found,
        )

    assert check.memory_bytes <= budget.bytes_max, "reading it would never end"
    try:
        with budget.of(check.memory_bytes):
            found = check.read()
    except CorruptCheckpointError as error:
        return finding(str(error))
    if check.expected is not None and found != check.expected:
        return finding("the bytes are not those that were saved", found)
    return None


@final
class _Budget:
    """Bytes that threads take and give back."""

    def __init__(self, bytes_max: int):
        self.bytes_max = bytes_max
        self._free = bytes_max
        self._changed = threading.Condition()

    @contextmanager
    def of(self, size_bytes: int) -> Iterator[None]:
        """A part of it, once so much is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size_bytes)  # ends: those who hold some only read
            self._free -= size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._free += size_bytes
                self._changed.notify_all()
