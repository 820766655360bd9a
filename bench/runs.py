"""One run: a case, who takes part, how often, and where; and the rounds in which they take turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import Contender, make_contenders
from bench.limits import MemoryLimit
from bench.measure import now_s
from bench.states import Case, Tree

PLACES = ("disk", "bucket")  # of a durable tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The measurement. A round 0 warms up and proves that each contender restores what it saved."""

    case: Case
    contenders: tuple[str, ...]
    repeats: int
    ramdisk: Path  # an empty directory of this run's own
    disk: Path
    scale: float = 1.0
    places: tuple[str, ...] = PLACES

    def rounds(self, what: str, *, warm_up: bool = True) -> Iterator[int]:
        """0 for the warm-up, then 1 to `repeats`; reports progress on stderr."""
        start_s = now_s()
        for number in range(0 if warm_up else 1, self.repeats + 1):
            yield number
            print(
                f"{self.case.name} {what}: round {number} of {self.repeats}, {now_s() - start_s:.0f} s", file=sys.stderr
            )

    @property
    def limited(self) -> bool:
        """Whether the physical limit takes part."""
        return "limit" in self.contenders

    @contextmanager
    def saving(self) -> Iterator[list[Contender]]:
        """The contenders that save; all are closed, and what they stored deleted, at the end."""
        with ExitStack() as stack:
            contenders = make_contenders(self.contenders, self.ramdisk)
            for contender in contenders:
                stack.callback(contender.close)
            yield contenders

    @contextmanager
    def memory_limit(self, state: Tree) -> Iterator[MemoryLimit]:
        """The limit of copies of `state`, with its mapping on the ramdisk."""
        path = self.ramdisk / "limit.bin"
        limit = MemoryLimit(path, state)
        try:
            yield limit
        finally:
            limit.close()
            path.unlink()
