"""A tree that is being built: a home directory with a root in it, and the facts that are true of it by construction."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, final

from ckptkit.testing.damage import DamageKind, inflict
from tests.roots.catalog import KINDS, STEPS, SavedRuns
from tests.roots.media import LinkedCopies

StepState = Literal["good", "blemished", "unproven", "damaged", "undetectable", "unfinished", "forged"]
ROOT: Final = "run"  # the root's name in the home directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """The truth about one directory with a save; `path` is relative to the tree's home.

    `state`: `good`: stock Orbax restores it bit for bit. `blemished`: restored too, and a file other than the arrays
    is damaged. `unproven`: restored too, and checksums that ckptkit wrote are damaged or missing. `damaged`: bytes of
    the values were changed or are missing. `undetectable`: the same, and nothing has a checksum of them. `unfinished`:
    never committed. `forged`: a record has a name that no writer writes; a command may see it, or have no use for it.
    `in_arrays`: the damage is in what the values of arrays need. `of_run`: a step of the root's own run, in the root.
    `elsewhere`: a run of another root saved it, so it counts as the oldest. `held`: pinned or leased.
    `abandoned`: a rollback began from an older step.
    """

    path: str
    kind: str
    step: int
    state: StepState = "good"
    in_arrays: bool = True
    of_run: bool = True
    elsewhere: bool = False
    held: bool = False
    abandoned: bool = False

    @property
    def ours(self) -> bool:
        """Whether ckptkit wrote it."""
        return KINDS[self.kind].writer == "ckptkit"

    @property
    def age(self) -> tuple[bool, int]:
        """Its place in the order of the run's steps, the newest last."""
        return not self.elsewhere, self.step

    @property
    def bad(self) -> bool:
        """Whether a command that reads all of it has to report damage."""
        return self.state in ("damaged", "unproven")

    @property
    def whole(self) -> bool:
        """Whether stock Orbax restores it with the values that were saved."""
        return self.state in ("good", "blemished", "unproven")


OTHER: Final = StepFact(path="50", kind="ckptkit composite", step=50, of_run=False)  # the newest of the other root


@final
class Tree:
    """Builds one tree in `home`, an empty directory. Every method keeps `facts` true."""

    def __init__(self, home: Path, saved: SavedRuns):
        self.home = home
        self.root = home / ROOT
        self.facts: list[StepFact] = []
        self.subject = ROOT  # what the commands that take one checkpoint are given
        self.records_damaged = False  # those of the root: epochs, leases
        self._saved = saved
        self._copies = LinkedCopies()
        self.root.mkdir(parents=True)

    def run(self, kind: str, steps: Sequence[int] = STEPS, at: str = ROOT, *, of_run: bool = True) -> None:
        """A run of this kind with these steps, and the records of its root."""
        source = self._saved.root(kind)
        (self.home / at).mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.name == "_ckptkit":
                self._copies.tree(path, self.home / at / path.name)
        for step in steps:
            self.step(kind, step, f"{at}/{self._saved.step(kind, step).name}", of_run=of_run)

    def history(self, name: str) -> None:
        """A run with a history; its steps are facts of ckptkit's composite kind."""
        self._copies.tree(self._saved.root(name), self.root)
        steps = sorted(int(path.name) for path in self.root.iterdir() if path.name.isdecimal())
        self.facts += [StepFact(path=f"{ROOT}/{step}", kind="ckptkit composite", step=step) for step in steps]
        self.subject = self.facts[-1].path

    def step(self, kind: str, step: int, path: str, *, of_run: bool = False) -> None:
        """One step directory under a name of its own."""
        self._copies.tree(self._saved.step(kind, step), self.home / path)
        self.facts.append(StepFact(path=path, kind=kind, step=step, of_run=of_run))
        if of_run or self.subject == ROOT:
            self.subject = path

    def copied_step(self, history: str, step: int, path: str) -> None:
        """A step of another run, with a history, under a name of this root's run."""
        self._copies.tree(self._saved.root(history) / str(step), self.home / path)
        self.facts.append(StepFact(path=path, kind="ckptkit composite", step=step, elsewhere=True))

    def put(self, path: str, text: str = "words of a user\n") -> None:
        """A file, with the directories above it; relative to home."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def backup(self, path: str, to: str) -> None:
        """A step's copy by hard links outside of the run, as `cp -al` makes it."""
        shutil.copytree(self.home / path, self.home / to, copy_function=os.link)
        (fact,) = (each for each in self.facts if each.path == path)
        self.facts.append(replace(fact, path=to, of_run=False, held=False))

    def link(self, path: str, to: str) -> None:
        """A symbolic link with this text."""
        (self.home / path).parent.mkdir(parents=True, exist_ok=True)
        (self.home / path).symlink_to(to)

    def move(self, path: str, to: str) -> None:
        """Renames a directory and moves its fact along."""
        (self.home / to).parent.mkdir(parents=True, exist_ok=True)
        (self.home / path).rename(self.home / to)
        self.facts = [replace(each, path=to) if each.path == path else each for each in self.facts]
        self.subject = to if self.subject == path else self.subject

    def move_files(self, path: str, to: str) -> None:
        """Renames a directory that is not a step of its own."""
        (self.home / to).parent.mkdir(parents=True, exist_ok=True)
        (self.home / path).rename(self.home / to)

    def drop(self, path: str) -> None:
        """Removes a directory or file of which no fact speaks."""
        place = self.home / path
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    def forget(self, path: str) -> None:
        """Drops the fact of a step that is a step no more."""
        self.facts = [each for each in self.facts if each.path != path]

    def beside_arrays(self, path: str) -> None:
        """Records of a damaged step that the values of its arrays can still be read."""
        self.fact(path, in_arrays=False)

    def fact(self, path: str, **changes: Any) -> None:
        """Changes what is true of a step."""
        assert any(each.path == path for each in self.facts), path
        self.facts = [replace(each, **changes) if each.path == path else each for each in self.facts]

    def damage(self, path: str, pattern: str, how: DamageKind, state: StepState = "damaged", seed: int = 1) -> None:
        """Damages one file below a step that matches `pattern`, a glob relative to the step. Of a file with several
        names it is damage of every step that has one, unless the file is removed."""
        files = [file for file in sorted((self.home / path).glob(pattern)) if file.is_file()]
        sharing = [] if how == "missing file" else [fact.path for fact in self.facts if self._has_one(fact, files)]
        assert not sharing or len(files) == 1, (path, pattern, "which of the files is damaged is not known")
        inflict(how, files, [], seed)
        for each in sharing:
            self.fact(each, state=state)
        self._damaged(path, state)

    def remove(self, path: str, *patterns: str, state: StepState = "damaged") -> None:
        """Removes everything below a step that matches one of the globs, which all must match something."""
        for pattern in patterns:
            found = list((self.home / path).glob(pattern))
            assert found, (path, pattern)
            for each in found:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        self._damaged(path, state)

    def rewrite(self, path: str, file: str, change: Callable[[str], str], state: StepState = "damaged") -> None:
        """Replaces the text of one file below a step by `change` of it, which must be another."""
        place = self.home / path / file
        old = place.read_text()
        assert change(old) != old, (path, file)
        place.write_text(change(old))
        self._damaged(path, state)

    def pin(self, step: int, path: str) -> None:
        """Pins a step of the root, as `ckptkit pin` does."""
        record = {"step": step, "reason": "of the tree", "at_s": 1.0, "holder": "host:1"}
        self.put(f"{ROOT}/_ckptkit/leases/pin-{step:018d}.json", json.dumps(record))
        self.fact(path, held=True)

    def lease(self, step: int, path: str, lease_s: float = 3600.0) -> None:
        """A reader's lease of a step, which looks alive to a process that sees it for the first time."""
        record = {"step": step, "beat": int(time.time()), "lease_s": lease_s, "holder": "host:1"}
        self.put(f"{ROOT}/_ckptkit/leases/{uuid.uuid4().hex}.json", json.dumps(record))
        self.fact(path, held=True)

    def _has_one(self, fact: StepFact, files: Sequence[Path]) -> bool:
        linked = {file.stat().st_ino for file in files if file.stat().st_nlink > 1}
        below = (self.home / fact.path).rglob("*") if linked else ()
        return any(file.is_file() and file.stat().st_ino in linked for file in below)

    def _damaged(self, path: str, state: StepState) -> None:
        self.fact(path, state=state)
        self.subject = path


@dataclass(frozen=True, slots=True, kw_only=True)
class StrangeRoot:
    """A tree by its name, one line about it, and what builds it. `on_bucket`: whether a bucket can hold it (no links,
    no line ends in names)."""

    name: str
    line: str
    build: Callable[[Tree], None]
    on_bucket: bool = True


def registered(into: dict[str, StrangeRoot], *, on_bucket: bool = True) -> Callable[..., Any]:
    """A decorator: the function builds the tree that has its name, and its docstring is the line about it."""

    def register(build: Callable[[Tree], None]) -> Callable[[Tree], None]:
        name = build.__name__.replace("_", "-")
        assert name not in into, name
        assert build.__doc__, name
        line = " ".join(build.__doc__.split())
        into[name] = StrangeRoot(name=name, line=line, build=build, on_bucket=on_bucket)
        return build

    return register
