"""The commands that run at once over one root, and what each one promises when it ends with exit code 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from tests.roots.catalog import KINDS

KIND: Final = "ckptkit composite"
STEPS: Final = (1, 2, 3, 4)  # of the root; `more` is the same run with one step more
ADDED: Final = 5
OTHER: Final = 50  # the newest step of a root of another history
SAVED: Final = (60, 61)  # by the job
MENDABLE: Final = 2  # the step that is damaged where a repair takes part
UNPINNED: Final = 3  # the step that is pinned where `unpin` takes part

Makes = Literal["nothing", "copies", "values", "step 1", "pin", "added", "other", "saved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, or a job (`call`). `writes`: it changes the root or a record in it. `deletes`: the steps that it
    is asked to delete. `makes`: what is there after exit code 0. `moves`: it may change which step a restart takes."""

    name: str
    line: str = ""
    call: Callable[[str], Any] | None = None
    writes: bool = False
    deletes: frozenset[int] = frozenset()
    makes: Makes = "nothing"
    moves: bool = False


def _job(root: str) -> None:
    """A job that restores, saves twice and keeps two steps."""
    kind = KINDS[KIND]
    with kind.open(root, "ckptkit", max_to_keep=2) as manager:
        manager.restore(None)
        for step in SAVED:
            manager.save(step, args=kind.arguments(step))
            manager.wait_until_finished()


_ALL: Final = (
    Command(name="prune", line="prune {root} --keep newest=1", writes=True, deletes=frozenset({1, 2, 3}), moves=True),
    Command(name="scrub", line="scrub {root} --repair", writes=True, moves=True),
    Command(name="rollback", line="rollback {root} --to 1", writes=True, makes="step 1", moves=True),
    Command(name="pin", line="pin {root} 1", writes=True, makes="pin"),
    Command(name="unpin", line=f"unpin {{root}} {UNPINNED}", writes=True),
    Command(name="copy-in", line=f"copy {{more}}/{ADDED} {{root}}", writes=True, makes="added", moves=True),
    Command(name="copy-out", line="copy {root} {out}", writes=True, makes="copies"),
    Command(
        name="copy-newest", line=f"copy {{other}}/{OTHER} {{root}} --as newest", writes=True, makes="other", moves=True
    ),
    Command(name="convert", line="convert {root}/1 {out}/dst --to npz", writes=True, makes="values"),
    Command(name="reshard", line="reshard {root}/1 {out}/dst --mesh x=2", writes=True, makes="values"),
    Command(name="job", call=_job, writes=True, deletes=frozenset(STEPS), makes="saved", moves=True),
    Command(name="verify", line="verify {root}"),
    Command(name="steps", line="steps {root}"),
    Command(name="du", line="du {root} --deep"),
    Command(name="doctor", line="doctor {root}"),
    Command(name="inspect", line="inspect {root}/1"),
    Command(name="diff", line="diff {root}/1 {more}/1"),
    Command(name="plan-restore", line="plan-restore {root}"),
)
COMMANDS: Final[dict[str, Command]] = {each.name: each for each in _ALL}


def pairs_of(names: tuple[str, ...] = tuple(COMMANDS)) -> list[tuple[str, str]]:
    """Every pair of which one writes, in both roles."""
    return [(a, b) for a in names for b in names if COMMANDS[a].writes or COMMANDS[b].writes]
