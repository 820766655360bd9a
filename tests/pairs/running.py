"""Runs one interleaving of two commands over a fresh copy of a root, and judges what is left."""

from __future__ import annotations

import io
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from typing_extensions import override

from ckptkit.durable.lifecycle import leases
from ckptkit.errors import CheckpointError
from ckptkit.testing.damage import inflict
from tests.pairs.commands import ADDED, COMMANDS, KIND, MENDABLE, OTHER, SAVED, STEPS, UNPINNED, Command
from tests.pairs.gate import Gate, gated, owner, started
from tests.roots.catalog import KINDS, SavedRuns
from tests.roots.kinds import leaves, quiet
from tests.roots.media import Medium

Main = Callable[[Sequence[str]], int]
_WAITS_S: Final = 15.0  # the second command, for the first one that pauses: longer is hanging
_ENDS_S: Final = 60.0
_NOT_FOUND, _ERROR, _CORRUPT = 10, 1, 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaving:
    """The first command pauses before its `at`-th operation, and meanwhile the second one runs whole.

    `apart`: each command takes the other for one of another machine, and the first one pauses longer than its claims
    live.
    """

    medium: str
    first: str
    second: str
    at: int | None
    apart: bool = False

    def __str__(self) -> str:
        apart = " --apart" if self.apart else ""
        return f"python -m tests.pairs --medium {self.medium} --pair {self.first},{self.second} --at {self.at}{apart}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A broken promise: `harmed` or `false damage`, and the text about it."""

    kind: str
    text: str


@dataclass(slots=True)
class Answer:
    """How a command ended."""

    code: int | None = None
    out: str = ""
    raised: str = ""
    waited: bool = False  # for the other one
    ended_s: float = 0.0


@dataclass(slots=True)
class Result:
    """The answers, the operation before which the first command paused (empty: it ended before), the failures."""

    answers: dict[str, Answer]
    paused_at: str
    failures: list[Failure] = field(default_factory=list)


@final
class _Router(io.StringIO):
    """Text of each command by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}

    @override
    def write(self, text: str, /) -> int:
        super().write(text)  # which refuses bytes, by which click tells a stream of text
        self.texts.setdefault(owner(), []).append(text)
        return len(text)

    def text(self, name: str) -> str:
        """The text of a command."""
        return "".join(self.texts.get(name, ()))


@final
class Pairs:
    """Runs interleavings on one medium, with files below `home`. `main` is the command of ckptkit."""

    def __init__(self, home: Path, medium: Medium, main: Main):
        self._home, self._medium, self._main = home, medium, main
        saved = SavedRuns(home / "saved")
        self._more = home / "more"
        with quiet():
            KINDS[KIND].save(self._more, (*STEPS, ADDED))
        self._other = medium.place(saved.root("restarted"))
        self._more_at = medium.place(self._more)
        self._trees: dict[frozenset[str], Path] = {}

    def run(self, which: Interleaving) -> Result:
        """Runs and judges one."""
        first, second = COMMANDS[which.first], COMMANDS[which.second]
        home = self._medium.place(self._tree({which.first, which.second}))
        before = self._medium.listing(home)
        answers = {"A": Answer(), "B": Answer()}
        gate = Gate("A", self._below(home), which.at)
        with _caught() as (out, err), quiet(), gated(gate), _lifetimes(apart=which.apart):
            a = self._begin("A", first, home, answers["A"])
            while a.is_alive() and not gate.paused.wait(0.002):
                pass
            if gate.paused.is_set():
                if which.apart:
                    time.sleep(3 * _APART_S)
                b = self._begin("B", second, home, answers["B"])
                b.join(_WAITS_S)
                answers["B"].waited = b.is_alive()
                gate.open()
                b.join(_ENDS_S)
            gate.open()
            a.join(_ENDS_S)
        for name, each in answers.items():
            each.out = out.text(name) + err.text(name) + each.raised
        found = Result(answers=answers, paused_at=gate.paused_at)
        if gate.paused.is_set():
            after = self._medium.listing(home)
            found.failures = list(_Judge(which, home, before, after, answers, gate.paused_at).failures())
        self._medium.remove(home)
        return found

    def trace(self, name: str, beside: str) -> list[tuple[str, bool]]:
        """The operations of a command alone, over the root of such a pair."""
        home = self._medium.place(self._tree({name, beside}))
        gate = Gate("A", self._below(home), None)
        with _caught(), quiet(), gated(gate), _lifetimes(apart=False):
            self._begin("A", COMMANDS[name], home, Answer()).join(_ENDS_S)
        self._medium.remove(home)
        return gate.trace

    def _below(self, home: str) -> str:
        return f"{home.removeprefix('gs://')}/run/" if self._medium.name == "bucket" else f"{home}/run"

    def _begin(self, name: str, command: Command, home: str, answer: Answer) -> Any:
        root, out = f"{home}/run", f"{home}/out-{name}"
        arguments = [
            each.format(root=root, out=out, more=self._more_at, other=self._other) for each in command.line.split()
        ]

        def work() -> None:
            try:
                if command.call is None:
                    code = self._main(arguments)
                else:
                    command.call(root)
                    code = 0
            except CheckpointError as error:
                code, answer.raised = _ERROR, f"{type(error).__name__}: {error}"
            except BaseException:  # noqa: BLE001  judged
                code, answer.raised = _ERROR, f"internal error: {traceback.format_exc()}"
            answer.ended_s = time.monotonic()
            answer.code = code

        return started(name, work)

    def _tree(self, names: set[str]) -> Path:
        kinds = frozenset(names & {"scrub", "unpin"})
        if kinds not in self._trees:
            home = self._home / "trees" / ("-".join(sorted(kinds)) or "plain")
            shutil.copytree(self._more, home / "run", ignore=shutil.ignore_patterns(str(ADDED)))
            if "scrub" in kinds:
                inflict("truncation", [home / "run" / str(MENDABLE) / "state/_METADATA"], [], 1)
            if "unpin" in kinds:
                from ckptkit.store import open_store
                from ckptkit.upkeep.pinning import put_pin

                put_pin(open_store(str(home / "run")), UNPINNED, "of the tree")
            self._trees[kinds] = home
        return self._trees[kinds]


_APART_S: Final = 0.3


@contextmanager
def _lifetimes(*, apart: bool) -> Iterator[None]:
    """Looks and settling in a hundredth of the time. `apart`: nobody sees the processes of the other, and claims live
    for 0.3 s."""
    from ckptkit.verification import durable

    kept = leases._WATCH_S, leases._LEASE_S, durable._SETTLE_S, leases._has_ended
    leases._WATCH_S = durable._SETTLE_S = 0.01
    if apart:
        leases._LEASE_S = _APART_S
        leases._has_ended = lambda process: None
    try:
        yield
    finally:
        leases._WATCH_S, leases._LEASE_S, durable._SETTLE_S, leases._has_ended = kept


@contextmanager
def _caught() -> Iterator[tuple[_Router, _Router]]:
    out, err, kept = _Router(), _Router(), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = out, err
    try:
        yield out, err
    finally:
        sys.stdout, sys.stderr = kept


@final
class _Judge:
    """The rules."""

    def __init__(
        self, which: Interleaving, home: str, before: Any, after: Any, answers: dict[str, Answer], paused_at: str
    ):
        self._which, self._home, self._before, self._after, self._answers = which, home, before, after, answers
        self._paused_at = paused_at
        self._commands = {"A": COMMANDS[which.first], "B": COMMANDS[which.second]}
        self._names = {which.first, which.second}
        self._deletable = frozenset().union(*(each.deletes for each in self._commands.values()))
        if "rollback" in self._names and self._deletable:  # which delete what a rollback has abandoned
            self._deletable |= set(STEPS) - {1}
        if "prune" in self._names and self._names & {"copy-in", "copy-newest", "job"}:  # which add a newer step
            self._deletable |= set(STEPS)

    def failures(self) -> Iterator[Failure]:
        """All of them."""
        for name, answer in self._answers.items():
            yield from self._ended(name, answer)
        yield from self._steps()
        for name, answer in self._answers.items():
            if answer.code == 0:
                yield from self._promised(name)
        if any(each.moves for each in self._commands.values()):
            yield from self._restart()
        yield from self._left()

    def _harmed(self, text: str) -> Failure:
        said = [f"{name}: {each.code} {self._short(each.out)}" for name, each in self._answers.items()]
        text = "\n    ".join([f"{text}; A paused before {self._paused_at}", *said])
        return Failure(kind="harmed", text=text)

    def _short(self, text: str) -> str:
        return " ".join(text.replace(self._home, "").split())[-900:]

    def _ended(self, name: str, answer: Answer) -> Iterator[Failure]:
        command = self._commands[name]
        if answer.code is None:
            yield self._harmed(f"{command.name} did not end")
        elif "internal error" in answer.out or "Traceback" in answer.out:
            yield self._harmed(f"{command.name}: internal error")
        elif "scrub" not in self._names and (answer.code == _CORRUPT or _DAMAGE.search(answer.out.lower())):
            yield Failure(kind="false damage", text=self._harmed(f"{command.name} calls it damaged").text)
        elif answer.code not in (0, _ERROR, _NOT_FOUND, *((_CORRUPT,) if "scrub" in self._names else ())):
            yield self._harmed(f"{command.name} ended with {answer.code}")
        elif answer.code and not answer.out.strip():
            yield self._harmed(f"{command.name} refused without a sentence")

    def _is_there(self, path: str) -> bool:
        return f"{path}/_CHECKPOINT_METADATA" in self._after

    def _restores(self, path: str, step: int, value: int | None = None) -> bool:
        kind = KINDS[KIND]
        try:
            with quiet():
                return leaves(kind.read(f"{self._home}/{path}", step)) == leaves(kind.value(value or step))
        except Exception:  # noqa: BLE001  whatever stock Orbax raises
            return False

    def _unchanged(self, path: str) -> bool:
        return _below(self._before, path) == _below(self._after, path)

    def _whole(self, path: str, step: int) -> bool:
        return (path in ("run/1", "run/3", "run/4") and self._unchanged(path)) or self._restores(path, step)

    def _steps(self) -> Iterator[Failure]:
        for step in STEPS:
            path = f"run/{step}"
            if self._unchanged(path):
                continue
            damaged = step == MENDABLE and "scrub" in self._names
            if self._is_there(path):
                if not damaged and not self._restores(path, step):
                    yield self._harmed(f"step {step} was changed")
            elif step not in self._deletable:
                yield self._harmed(f"step {step} was lost")

    def _promised(self, name: str) -> Iterator[Failure]:
        command, out = self._commands[name], f"out-{name}"
        others = self._commands["B" if name == "A" else "A"]
        match command.makes:
            case "step 1" if "job" not in self._names:
                if not self._whole("run/1", 1):
                    yield self._harmed("rolled back to a step that is not there")
            case "pin":
                if not self._whole("run/1", 1):
                    yield self._harmed("a step was pinned and is not there")
            case "copies":
                copied = {path.split("/")[1] for path in self._after if path.startswith(f"{out}/")} & set("1234")
                for step in map(int, sorted(copied)):
                    if not (step == MENDABLE and "scrub" in self._names) and not self._restores(f"{out}/{step}", step):
                        yield self._harmed(f"the copy of step {step} is not whole")
                for step in set(STEPS) - {int(each) for each in copied} - self._deletable:
                    if "rollback" not in self._names and not (step == MENDABLE and "scrub" in self._names):
                        yield self._harmed(f"step {step} was not copied")
            case "values":
                yield from self._values(command, f"{self._home}/{out}/dst")
            case "added" | "other" if not others.deletes:
                step = ADDED if command.makes == "added" else OTHER
                if not self._restores(f"run/{step}", step):
                    yield self._harmed(f"step {step} was copied and is not there")
            case "saved":
                for step in SAVED[-1:]:
                    if not self._restores(f"run/{step}", step) and others.name != "job":
                        yield self._harmed(f"step {step} was saved and is not there")
            case _:
                pass

    def _values(self, command: Command, url: str) -> Iterator[Failure]:
        if command.name == "reshard":
            if not self._restores(url.removeprefix(f"{self._home}/"), 1):
                yield self._harmed("what was resharded is not whole")
        elif not url.startswith("gs://"):
            try:
                with np.load(f"{url}.npz" if not Path(url).is_file() else url) as found:
                    whole = any(np.array_equal(found[key], _want()) for key in found.files)
            except Exception:  # noqa: BLE001  not whole
                whole = False
            if not whole:
                yield self._harmed("what was converted is not whole")

    def _restart(self) -> Iterator[Failure]:
        kind = KINDS[KIND]
        try:
            with quiet(), kind.open(f"{self._home}/run", "ckptkit", read_only=True) as manager:
                step = manager.latest_step()
                found = leaves(dict(manager.restore(None).items()))
        except Exception as error:  # noqa: BLE001  whatever it raises
            yield self._harmed(f"nothing can be restored: {type(error).__name__}: {error}")
            return
        if not any(found == leaves(kind.value(each)) for each in (*STEPS, ADDED, OTHER, *SAVED)):
            yield self._harmed(f"a restart takes step {step} and gets other values")

    def _left(self) -> Iterator[Failure]:
        names = [path for path in self._after if path.startswith("run/_ckptkit/") and path not in self._before]
        # A job that was fenced off leaves its files, and with them the intent that names their writer: the next run
        # removes both.
        is_fenced = any(_FENCED.search(each.out) for each in self._answers.values())
        signs = ("/leases/", *(() if is_fenced else ("/intents/",)), "doomed.json", "/repair-", "/leaving/")
        left = [
            path
            for path in names
            if any(sign in path for sign in signs) and "/pin-" not in path and self._after[path] != "directory"
        ]
        left += [path for path in self._after if "ckptkit-part" in path or path.endswith(".lock")]
        if left:
            yield self._harmed(f"left behind: {left[:3]}")


_FENCED: Final = re.compile(r"SaveFailedError: .*: this run has epoch \d+, and a later run has begun epoch \d+ there")
_DAMAGE: Final = re.compile("(?<!0 )corrupt|(?<!0 )(?<!if it is )damaged|has lost|truncated")


def _want() -> Any:
    return np.asarray(KINDS[KIND].value(1)["state"]["params"]["w"])


def _below(listing: Any, path: str) -> dict[str, str]:
    return {key: found for key, found in listing.items() if key.startswith(f"{path}/")}
