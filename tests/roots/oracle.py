"""The rules for the state of a root after a command. They use plain listings and stock Orbax, never ckptkit."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import click
import numpy as np
import orbax.checkpoint as ocp

from ckptkit import errors
from ckptkit.cli.command import commands
from tests.roots.catalog import KINDS
from tests.roots.commands import KEPT, Action
from tests.roots.kinds import leaves, quiet
from tests.roots.media import Listing
from tests.roots.tree import OTHER, ROOT, StepFact, Tree

FailureKind = Literal["bytes lost", "false corrupt", "false good", "internal error"]
CORRUPT: Final = 11  # the exit code of the command for damage
NOT_READ: Final = 13  # and for an item that only its own handler reads: the rest was read
USAGE: Final = 2  # for words that no command takes
# Commands that show or write leaves by their names need the files that name them, though a restart does not.
_NEED_METADATA: Final = [("inspect",), ("convert",), ("extract",), ("merge",), ("diff",), ("reshard",), ("explain",)]

_COMMAND: Final = re.compile(r"`(ckptkit [^`]+)`")  # as an error advises it
_PLACEHOLDERS: Final = {"STEP", "NEW_ROOT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that must not be, and what was found."""

    kind: FailureKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of an action: exit code (of a manager 0 or 1), what it printed, what a manager restored or raised."""

    code: int
    out: str = ""
    err: str = ""
    value: Any = None
    raised: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An action's answer, and listings: of the tree, which is at `place`, before and after, and of what was written to
    `out`. `in_place`: on this medium a target is written in place, and its mark last."""

    answer: Answer
    before: Listing
    after: Listing
    written: Listing
    place: str
    out: str = ""
    in_place: bool = False


def judge(tree: Tree, action: Action, outcome: Outcome) -> list[Failure]:
    """Everything that must not be. Cost: nothing much, and a restore by stock Orbax of each step that was changed."""
    tree = _with_added(tree, action, outcome)
    rules = (
        _internal_errors,
        _changes,
        _lost,
        _false_corrupt,
        _false_good,
        _wrong_values,
        _wrong_copy,
        _saved,
        _wrong_advice,
        _untold,
    )
    return [failure for rule in rules for failure in rule(tree, action, outcome)]


def _with_added(tree: Tree, action: Action, outcome: Outcome) -> Tree:
    """The tree with the step that `reshard` was asked to add by name. A job that has begun there forbids that."""
    path = f"{ROOT}/50"
    began = any(each.startswith(f"{ROOT}/_ckptkit/epochs") for each in outcome.before)
    if began or "{root}/50" not in action.arguments or f"{path}/_CHECKPOINT_METADATA" not in outcome.after:
        return tree
    added = copy.copy(tree)
    added.facts = [*tree.facts, StepFact(path=path, kind="ckptkit composite", step=50)]
    return added


_PLAIN: Final = ("", "ValueError", "FileNotFoundError", "Exception")  # what Orbax raises of a damaged checkpoint


def _internal_errors(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A command ends with a sentence; a manager raises what a caller may expect, or what stock Orbax raises there."""
    for sign in ("internal error", "Traceback (most recent call last)"):
        if sign in outcome.answer.err:
            yield Failure(kind="internal error", text=_end_of(outcome.answer.err))
    raised = outcome.answer.raised
    plain = raised in _PLAIN or issubclass(getattr(errors, raised, Exception), errors.CheckpointError)
    if not plain and raised != _stock_raises(tree, outcome.place):
        yield Failure(kind="internal error", text=_end_of(outcome.answer.err))


def _stock_raises(tree: Tree, place: str) -> str:
    """The error of a manager of stock Orbax that restores from the root; empty where it restores."""
    kind = (
        KINDS[max(tree.facts, key=lambda fact: (fact.of_run, fact.step)).kind] if tree.facts else KINDS["orbax single"]
    )
    try:
        with quiet(), kind.open(f"{place}/{ROOT}", "orbax", read_only=True) as manager:
            manager.restore(None)
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        return type(error).__name__
    return ""


def _changes(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A command that only looks, or only plans, changes not one byte and makes no file."""
    del tree
    if action.changes:
        return
    changed = _different(outcome.before, outcome.after)
    made = sorted(set(outcome.after) - set(outcome.before)) + sorted(outcome.written)
    if changed or made:
        yield Failure(kind="bytes lost", text=f"it was to change nothing: changed {changed[:3]}, made {made[:3]}")


def _lost(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A file that ckptkit did not write stays as it is; a step that may not go is restored by stock Orbax as before."""
    touched: dict[str, list[str]] = {}
    for path in _different(outcome.before, outcome.after):
        fact = _step_of(tree, path)
        if fact is None and not _of_records(path):
            yield Failure(kind="bytes lost", text=f"{path} of a user was {_how(path, outcome)}")
        elif fact is not None:
            touched.setdefault(fact.path, []).append(path)
    for fact in tree.facts:
        if fact.path not in touched or may_go(tree, fact, action):
            continue
        first = f"{touched[fact.path][0]} was {_how(touched[fact.path][0], outcome)}"
        if not fact.ours:
            yield Failure(kind="bytes lost", text=f"step {fact.path} of stock Orbax: {first}")
        elif fact.whole and not restores(fact, f"{outcome.place}/{fact.path}"):
            yield Failure(kind="bytes lost", text=f"stock Orbax does not restore {fact.path} any more: {first}")
        elif not fact.whole and not any(path.startswith(f"{fact.path}/") for path in outcome.after):
            yield Failure(kind="bytes lost", text=f"{fact.path} was deleted, and nobody asked for that: {first}")


def may_go(tree: Tree, fact: StepFact, action: Action) -> bool:
    """Whether the user asked for the deletion, or putting aside, of a step, and nothing protects it.

    A policy may delete steps of the run that are older than its newest good one, and those of abandoned branches. A
    repair may put aside what is ckptkit's and damaged. A save may clear what its own run left unfinished or abandoned,
    and a manager keeps as many steps as it is told.
    """
    if fact.held or not fact.of_run:
        return False
    unfinished = fact.state == "unfinished"
    if action.saves and (fact.abandoned or (unfinished and (fact.ours or action.deletes == "save keep 1"))):
        return True
    if action.name.endswith("restart") and (
        sum(_is_newer(each, fact) for each in tree.facts) >= KEPT - 1  # so many are kept
        or fact.bad  # the restart goes back to an older step, and its save abandons this one
        or fact.state in ("blemished", "forged")
    ):
        return True
    match action.deletes:
        case "repair":
            return fact.ours and (fact.bad or fact.state == "forged")
        case "prune":
            unread = "--unread" in action.arguments  # the user asked that nothing is read to find the newest good one
            passing = (each for each in tree.facts if _is_newer(each, fact) and (_passes(each) or unread))
            return not unfinished and (fact.abandoned or any(passing))
        case "rollback" | "save keep 1":
            return not unfinished
        case _:
            return False


def _is_newer(fact: StepFact, than: StepFact) -> bool:
    return fact.of_run and fact.age > than.age


def _passes(fact: StepFact) -> bool:
    """Whether nothing of it can be found to be wrong."""
    return fact.state in ("good", "blemished", "undetectable", "forged") and not fact.abandoned


def _good_of_run(fact: StepFact) -> bool:
    return fact.of_run and fact.state == "good" and not fact.abandoned


def restores(fact: StepFact, url: str) -> bool:
    """Whether stock Orbax restores a step directory bit for bit as it was saved."""
    kind = KINDS[fact.kind]
    try:
        with quiet():
            return leaves(kind.read(url, fact.step)) == leaves(kind.value(fact.step))
    except Exception:  # noqa: BLE001  whatever stock Orbax raises: it does not restore it
        return False


def _false_corrupt(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A step that stock Orbax restores is not called damaged."""
    excused = tree.records_damaged or any(_may_be_corrupt(fact) for fact in tree.facts)
    excused |= action.arguments[:1] in _NEED_METADATA and any(fact.state == "blemished" for fact in tree.facts)
    if outcome.answer.code == CORRUPT and not excused:
        yield Failure(kind="false corrupt", text=_end_of(outcome.answer.err))
    if not action.name.startswith("verify") or not outcome.answer.out:
        return
    for step in json.loads(outcome.answer.out)["steps"]:
        fact = _step_at(tree, step["path"])
        if step["state"] == "corrupt" and fact is not None and not _may_be_corrupt(fact):
            why = step["reason"] or [each["problem"] for each in step["findings"]][:2]
            yield Failure(kind="false corrupt", text=f"{fact.path} ({fact.kind}, {fact.state}): {why}")


def _may_be_corrupt(fact: StepFact) -> bool:
    return (
        fact.bad or fact.state in ("undetectable", "unfinished", "forged") or (fact.ours and fact.state == "blemished")
    )


def _false_good(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A damaged step is not called good, and nothing is written from it."""
    subject = next((fact for fact in tree.facts if fact.path == tree.subject), None)
    if action.reads in ("step", "arrays"):
        needed = subject is not None and (subject.in_arrays or action.reads == "step")
        bad = [subject] if subject is not None and subject.bad and needed else []
    else:
        bad = [fact for fact in tree.facts if fact.bad and fact.of_run] if action.reads == "root" else []
    if action.deletes == "repair":
        bad = [fact for fact in bad if not _mended(fact, outcome)]
    if bad and outcome.answer.code == 0:
        paths = ", ".join(f"{fact.path} ({fact.state})" for fact in bad)
        yield Failure(kind="false good", text=f"exit code 0, and damaged: {paths}")
    made = {path for path in outcome.written if path.split("/")[0] == "dst"}
    finished = made & {"dst", "dst/commit_success.txt"} if outcome.in_place else made
    of_records = tree.records_damaged and subject is not None and subject.whole
    beside = subject is not None and (subject.state == "blemished" or not subject.in_arrays)
    if outcome.answer.code == CORRUPT and (beside or of_records):  # damage that is told, and is in no tensor
        finished = set()
    if action.fills and outcome.answer.code not in (0, NOT_READ) and finished:
        text = f"exit code {outcome.answer.code}, and there is a target: {_end_of(outcome.answer.err)}"
        yield Failure(kind="false good", text=text)


def _mended(fact: StepFact, outcome: Outcome) -> bool:
    """Whether a repair has changed a step, and stock Orbax restores it."""
    changed = any(
        path.startswith(f"{fact.path}/") and outcome.before.get(path) != found for path, found in outcome.after.items()
    )
    return changed and restores(fact, f"{outcome.place}/{fact.path}")


def _wrong_values(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A restart gives the values of the newest good step of the run; never those of another, of a part, or of none."""
    if not action.restores or any(fact.state == "undetectable" for fact in tree.facts):
        return
    newest = max(filter(_good_of_run, tree.facts), key=lambda fact: fact.age, default=None)
    if outcome.answer.raised:
        # A record that is forged and fits its digest gives a handler of the user's files by other names.
        forged = any(fact.state == "forged" and fact.kind == "ckptkit custom handler" for fact in tree.facts)
        excused = tree.records_damaged or (forged and outcome.answer.raised == "FileNotFoundError")
        if newest is not None and not excused and _has_to_restore(tree, newest, outcome):
            yield Failure(
                kind="false corrupt", text=f"restore(None) with {newest.path} there: {_end_of(outcome.answer.err)}"
            )
        return
    found = _comparable(outcome.answer.value)
    known = tree.facts if any(fact.of_run for fact in tree.facts) else [*tree.facts, OTHER]  # a root's first step
    taken = [fact for fact in known if found == _comparable(KINDS[fact.kind].value(fact.step))]
    if not taken:
        yield Failure(kind="false good", text="restore(None) gave the values of no step")
    elif newest is not None and not any(_is_next(fact, newest) for fact in taken):
        yield Failure(kind="false good", text=f"restore(None) gave {taken[0].path}, not {newest.path}")


def _wrong_copy(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """Arrays that a conversion wrote are those of the step, bit for bit; read by NumPy."""
    subject = next((fact for fact in tree.facts if fact.path == tree.subject and fact.whole), None)
    if outcome.answer.code not in (0, NOT_READ) or subject is None or "dst" not in outcome.written:
        return
    if not {"npz", "{step}"} <= set(action.arguments) or outcome.out.startswith("gs://"):  # the same writer, uploaded
        return
    expected = {leaf[-1] for leaf in leaves(KINDS[subject.kind].value(subject.step)).values()}
    with np.load(f"{outcome.out}/dst") as found:
        wrong = [name for name in found.files if found[name].tobytes() not in expected]
    if wrong:
        yield Failure(kind="false good", text=f"exit code 0, and the target has other values: {wrong}")


def _has_to_restore(tree: Tree, newest: StepFact, outcome: Outcome) -> bool:
    """Whether a restart is owed a step: ckptkit's own, or one that stock Orbax's manager restores from there."""
    if newest.ours and all(fact.ours for fact in tree.facts if fact.of_run):
        return True
    return not _stock_raises(tree, outcome.place)


def _is_next(fact: StepFact, newest: StepFact) -> bool:
    linked = not fact.path.startswith(f"{ROOT}/")  # a step that was moved away, with a link in its place
    return (fact.of_run or linked) and not fact.abandoned and fact.age >= newest.age


def _comparable(value: Any) -> set[Any]:
    items = dict(value.items()) if isinstance(value, ocp.args.Composite) else value
    return set(leaves(items).values())


def _saved(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A save that reported nothing is restored by stock Orbax."""
    del tree
    if not action.saves or outcome.answer.code:
        return
    made = [path for path, found in outcome.after.items() if outcome.before.get(path) != found]
    if not any(path.endswith("/_CHECKPOINT_METADATA") and "_ckptkit" not in path for path in made):
        yield Failure(kind="bytes lost", text="a save reported nothing and made no new step")


def blocked(tree: Tree, outcome: Outcome, alone: Answer) -> Iterator[Failure]:
    """A restart that saves without a command, `alone`, saves after it too; but a user may add a step with other items,
    which stock Orbax's manager does not restore either."""
    raised = outcome.answer.raised
    if raised and not alone.raised and raised != _stock_raises(tree, outcome.place):
        yield Failure(kind="bytes lost", text=f"only after the command, the job fails: {_end_of(outcome.answer.err)}")


def _wrong_advice(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """An error denies damage only where there is none, and sends nobody to repair what is whole."""
    del action
    said = outcome.answer.err
    damaged = [fact.path for fact in tree.facts if fact.bad and fact.of_run]
    if "Nothing is damaged" in said and damaged:
        yield Failure(kind="false good", text=f"damaged: {', '.join(damaged)}: {_end_of(said)}")
    whole = not tree.records_damaged and all(fact.state == "good" for fact in tree.facts)
    for line in _COMMAND.findall(said):
        words = shlex.split(line)
        if whole and words[1] == "scrub" and "--repair" in words:
            yield Failure(kind="false corrupt", text=f"every step is whole: {_end_of(said)}")
        if outcome.place in line and (why := _why_not_a_command(words, outcome.place)):
            yield Failure(kind="internal error", text=f"{line}: {why}")


# Commands that look into every step of a root: a step without intact checksums is seen, whatever else is asked.
_LOOK_INTO_STEPS: Final = ("inspect", "steps", "plan-restore", "verify", "scrub", "du", "doctor", "prune", "rollback")


def _untold(tree: Tree, action: Action, outcome: Outcome) -> Iterator[Failure]:
    """A command that looks into the steps of a root names each one of ckptkit's whose checksums are damaged, or ends
    by the damage of one."""
    looks = action.arguments[:1] and action.arguments[0] in (*_LOOK_INTO_STEPS, "convert", "copy")
    if action.call is not None or not looks or action.arguments[1] != "{root}" or tree.records_damaged:
        return
    if outcome.answer.code == USAGE and outcome.place.startswith("gs://") and "--tier" in action.arguments:
        return  # no fast tier lies in a bucket: the command looked at nothing
    said = f"{outcome.answer.out}{outcome.answer.err}"
    unproven = [fact.path for fact in tree.facts if fact.state == "unproven" and fact.ours and fact.of_run]
    untold = [path for path in unproven if path not in said]
    if untold and not ("ckptkit: corrupt: " in said and len(untold) < len(unproven)):
        yield Failure(kind="false good", text=f"nothing is told of {', '.join(untold)}: {_end_of(said)}")


def _why_not_a_command(words: Sequence[str], place: str) -> str:
    """Why a shell would not run a command on what it means; empty where it would."""
    if not any(word.startswith(place) for word in words):
        return "it is not quoted"
    if _PLACEHOLDERS & set(words):
        return ""
    context = click.Context(commands)
    try:
        name, command, rest = commands.resolve_command(context, list(words[1:]))
        while isinstance(command, click.Group):
            name, command, rest = command.resolve_command(context, rest)
        assert command is not None, words
        command.make_context(name, rest, parent=context)
    except click.UsageError as error:
        return error.format_message()
    return ""


def _different(before: Listing, after: Listing) -> list[str]:
    return sorted(path for path, found in before.items() if after.get(path) != found)


def _how(path: str, outcome: Outcome) -> str:
    return "changed" if path in outcome.after else "removed"


def _step_of(tree: Tree, path: str) -> StepFact | None:
    return next((fact for fact in tree.facts if path == fact.path or path.startswith(f"{fact.path}/")), None)


def _step_at(tree: Tree, url: str) -> StepFact | None:
    return next((fact for fact in tree.facts if url.endswith(f"/{fact.path}")), None)


def _of_records(path: str) -> bool:
    """Whether ckptkit keeps such a file for itself: records of a root, journals of a conversion."""
    parts: Sequence[str] = path.split("/")
    return "_ckptkit" in parts or any(part.endswith(".ckptkit-part") for part in parts)


def _end_of(text: str) -> str:
    return text.strip()[-600:]
