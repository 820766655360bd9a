"""The interleavings of a pair, one after another, in a process that keeps what it has built."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.pairs.gate import moments
from tests.pairs.running import Interleaving, Pairs

_kept = ExitStack()
_made: dict[str, Pairs] = {}


def _pairs(medium: str) -> Pairs:
    if medium not in _made:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from ckptkit.cli import main as command
        from tests.roots.media import Disk, bucket

        home = Path(_kept.enter_context(tempfile.TemporaryDirectory(prefix="ckptkit-pairs-")))
        place = Disk(home / "places") if medium == "disk" else _kept.enter_context(bucket(home / "bucket"))
        _made[medium] = Pairs(home, place, command)
    return _made[medium]


def run_pair(work: tuple[str, str, str, int | None, int, bool]) -> tuple[int, Sequence[tuple[str, str, str]]]:
    """Every interleaving of a pair, or one: how many there were, and each failure with the call that repeats it."""
    medium, first, second, at, every, apart = work
    pairs = _pairs(medium)
    numbers = [at] if at else moments(pairs.trace(first, second), pairs.trace(second, first))[::every]
    count, found = 0, list[tuple[str, str, str]]()
    for number in numbers:
        which = Interleaving(medium=medium, first=first, second=second, at=number, apart=apart)
        result = pairs.run(which)
        count += bool(result.paused_at)  # else it ended before: its threads took another order
        found += [(str(which), each.kind, each.text) for each in result.failures]
    return count, found
