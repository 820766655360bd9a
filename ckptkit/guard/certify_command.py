"""`ckptkit certify`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
import orbax.checkpoint as ocp

from ckptkit.cli.exits import Exit, exit_with
from ckptkit.cli.options import JSON, STEP_PREFIX, TIMEOUT, seconds
from ckptkit.cli.text import count_text, print_json, print_line, printable
from ckptkit.errors import CorruptCheckpointError, StepNotFoundError
from ckptkit.guard import Certificate, Difference, NewSave, ReplayPlan, replay, replay_new
from ckptkit.inspection import list_steps
from ckptkit.manager import CheckpointManager

_FORMAT = "ckptkit.certify/1"
_POLL_S = 2.0  # between looks at the root of a running job


@click.command()
@click.argument("root")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORDS]")
@click.option(
    "--replay",
    "program",
    required=True,
    metavar="MODULE:FUNCTION",
    help="Gets WORDS as a list of text, and returns a `ckptkit.guard.ReplayPlan`.",
)
@click.option(
    "--first", type=click.IntRange(min=0), metavar="STEP", help="The save to begin at [default: the last but one]."
)
@click.option("--last", type=click.IntRange(min=0), metavar="STEP", help="The save to end at [default: the last one].")
@click.option(
    "--watch",
    "steps_max",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Replay to each new save of a running job, at most STEPS steps for one.",
)
@seconds(
    "--idle-timeout",
    "idle_timeout_s",
    least=0.1,
    help="For --watch: end after this time without a new save [default: never].",
)
@STEP_PREFIX
@click.option("--dry-run", is_flag=True, help="Replay, and record no save as certified: the root is not changed.")
@JSON
@TIMEOUT
def certify(
    root: str,
    words: tuple[str, ...],
    program: str,
    first: int | None,
    last: int | None,
    steps_max: int | None,
    idle_timeout_s: float | None,
    step_prefix: str | None,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Replay the steps between saves of ROOT, and compare every save with the state of the replay, bit by bit.

    Saves that the replay comes to are certified in ROOT, unless --dry-run is given: `restore(None, certified=True)`
    takes the newest of them. It runs the training program of FUNCTION, on the devices that JAX finds: as many as the
    run's mesh needs. Exit code 20 if a save differs.

    With --watch it follows a running job from spare devices, until a save differs.
    """
    if steps_max is not None:
        if first is not None or last is not None or step_prefix is not None:
            raise click.UsageError("--watch begins at the newest save: leave out --first, --last and --step-prefix")
        return _watch(root, _plan(program, words), steps_max, idle_timeout_s, recorded=not dry_run, as_json=as_json)
    if idle_timeout_s is not None:
        raise click.UsageError("--idle-timeout belongs to --watch")
    listing = list_steps(root, host_id="", step_prefix=step_prefix, timeout_s=timeout_s)
    saves = [entry.step for entry in listing.steps if entry.state == "committed"]
    if len(saves) < 2:
        why = f"{listing.root} has {count_text(len(saves), 'committed step')}; a replay needs two"
        if listing.problems:
            raise CorruptCheckpointError(f"{why}: {'; '.join(listing.problems)}", path=listing.root)
        raise StepNotFoundError(why)
    for name, step in (("first", first), ("last", last)):
        if step is not None and step not in saves:
            raise StepNotFoundError(
                f"{listing.root} has no committed step {step} (--{name}); it has {saves}", step=step
            )
    plan = _plan(program, words)
    options = ocp.CheckpointManagerOptions(read_only=True, step_prefix=step_prefix)
    with CheckpointManager(listing.root, options=options) as manager:
        parts = {"args": plan.args, "state_of": plan.state_of}
        found = replay(manager, plan.make_step, plan.make_batches, **parts, first=first, last=last, record=not dry_run)
    if as_json:
        print_json(
            _as_json(listing.root, found.steps[0], found.steps_replayed, _agreed(found), not dry_run, found.difference)
        )
    else:
        _show(listing.root, found, recorded=not dry_run)
    damaged = exit_with(listing.problems)
    return _ended(found.difference) or damaged


def _watch(
    root: str, plan: ReplayPlan, steps_max: int, idle_timeout_s: float | None, *, recorded: bool, as_json: bool
) -> int:
    """Shows each save as it is replayed, and at the end the share of the run's steps that were."""
    saves: list[NewSave] = []
    new = replay_new(root, plan, steps_max=steps_max, record=recorded, poll_s=_POLL_S, idle_timeout_s=idle_timeout_s)
    try:
        for save in new:
            saves.append(save)
            if not as_json:
                print_line(_watched(save, recorded=recorded))
                sys.stdout.flush()  # the next one may be hours away
    except KeyboardInterrupt:
        _show_watched(root, saves, recorded=recorded, as_json=as_json)
        raise
    difference = _show_watched(root, saves, recorded=recorded, as_json=as_json)
    damaged = exit_with([f"save {save.step}: {save.reason}" for save in saves if save.damaged])
    return _ended(difference) or damaged


def _show_watched(root: str, saves: Sequence[NewSave], *, recorded: bool, as_json: bool) -> Difference | None:
    certified = [save.certificate for save in saves if save.certificate is not None]
    replayed = sum(each.steps_replayed for each in certified)
    kept = [save.step for save in saves if not save.damaged and not save.deleted]
    run = kept[-1] - kept[0] if kept else 0
    difference = certified[-1].difference if certified else None
    if as_json:
        begun = kept[0] if kept else None
        agreed = [each.steps[-1] for each in certified if each.is_certified]
        found = _as_json(root, begun, replayed, agreed, recorded, difference)
        print_json({**found, "not_replayed": {each.step: each.reason for each in saves if each.certificate is None}})
    elif run > 0:
        print_line(f"{root}: {replayed} of {count_text(run, 'step')} replayed ({replayed / run:.0%})")
    sys.stdout.flush()
    return difference


def _watched(save: NewSave, *, recorded: bool) -> str:
    if save.damaged or save.deleted:
        return f"save {save.step}: left out ({save.reason})"
    if save.certificate is None:
        return f"save {save.step}: the replay begins here ({save.reason})"
    steps = count_text(save.certificate.steps_replayed, "step")
    if not save.certificate.is_certified:
        return f"save {save.step}: {steps} replayed, differs"
    return f"save {save.step}: {steps} replayed, {'certified' if recorded else 'would be certified'}"


def _ended(difference: Difference | None) -> int:
    if difference is None:
        return Exit.OK
    click.echo(f"ckptkit: {printable(str(difference))}", err=True)
    return Exit.DIFFERENT


def _plan(program: str, words: Sequence[str]) -> ReplayPlan:
    """The plan that the program's function returns; modules of the working directory are found, as by `python -m`."""
    name, colon, attribute = program.partition(":")
    if not (name and colon and attribute.isidentifier()):
        raise click.UsageError(f"--replay {program}: write MODULE:FUNCTION, like train:replay_plan")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Any = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"--replay {program}: {error}") from error
    plan = function(list(words))
    if not isinstance(plan, ReplayPlan):
        raise click.UsageError(f"--replay {program}: it returned a {type(plan).__name__}, no ckptkit.guard.ReplayPlan")
    return plan


def _agreed(found: Certificate) -> list[int]:
    """The saves that the replay came to."""
    end = found.difference.step if found.difference is not None else None
    return [step for step in found.steps[1:] if end is None or step < end]


def _as_json(
    root: str, begun: int | None, replayed: int, agreed: list[int], recorded: bool, difference: Difference | None
) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "root": root,
        "replayed_from": begun,
        "steps_replayed": replayed,
        "certified": agreed,
        "recorded": recorded,
        "difference": None if difference is None else asdict(difference),
    }


def _show(root: str, found: Certificate, *, recorded: bool) -> None:
    agreed = ", ".join(map(str, _agreed(found))) or "none"
    print_line(f"{root}: {count_text(found.steps_replayed, 'step')} replayed from save {found.steps[0]}")
    print_line(f"  {'certified' if recorded else 'would be certified'}: {agreed}")
