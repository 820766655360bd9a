"""Which cells there are, a choice of them that covers every root and every action, and what a campaign found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from tests.mount import MountedBucket
from tests.roots.commands import ACTIONS
from tests.roots.media import Disk, Medium, Mount, bucket
from tests.roots.oracle import Failure
from tests.roots.running import Cell, Main, Zoo
from tests.roots.tree import StrangeRoot

MEDIA: Final = ("disk", "bucket", "mount")  # the last: a bucket that a FUSE program mounts, where that is possible


def all_cells(
    roots: Mapping[str, StrangeRoot], media: Sequence[str] = MEDIA, actions: Iterable[str] = ACTIONS
) -> list[Cell]:
    """Every action over every root on every medium that can hold the root, root by root."""
    names = list(actions)
    return [
        Cell(medium=medium, root=root.name, action=action)
        for medium in media
        for root in roots.values()
        if medium == "disk" or root.on_bucket
        for action in names
    ]


def chosen_cells(roots: Mapping[str, StrangeRoot], medium: str, seed: int, count: int = 0) -> list[Cell]:
    """One cell of each root that the medium can hold (or of `count` of them), which together take every action."""
    chance = random.Random(seed)
    names = [root.name for root in roots.values() if medium == "disk" or root.on_bucket]
    actions = list(ACTIONS)
    chance.shuffle(names)
    chance.shuffle(actions)
    taken = names[: count or None]
    rounds = max(len(taken), 0 if count else len(actions))
    return [
        Cell(medium=medium, root=taken[number % len(taken)], action=actions[number % len(actions)])
        for number in range(rounds)
    ]


@final
class Campaign:
    """Runs cells on disks and in a bucket below `home`; a context manager. `main` is the command."""

    def __init__(self, home: Path, main: Main, roots: dict[str, StrangeRoot]):
        self._home = home
        self._main = main
        self._roots = roots
        self._open = ExitStack()
        self._zoos: dict[str, Zoo] = {}

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, cell: Cell) -> list[Failure]:
        """Runs one cell and returns what must not be."""
        if cell.medium not in self._zoos:
            home = self._home / cell.medium
            home.mkdir(parents=True)
            medium: Medium = Disk(home / "places")
            if cell.medium == "bucket":
                medium = self._open.enter_context(bucket(home / "bucket"))
            elif cell.medium == "mount":
                mounted = MountedBucket(home / "mounted", cached_s=60)  # as long as GCSFuse lets the kernel
                self._open.enter_context(mounted)
                medium = Mount(mounted)
            self._zoos[cell.medium] = Zoo(home, medium, self._main, self._roots)
        return self._zoos[cell.medium].run(cell.root, cell.action)


@dataclass(slots=True)
class Tally:
    """The result of a campaign: its cells, and every failure with its cell."""

    cells: int = 0
    roots: set[str] = field(default_factory=set)
    actions: set[str] = field(default_factory=set)
    failures: list[tuple[Cell, Failure]] = field(default_factory=list)

    def add(self, cell: Cell, failures: Iterable[Failure]) -> None:
        """Counts one cell."""
        self.cells += 1
        self.roots.add(cell.root)
        self.actions.add(cell.action)
        self.failures += [(cell, failure) for failure in failures]

    def line(self) -> str:
        """The result in one line."""
        kinds = Counter(failure.kind for _, failure in self.failures)
        counts = ", ".join(
            f"{kind} {kinds[kind]}" for kind in ("bytes lost", "false corrupt", "false good", "internal error")
        )
        return f"{len(self.roots)} roots x {len(self.actions)} commands ({self.cells} cells): {counts}"


def failure_lines(cell: Cell, failure: Failure, repeat: Callable[[Cell], str]) -> str:
    """A failure, and the command that repeats its cell."""
    return f"{failure.kind}: {cell}: {failure.text}\n  repeat: {repeat(cell)}"
