"""The rules for the state after a command was killed at a point: it can be finished, and it harms no reader."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final
from unittest.mock import patch

from ckptkit.durable.lifecycle import leases
from tests.killed.commands import KIND, Command
from tests.killed.media import Medium
from tests.killed.running import Answer, Main, run
from tests.roots.catalog import KINDS, STEPS
from tests.roots.kinds import leaves, quiet
from tests.roots.media import Listing
from tests.roots.tree import ROOT

CORRUPT: Final = 11
NOT_FOUND: Final = 10
_FASTER: Final = 200  # the lifetime of a claim whose holder is on another machine, a minute, in 0.3 s
_RANDOM: Final = re.compile(r"[0-9a-f]{8,}")
# Left on purpose, as docs/FAULTS.md has it: what no reader takes for an object; a lease, which jobs and `prune` drop
# once its reader is dead; and a repair, whose process may be on another machine and alive, for a day.
_STAYS: Final = re.compile(r"(.*/)?_ckptkit/((.*/)?\.put-#|leases/#\.json|repair-#-.*)|run/[0-9]+/\.put-#")
_ASIDE: Final = re.compile(r"(_quarantine/[0-9]+)\.[0-9]+")  # of a repair that was begun again
_CLAIMS: Final = re.compile(r"(.*/)?_ckptkit/leases/(?!pin-).*")
_OTHER_STEPS: Final = range(46, 51)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that must not be. `unfinished`: the command cannot be completed. `harmed`: another command is wrong."""

    kind: Literal["unfinished", "harmed"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The files that a command has made by their names (random parts of names aside), the steps of the roots by their
    states, and how the checkpoint that it made differs from its source."""

    names: frozenset[str]
    steps: Mapping[str, Mapping[int, str]]
    made: str

    def differences(self, expected: Result) -> list[str]:
        """The differences from the expected result."""
        left, lost = sorted(self.names - expected.names), sorted(expected.names - self.names)
        found = [f"left over: {', '.join(left)}"] if left else []
        found += [f"not there: {', '.join(lost)}"] if lost else []
        found += [f"steps {self.steps}, not {expected.steps}"] if self.steps != expected.steps else []
        return [*found, *([f"made {self.made}, not {expected.made}"] if self.made != expected.made else [])]


@final
class Judge:
    """Judges the points of one command on one medium; equal states once."""

    def __init__(self, medium: Medium, command: Command, main: Main, key: str):
        self._medium, self._command, self._main, self._key = medium, command, main, key
        self._place = medium.place(command)
        self._root, self._new = f"{self._place}/{ROOT}", f"{self._place}/new"
        self.points = medium.points(command)
        self._listed: dict[tuple[str, frozenset[tuple[str, str]]], dict[int, str]] = {}
        medium.remake(command, 0)
        self._before = medium.listing(command)
        medium.remake(command, len(self.points) - 1)
        self._expected = self._result()
        self._again = self._run(*self._words()).code  # which may be refused: it is done
        self._judged: set[frozenset[tuple[str, str]]] = set()
        self._roots: set[tuple[str, frozenset[tuple[str, str]]]] = set()

    def check(self, point: int) -> list[Failure]:
        """The faults of the state after this operation; none where an equal state was judged."""
        self._medium.remake(self._command, point)
        found = self._medium.listing(self._command).items()
        state = frozenset((name, "" if "/.put-" in name else each) for name, each in found)  # which no reader opens
        if state in self._judged:
            return []
        self._judged.add(state)
        unfinished = [Failure(kind="unfinished", text=text) for text in self._unfinished(point)]
        return [*unfinished, *(Failure(kind="harmed", text=text) for text in self._harmed(point))]

    @property
    def states(self) -> int:
        """How many different ones were judged."""
        return len(self._judged)

    def _unfinished(self, point: int) -> Iterator[str]:
        for resume in (True, False) if self._command.resumes else (False,):
            self._medium.remake(self._command, point)
            claimed = any(_CLAIMS.fullmatch(name) for name in self._medium.listing(self._command))
            yield from self._finish(resume)
            if claimed and not resume:
                self._medium.remake(self._command, point)
                with _on_another_machine():
                    yield from (f"from another machine: {each}" for each in self._finish(resume, alone=False))

    def _finish(self, resume: bool, *, alone: bool = True) -> Iterator[str]:
        words = self._words(resume)
        answer = self._run(*words)
        found = self._result()
        if not alone:  # a record of a dead holder stays until it was watched for its lifetime
            names = frozenset(each for each in found.names if not _CLAIMS.fullmatch(each))
            found = replace(found, names=names | (self._expected.names & found.names))
        wrong = found.differences(self._expected)
        if answer.code not in (0, self._command.code) and (wrong or answer.code != self._again):
            yield f"`{' '.join(words)}`: {answer}"
        yield from (f"after `{' '.join(words)}`: {each}" for each in wrong)

    def _harmed(self, point: int) -> Iterator[str]:
        self._medium.remake(self._command, point)
        at_first = self._medium.listing(self._command)
        yield from self._changed(self._before, at_first, self._command.deletes)
        for root in (self._root, self._new) if self._command.fills else (self._root,):
            below = root.rpartition("/")[2] + "/"
            found = (root, frozenset(each for each in at_first.items() if each[0].startswith(below)))
            if found not in self._roots:  # most operations of a conversion leave the root as it is
                self._roots.add(found)
                yield from self._root_harmed(point, root, at_first)
        if self._command.makes:
            for words in (("inspect", self._new), ("verify", self._new)):
                answer = self._run(*words)
                # Of some of Hugging Face's files without their index no reader knows whether the others were lost.
                if answer.code not in (0, NOT_FOUND) and "missing, or not there yet" not in answer.err:
                    yield f"`{' '.join(words)}`: {answer}"

    def _root_harmed(self, point: int, root: str, at_first: Listing) -> Iterator[str]:
        allowed = {0} if root == self._root else {0, NOT_FOUND}
        if self._command.damaged is not None:
            allowed |= {CORRUPT}
        steps = self._steps(root, at_first)
        whole = [step for step, state in steps.items() if state == "committed"]
        for step in whole:
            if step != self._command.damaged:
                yield from self._not_restored(root, step)
        looks = [("steps", root), ("verify", root), ("inspect", root), ("plan-restore", root)]
        acts = [("copy", root, f"{self._place}/elsewhere"), ("prune", root, "--keep", "newest=2", "--unread")]
        doomed: frozenset[int] = frozenset()
        changed = False
        for words in (*looks, *acts):
            if changed:
                self._medium.remake(self._command, point)
            doomed = self._prunable(root, steps) if words[0] == "prune" else frozenset()
            answer = self._run(*words)
            if answer.code not in allowed:
                yield f"`{' '.join(words)}`: {answer}"
            after = self._medium.listing(self._command)
            changed = after != at_first
            yield from (f"`{' '.join(words)}`: {each}" for each in self._changed(at_first, after, doomed, root))
        if any(_CLAIMS.fullmatch(name) for name in at_first):
            self._medium.remake(self._command, point)
            with _on_another_machine():
                answer = self._run(*acts[0])
                if answer.code not in allowed:
                    yield f"from another machine: `{' '.join(acts[0])}`: {answer}"
        if whole:
            self._medium.remake(self._command, point)
            yield from self._restart(root, whole)

    def _prunable(self, root: str, steps: Mapping[int, str]) -> frozenset[int]:
        """The steps that `prune --keep newest=2` may delete: it also ends a deletion that was cut off."""
        whole = sorted(step for step, state in steps.items() if state == "committed")
        abandoned = {step for step, state in steps.items() if state == "abandoned"}
        cut_off = self._command.deletes - set(steps) if root == self._root else frozenset[int]()
        unfinished = {step for step in self._command.deletes if steps.get(step) == "unfinished"}
        return frozenset(whole[:-2]) | abandoned | cut_off | unfinished

    def _changed(
        self, before: Listing, after: Listing, deleted: frozenset[int], of_root: str | None = None
    ) -> Iterator[str]:
        """The files of steps that are not what they were; nothing of a step that was to be deleted counts."""
        changed = []
        for name, found in before.items():
            root, _, below = name.partition("/")
            step = below.partition("/")[0]
            if not step.isdecimal() or root == "elsewhere":
                continue
            asked = int(step) in deleted and f"{self._place}/{root}" == (of_root or self._root)
            changed += [name] if not asked and after.get(name) != found else []
        if changed:
            yield f"changed or lost: {', '.join(changed)}"

    def _not_restored(self, root: str, step: int) -> Iterator[str]:
        try:
            with quiet():
                found = KINDS[KIND].read(f"{root}/{step}", step)
        except Exception as error:  # noqa: BLE001  whatever it is, the step is not restored
            yield f"step {step} of {root} is listed and not restored: {type(error).__name__}: {error}"
            return
        if leaves(found) != leaves(self._value(step)):
            yield f"step {step} of {root} has other bits"

    def _restart(self, root: str, whole: Sequence[int]) -> Iterator[str]:
        try:
            with quiet(), KINDS[KIND].open(root, "ckptkit") as manager:
                found = manager.restore(None)
                step = manager.restored_save_id.step
        except Exception as error:  # noqa: BLE001  whatever it is, the run cannot go on
            yield f"restore(None) of {root}: {type(error).__name__}: {error}"
            return
        value = self._value(step)
        if leaves({name: found[name] for name in value}) != leaves(value):
            yield f"restore(None) of {root} gives other bits of step {step}"
        newest = [each for each in whole if each != self._command.damaged]
        if step not in whole or (newest and step < max(newest)):
            yield f"restore(None) of {root} gives step {step} of {whole}"

    def _value(self, step: int) -> Any:
        return KINDS[KIND].value(self._command.renumbered.get(step, step))

    def _words(self, resume: bool = False) -> list[str]:
        local = str(self._medium.local(self._command))
        return self._command.arguments(self._place, self._key, local, resume=resume)

    def _result(self) -> Result:
        listing = self._medium.listing(self._command)
        names = {_ASIDE.sub(r"\1", _RANDOM.sub("#", name)) for name in listing}
        roots = (self._root, self._new) if self._command.fills else (self._root,)
        made = ""
        if self._command.makes:
            answer = self._run("diff", f"{self._root}/{STEPS[-1]}", self._new)
            made = f"{answer.code} {answer.out}"
        return Result(
            names=frozenset(name for name in names if not _STAYS.fullmatch(name)),
            steps={root.rpartition("/")[2]: self._steps(root, listing) for root in roots},
            made=made,
        )

    def _steps(self, root: str, listing: Listing) -> dict[int, str]:
        """The states of the steps of a root; asked once for equal ones."""
        below = root.rpartition("/")[2] + "/"
        content = frozenset(
            each for each in listing.items() if each[0].startswith(below) and not _CLAIMS.fullmatch(each[0])
        )
        if (root, content) not in self._listed:
            answer = self._run("steps", root, "--json")
            found: list[dict[str, Any]] = json.loads(answer.out)["steps"] if answer.out.strip() else []
            self._listed[root, content] = {each["step"]: each["state"] for each in found}
        return self._listed[root, content]

    def _run(self, *words: str) -> Answer:
        return run(self._main, words)


@contextmanager
def _on_another_machine() -> Iterator[None]:
    """The holders of claims are not seen here: a claim is dead once it did not change for its lifetime, which passes
    quickly for those who watch it."""
    state_of: Callable[..., Any] = leases._state_of  # pyright: ignore[reportPrivateUsage]

    def watched(store: Any, key: str, now_s: Callable[[], float], *rest: Any) -> Any:
        return state_of(store, key, lambda: now_s() * _FASTER, *rest)

    with (
        patch.object(leases, "_has_ended", lambda _: None),
        patch.object(leases, "_state_of", watched),
        patch.object(leases, "_WATCH_S", 0.02),
    ):
        yield
