"""Every state that a crash may leave: after each operation, with its last write torn, and, where power fails,
without any of what was not synced."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptkit.testing.crash.disk import Disk, Names, Note, Operation, Resize, Sync, Write
from ckptkit.testing.crash.trace import Trace

Syncs = Literal["all", "own"]  # what syncs cover: with `own`, nothing that another process has done
SUBSETS_MAX = 64  # of unsynced operations at one point: beyond it extremes and a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashState:
    """After the first `count` operations, without those in `dropped`, of the writes in `torn` only so many bytes."""

    count: int
    dropped: frozenset[int] = frozenset()
    torn: tuple[tuple[int, int], ...] = ()

    def disk(self, trace: Trace) -> Disk:
        """The files that a restart finds."""
        torn = dict(self.torn)
        first = min(self.count, *self.dropped, *torn) if self.dropped or torn else self.count
        disk = trace.disk(first)
        for number in range(first, self.count):
            effect = trace.operations[number].effect
            if number in self.dropped:
                continue
            if number in torn and isinstance(effect, Write):
                effect = Write(effect.node, effect.offset, effect.data[: torn[number]])
            disk.apply(effect)
        return disk


def process_crashes(trace: Trace, number: int) -> Iterator[CrashState]:
    """A process that dies right after operation `number`, or in the middle of it: what it wrote stays."""
    yield CrashState(count=number + 1)
    yield from (CrashState(count=number + 1, torn=((number, cut),)) for cut in _cuts(trace.operations[number]))


def power_failures(
    trace: Trace, number: int, concerns: Callable[[Operation], bool], chance: random.Random, *, syncs: Syncs = "all"
) -> Iterator[CrashState]:
    """Power that fails right after operation `number`: any subset of the unsynced operations that `concerns` names.
    With `syncs="own"` the processes are hosts of a shared file system: see `unsynced`.

    All subsets where there are at most `SUBSETS_MAX`; else none, all, each alone lost, each alone kept, every suffix
    lost, and a sample. Each unsynced write is also torn, alone.
    """
    pending = unsynced(trace, number + 1, concerns, syncs=syncs)
    for dropped in _subsets(pending, chance):
        yield CrashState(count=number + 1, dropped=frozenset(dropped))
    for each in pending:
        for cut in _cuts(trace.operations[each]):
            yield CrashState(count=number + 1, torn=((each, cut),))
            yield CrashState(count=number + 1, torn=((each, cut),), dropped=frozenset(pending) - {each})


def unsynced(trace: Trace, count: int, concerns: Callable[[Operation], bool], *, syncs: Syncs = "all") -> list[int]:
    """Which of the first `count` operations no sync has covered. A change of names is covered by syncs of every
    directory that it changes, and by nothing else.

    `syncs="own"`: a sync covers only operations of the process that calls it. On a shared file system a sync of one
    host does not send what another host still has in memory.
    """
    pending: dict[int, set[int]] = {}
    for number, operation in enumerate(trace.operations[:count]):
        match operation.effect:
            case Sync(node):
                for each in [each for each, nodes in pending.items() if node in nodes]:
                    if syncs == "own" and trace.operations[each].process != operation.process:
                        continue
                    pending[each].discard(node)
                    if not pending[each]:
                        del pending[each]
            case Write(node) | Resize(node) if concerns(operation):
                pending[number] = {node}
            case Names(changes) if concerns(operation):
                pending[number] = {directory for directory, _, _ in changes}
            case _:
                pass
    return list(pending)


def is_operation(operation: Operation) -> bool:
    """Whether a crash after it is a point of its own."""
    return not isinstance(operation.effect, Note)


def _cuts(operation: Operation) -> list[int]:
    """Where a write is torn: before its last byte, in the middle, after its first block."""
    if not isinstance(operation.effect, Write):
        return []
    size = len(operation.effect.data)
    return sorted({cut for cut in (512, size // 2, size - 1) if 0 < cut < size})


def _subsets(pending: Sequence[int], chance: random.Random) -> Iterator[Sequence[int]]:
    if 2 ** len(pending) <= SUBSETS_MAX:
        for size in range(len(pending) + 1):
            yield from itertools.combinations(pending, size)
        return
    yield ()
    yield pending
    for number, each in enumerate(pending):
        yield (each,)
        yield [other for other in pending if other != each]
        yield pending[number + 1 :]
    for _ in range(SUBSETS_MAX // 2):
        yield [each for each in pending if chance.random() < 0.5]
