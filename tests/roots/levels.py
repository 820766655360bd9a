"""`python -m tests.roots.levels`: every command on every directory of every layout of `layouts.LAYOUTS`.

The rules: a directory that is not a root is refused where a root is expected. A command that reads has read every array
or fails. No byte that Orbax wrote changes, and nothing is written into a directory that is not a root. `Levels.run`
returns what broke one.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import click
import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from ckptkit.cli import main as command
from ckptkit.errors import StepNotFoundError
from tests.roots.kinds import leaves, quiet
from tests.roots.layouts import LAYOUTS, Layout, LevelKind, tree
from tests.roots.oracle import NOT_READ, Failure

# Commands that take a root: each way in which one can be named.
OF_ROOTS: Final[dict[str, list[str]]] = {
    "certify": ["certify {path} --replay tests.cli.test_certify:plan"],
    "copy": ["copy {root} {path}", "copy {root}/200 {path}", "copy {root}/200 {path} --as newest --as-step 400"],
    "doctor": ["doctor {path}"],
    "du": ["du {path}", "du {path} --deep"],
    "pin": ["pin {path} 200", "pin {path} 0"],
    "plan-restore": ["plan-restore {path}"],
    "prune": ["prune {path} --keep newest=1 --unread", "prune {path} --keep newest=1"],
    "rollback": ["rollback {path} --to 200", "rollback {path} --to 0 --unread"],
    "scrub": ["scrub {path}", "scrub {path} --repair"],
    "steps": ["steps {path}"],
    "tune": ["tune {path} --probe 64KB --rounds 1"],
    "unpin": ["unpin {path} 200"],
}
# Commands that write to a place that does not exist yet.
OF_TARGETS: Final[dict[str, str]] = {
    "convert": "convert {file} {path}/new --to {format}",
    "extract": "extract {file} {path}/new --only w --to {format}",
    "merge": "merge {file} {file} {path}/new --average --to {format}",
    "reshard": "reshard {root}/200 {path}/new --mesh x=2",
}
# Commands that read a checkpoint of any kind.
READERS: Final = (
    "inspect {path} --json",
    "verify {path} --json",
    "convert {path} {out}/dst.npz",
    "convert {path} {out}/dst --to orbax",
    "extract {path} {out}/dst.npz --only **",
    "diff {path} {path} --json",
    "reshard {path} {out}/dst --mesh x=2",
)
_MANAGERS: Final[dict[str, Callable[[Path], Any]]] = {
    "manager": lambda path: ckptkit.CheckpointManager(path),
    "manager, read_only": lambda path: ckptkit.CheckpointManager(
        path, options=ocp.CheckpointManagerOptions(read_only=True)
    ),
    "manager of a path below": lambda path: ckptkit.CheckpointManager(path / "new"),
}
_LINES: Final = (
    *(line for lines in OF_ROOTS.values() for line in lines),
    *(line.replace("{format}", format) for line in OF_TARGETS.values() for format in ("npz", "orbax")),
    *READERS,
)
ACTIONS: Final = (*dict.fromkeys(_LINES), *_MANAGERS)
_SEEN: Final = ("proven", "unproven")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One action on one directory of one layout."""

    layout: str
    level: str
    action: str

    def __str__(self) -> str:
        return f"{self.layout}/{self.level}: {self.action}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of an action. `raised`: the error of a manager, or what escaped from a command."""

    code: int
    out: str = ""
    err: str = ""
    raised: BaseException | None = None


@final
class Levels:
    """Builds layouts below `home`, and runs actions on copies of them."""

    def __init__(self, home: Path):
        self._home = home
        self._built: dict[str, Path] = {}
        self._copies: dict[str, Path] = {}
        self._count = 0
        self._names: dict[str, str] = {}

    def cells(self) -> list[Cell]:
        """All of them. Cost: every layout is built."""
        found = []
        for name, layout in LAYOUTS.items():
            levels = layout.levels(self._pristine(name))
            found += [Cell(layout=name, level=level, action=action) for level in levels for action in ACTIONS]
        return found

    def run(self, cell: Cell) -> list[Failure]:
        """The rules that one action broke."""
        layout, home = LAYOUTS[cell.layout], self._copy(cell.layout)
        kind = layout.levels(home)[cell.level]
        out, before = self._new("out"), _content(home)
        answer = self._answer(cell, home / cell.level, out)
        after = _content(home)
        if after != before:
            shutil.rmtree(self._copies.pop(cell.layout))
        found = [*_broken(answer), *_harm(cell, kind, before, after)]
        if cell.action in _MANAGERS:
            found += _opened(cell, kind, answer)
        elif cell.action in READERS:
            found += _misread(cell, layout, kind, answer, out)
        else:
            found += _not_refused(cell, kind, answer)
        shutil.rmtree(out)
        return [Failure(kind=each.kind, text=f"{cell}: {each.text}") for each in found]

    def _answer(self, cell: Cell, path: Path, out: Path) -> Answer:
        with quiet():
            if cell.action in _MANAGERS:
                try:
                    _MANAGERS[cell.action](path).close()
                except Exception as error:  # noqa: BLE001  it is judged
                    return Answer(code=1, raised=error)
                return Answer(code=0)
            names = {"path": path, "out": out, **self._others()}
            printed, said = io.StringIO(), io.StringIO()
            with redirect_stdout(printed), redirect_stderr(said):
                code = command([word.format(**names) for word in cell.action.split()])
            return Answer(code=code, out=printed.getvalue(), err=said.getvalue())

    def _others(self) -> Mapping[str, str]:
        """A root with the step 200 of ckptkit's, and a file to convert."""
        if not self._names:
            root, file = self._new("others") / "run", self._home / "m.npz"
            with quiet(), ckptkit.CheckpointManager(root) as manager:
                manager.save(200, args=ocp.args.StandardSave(tree()))
            np.savez(file, w=np.arange(9.0))
            self._names = {"root": str(root), "file": str(file)}
        return self._names

    def _pristine(self, name: str) -> Path:
        if name not in self._built:
            self._built[name] = self._new("built")
            with quiet():
                LAYOUTS[name].build(self._built[name])
        return self._built[name]

    def _copy(self, name: str) -> Path:
        if name not in self._copies:
            self._copies[name] = self._new("copy")
            shutil.copytree(self._pristine(name), self._copies[name], dirs_exist_ok=True)
        return self._copies[name]

    def _new(self, name: str) -> Path:
        self._count += 1
        path = self._home / f"{name}-{self._count}"
        path.mkdir(parents=True)
        return path


def _content(home: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(home)): path.read_bytes() if path.is_file() else b"" for path in sorted(home.rglob("*"))
    }


def _broken(answer: Answer) -> Iterator[Failure]:
    """An error of ours, which no answer is."""
    if "internal error" in answer.err or "Traceback" in answer.err:
        yield Failure(kind="internal error", text=answer.err[-400:])


def _harm(cell: Cell, kind: LevelKind, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Iterator[Failure]:
    """Existing files stay, byte for byte. A directory that is not a root gets no file."""
    changed = sorted(path for path, data in before.items() if after.get(path) != data and "_ckptkit" not in path)
    if changed:
        yield Failure(kind="bytes lost", text=f"changed or removed: {changed[:4]}")
    made = sorted(path for path in after.keys() - before.keys() if "/_ckptkit/leases" not in path)  # those of readers
    if made and (kind != "root" or cell.action in READERS):
        yield Failure(kind="false good", text=f"wrote {made[:4]} into a directory that is not a root")


def _opened(cell: Cell, kind: LevelKind, answer: Answer) -> Iterator[Failure]:
    below = cell.action == "manager of a path below"
    if kind == "root":
        if answer.raised is not None and not (below and isinstance(answer.raised, StepNotFoundError)):
            yield Failure(kind="internal error", text=f"a root is refused: {answer.raised!r}")
    elif answer.raised is None:
        yield Failure(kind="false good", text="a manager takes it for a root")
    elif not isinstance(answer.raised, StepNotFoundError):
        yield Failure(kind="internal error", text=f"{answer.raised!r}")


def _not_refused(cell: Cell, kind: LevelKind, answer: Answer) -> Iterator[Failure]:
    """A command that takes a root, or writes to a new place."""
    refused = 10 if "/new" not in cell.action else 1
    if kind != "root" and (answer.code != refused or answer.out):
        yield Failure(kind="false good", text=f"exit {answer.code}: {answer.out[-200:]}{answer.err[-200:]}")
    if kind == "root" and answer.code == 0 and cell.action.startswith("steps") and "300" not in answer.out:
        yield Failure(kind="false good", text=f"its step is not shown: {answer.out}")


def _misread(cell: Cell, layout: Layout, kind: LevelKind, answer: Answer, out: Path) -> Iterator[Failure]:
    """A command that reads has read every array, or ends with an error."""
    made = sorted(out.iterdir())
    whole = any(path == cell.level or path.startswith(f"{cell.level}/") for path in layout.arrays)
    unread = answer.code == NOT_READ  # what is understood was read, and the rest is named
    if answer.code and made and not unread:
        yield Failure(kind="false good", text=f"exit {answer.code}, and wrote {made}")
    if kind == "inside" and answer.code == 0:
        yield Failure(kind="false good", text=f"a part of an item is taken for one: {answer.out[-300:]}")
    if kind == "inside" or not whole:
        return
    if answer.code == 1 and "has a layout of old versions of Orbax" in answer.err:
        return
    if answer.code and not unread:
        yield Failure(kind="false corrupt", text=f"exit {answer.code}: {answer.err[-300:]}")
    elif why := _unread(cell.action, answer, out):
        yield Failure(kind="false good", text=f"exit 0: {why}")


def _unread(action: str, answer: Answer, out: Path) -> str:
    """Which arrays an answer leaves out; empty where it has all."""
    if action.startswith("inspect"):
        found = [leaf for item in json.loads(answer.out)["items"] for leaf in item["leaves"]]
        sized = [leaf for leaf in found if leaf["dtype"] is not None]
        return "" if len(sized) >= len(_wanted()) else f"{found}"
    if action.startswith("verify"):
        steps, sizes = json.loads(answer.out)["steps"], [*map(len, _wanted())]
        whole = [each for each in steps if each["cells"] >= len(sizes) and each["bytes"] >= sum(sizes)]
        return "" if whole and {each["state"] for each in whole} <= set(_SEEN) else f"{steps}"
    if "npz" in action:
        with np.load(out / "dst.npz") as arrays:
            found = [arrays[name].tobytes() for name in arrays.files]
        return "" if all(each in found for each in _wanted()) else f"{len(found)} arrays"
    if action.startswith("diff"):
        equal = json.loads(answer.out)["equal"]
        return "" if equal >= len(_wanted()) else f"{equal} leaves"
    return ""


@cache
def _wanted() -> list[bytes]:
    return [leaf[-1] for leaf in leaves(tree()).values()]


def chosen(cells: list[Cell], seed: int, each: int) -> list[Cell]:
    """`each` cells of every level of every layout, which together take every action."""
    chance = random.Random(seed)
    levels: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        levels.setdefault((cell.layout, cell.level), []).append(cell)
    turns = [
        action for _ in range(len(levels) * each // len(ACTIONS) + 1) for action in chance.sample(ACTIONS, len(ACTIONS))
    ]
    by_action = [{cell.action: cell for cell in of_one} for of_one in levels.values()]
    return [found[turns[at * each + turn]] for at, found in enumerate(by_action) for turn in range(each)]


@click.command()
@click.option("--layout", "layouts", type=click.Choice(list(LAYOUTS)), multiple=True, help="[default: all]")
@click.option("--action", "actions", multiple=True, help="Its first words; repeatable. [default: all]")
@click.option("--each", type=click.IntRange(min=1), help="So many actions on each directory, drawn by --seed.")
@click.option("--seed", type=int, default=0, show_default=True)
def main(layouts: tuple[str, ...], actions: tuple[str, ...], each: int | None, seed: int) -> None:
    """Runs every command on each directory of every layout, and judges the answers. Takes about five minutes."""
    with tempfile.TemporaryDirectory(prefix="ckptkit-levels-") as home:
        levels = Levels(Path(home))
        cells = levels.cells() if each is None else chosen(levels.cells(), seed, each)
        cells = [cell for cell in cells if not layouts or cell.layout in layouts]
        cells = [cell for cell in cells if not actions or cell.action.startswith(actions)]
        kinds: Counter[str] = Counter()
        for cell in cells:
            for failure in levels.run(cell):
                kinds[failure.kind] += 1
                click.echo(f"{failure.kind}: {failure.text}")
    counts = ", ".join(
        f"{kind} {kinds[kind]}" for kind in ("bytes lost", "false good", "false corrupt", "internal error")
    )
    places = len({(cell.layout, cell.level) for cell in cells})
    click.echo(f"{len({cell.layout for cell in cells})} layouts, {places} directories, {len(cells)} cells: {counts}")
    raise SystemExit(1 if kinds else 0)


if __name__ == "__main__":
    main()
