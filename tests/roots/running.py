"""Runs actions over roots, one cell after another, and judges each."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

import ckptkit
from tests.roots.catalog import KINDS, SavedRuns
from tests.roots.commands import ACTIONS, Action, Places
from tests.roots.kinds import quiet
from tests.roots.media import Medium
from tests.roots.oracle import Answer, Failure, Outcome, blocked, judge
from tests.roots.tree import ROOT, StrangeRoot, Tree

Main = Callable[[Sequence[str]], int]
_OTHER: Final = "restarted"  # the history of the other root, with the step 50 of epoch 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One action over one root on one medium."""

    medium: str
    root: str
    action: str

    def __str__(self) -> str:
        return f"{self.medium}/{self.root}/{self.action}"


@final
class Zoo:
    """Builds roots below `home`, copies them to a medium, and runs actions over the copies.

    `main` is the command, called with its arguments: it prints on `sys.stdout` and `sys.stderr` and returns its exit
    code. A copy is used again for as long as nothing in it has changed.
    """

    def __init__(self, home: Path, medium: Medium, main: Main, roots: dict[str, StrangeRoot]):
        self._home = home
        self._medium = medium
        self._main = main
        self._roots = roots
        self._saved = SavedRuns(home / "saved")
        self._trees: dict[str, Tree] = {}
        self._placed: dict[str, str] = {}
        self._other = ""
        self._count = 0

    def tree(self, name: str) -> Tree:
        """A root as it was built, with what is true of it. Not to be changed."""
        if name not in self._trees:
            made = Tree(self._home / "trees" / name, self._saved)
            with quiet():
                self._roots[name].build(made)
            self._trees[name] = made
        return self._trees[name]

    def run(self, root: str, action: str) -> list[Failure]:
        """Runs one action over a copy of one root and returns what must not be."""
        tree, made = self.tree(root), ACTIONS[action]
        place = self._placed.pop(root, None) or self._medium.place(tree.home)
        self._other = self._other or self._medium.place(self._saved.root(_OTHER))
        out, other = self._new_out(), self._medium.listing(self._other)
        before = self._medium.listing(place)
        places = _places(tree, place, out, self._other)
        answer = _performed(made, places, self._main)
        after, written = self._medium.listing(place), self._medium.listing(out)
        in_place = self._medium.name != "disk"
        outcome = Outcome(
            answer=answer, before=before, after=after, written=written, place=place, out=out, in_place=in_place
        )
        failures = judge(tree, made, outcome)
        if made.arguments and made.call is not None and answer.raised:
            failures += blocked(tree, outcome, self._without_command(tree, made))
        if made.arguments == ("plan-restore", "{root}"):
            failures += _forecasts(tree, places, answer)
        if self._medium.listing(self._other) != other:
            failures.append(Failure(kind="bytes lost", text="the root that was only read was changed"))
            self._other = ""
        if after == before:
            self._placed[root] = place
        else:
            self._medium.remove(place)
        self._medium.remove(out)
        return failures

    def _without_command(self, tree: Tree, action: Action) -> Answer:
        """The answer of an action that is a command and then a restart, if the command is left out."""
        place, out = self._medium.place(tree.home), self._new_out()
        answer = _performed(replace(action, arguments=()), _places(tree, place, out, self._other), self._main)
        self._medium.remove(place)
        self._medium.remove(out)
        return answer

    def _new_out(self) -> str:
        self._count += 1
        empty = self._home / "empty" / f"out-{self._count}"
        empty.mkdir(parents=True)
        return self._medium.place(empty)


def _places(tree: Tree, place: str, out: str, other: str) -> Places:
    subject = next((fact for fact in tree.facts if fact.path == tree.subject), None)
    run = [fact for fact in tree.facts if fact.of_run]
    good = [fact.step for fact in run if fact.state == "good"]
    return Places(
        root=f"{place}/{ROOT}",
        subject=f"{place}/{tree.subject}",
        number=1 if subject is None else subject.step,
        first=min(good, default=1),
        out=out,
        other=other,
        kind=run[-1].kind if run else "ckptkit composite",
    )


_FORECAST: Final = re.compile(r": step (\d+), save ")


def _forecasts(tree: Tree, places: Places, answer: Answer) -> Iterator[Failure]:
    """`plan-restore` and `ckptkit.latest_step` name the step that a manager then takes. They read no array, and do not
    know whether stock Orbax's own files suffice."""
    run = [fact for fact in tree.facts if fact.of_run]
    if any(fact.state not in ("good", "unproven") and not (fact.ours and fact.state == "blemished") for fact in run):
        return
    named: dict[str, int | None] = {}
    try:
        with quiet(), KINDS[places.kind].open(places.root, "ckptkit", read_only=True) as manager:
            manager.restore(None)
            taken = manager.latest_step()
        named["ckptkit.latest_step"] = ckptkit.latest_step(places.root)
    except Exception:  # noqa: BLE001  which errors a manager may raise is judged elsewhere
        return
    said = _FORECAST.search(answer.out)
    named["plan-restore"] = None if said is None else int(said[1])
    for which, step in named.items():
        if step != taken:
            yield Failure(kind="false good", text=f"{which} names step {step}, and a restart takes {taken}")


def _performed(action: Action, places: Places, main: Main) -> Answer:
    out, err = io.StringIO(), io.StringIO()
    code, value, raised = 0, None, None
    with redirect_stdout(out), redirect_stderr(err), quiet():
        if action.arguments:
            code = main([places.filled(argument) for argument in action.arguments])
        if action.call is not None:
            try:
                value = action.call(places)
            except Exception as error:  # noqa: BLE001  which errors a manager may raise is judged elsewhere
                raised = error
    if raised is None:
        return Answer(code=code, out=out.getvalue(), err=err.getvalue(), value=value)
    text = f"{err.getvalue()}{type(raised).__name__}: {raised}"
    return Answer(code=code or 1, out=out.getvalue(), err=text, raised=type(raised).__name__)
