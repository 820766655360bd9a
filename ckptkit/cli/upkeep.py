"""The commands that maintain a root: `ckptkit prune`, `rollback`, `pin`, `unpin`, `copy` and `sign`."""

from __future__ import annotations

import sys

import click

from ckptkit.cli.exits import Exit, exit_with
from ckptkit.cli.options import (
    DRY_RUN,
    HOST_ID,
    JSON,
    KEEP,
    STEP_PREFIX,
    TIERS,
    TIMEOUT,
    fast_tiers,
    root_and_step,
    seconds,
)
from ckptkit.cli.progress import progress_bar, progress_line
from ckptkit.cli.sources import leased_sources
from ckptkit.cli.text import (
    count_text,
    print_found,
    print_json,
    print_line,
    print_notes,
    print_part,
    print_table,
    size_text,
)
from ckptkit.model.tiers import DURABLE
from ckptkit.upkeep import (
    AdoptedAs,
    CopyPlan,
    Keep,
    Pinning,
    PrunePlan,
    RollbackPlan,
    Signing,
    plan_copy,
    plan_prune,
    plan_rollback,
)
from ckptkit.upkeep import copy as copy_steps
from ckptkit.upkeep import pin as pin_step
from ckptkit.upkeep import prune as prune_root
from ckptkit.upkeep import rollback as roll_back
from ckptkit.upkeep import sign as sign_step
from ckptkit.upkeep import unpin as unpin_step

UNREAD = click.option("--unread", is_flag=True, help="Trust a step's records, and read no array.")


@click.command()
@click.argument("root")
@click.option(
    "--keep",
    type=KEEP,
    multiple=True,
    required=True,
    metavar="RULE",
    help="newest=N, bytes=SIZE (the newest that fit) or every=N (multiples of N); repeatable: any of them keeps.",
)
@UNREAD
@seconds(
    "--wait",
    "wait_s",
    default=0.0,
    help="How long to watch leases of steps to delete; a lease that is not renewed is dropped.",
)
@STEP_PREFIX
@DRY_RUN
@JSON
@TIMEOUT
def prune(
    root: str,
    keep: tuple[Keep, ...],
    unread: bool,
    wait_s: float,
    step_prefix: str | None,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Delete the durable steps of ROOT that no rule keeps, and those of branches that a rollback abandoned.

    Keeps the newest complete step (it is read to verify it), pinned steps, and steps that a process reads. Damaged or
    uncommitted steps, and directories that are not steps of the run, also stay. A job may be running.
    """
    with progress_line() as progress:
        plan = plan_prune(root, keep, unread=unread, step_prefix=step_prefix, timeout_s=timeout_s, progress=progress)
    if not dry_run:
        plan = prune_root(plan, wait_s=wait_s, timeout_s=timeout_s)
    print_found(plan, show_prune, as_json)
    return exit_with(plan.problems)


@click.command()
@click.argument("root")
@click.option(
    "--to",
    "step",
    type=click.IntRange(min=0),
    required=True,
    metavar="STEP",
    help="The step from which the run continues.",
)
@TIERS
@HOST_ID
@UNREAD
@STEP_PREFIX
@DRY_RUN
@JSON
@TIMEOUT
def rollback(
    root: str,
    step: int,
    tiers: tuple[str, ...],
    host_id: str | None,
    unread: bool,
    step_prefix: str | None,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Make every restart of ROOT continue from STEP: a record abandons all newer steps, in every tier of every host.

    STEP is read and verified first. Nothing is deleted, and a rollback cannot be undone. Stop the job first: the next
    durable save of a running job is refused.
    """
    host = fast_tiers(tiers, host_id)
    with progress_line() as progress:
        plan = plan_rollback(
            root,
            step,
            tiers=tiers,
            host_id=host,
            unread=unread,
            step_prefix=step_prefix,
            timeout_s=timeout_s,
            progress=progress,
        )
    if not dry_run:
        plan = roll_back(plan, timeout_s=timeout_s)
    print_found(plan, show_rollback, as_json)
    sys.stdout.flush()
    return Exit.OK


@click.command()
@click.argument("root")
@click.argument("step", type=click.IntRange(min=0), required=False)
@click.option("--reason", default="", metavar="TEXT", help="Kept with the pin; `du` shows it.")
@STEP_PREFIX
@DRY_RUN
@JSON
@TIMEOUT
def pin(
    root: str, step: int | None, reason: str, step_prefix: str | None, dry_run: bool, as_json: bool, timeout_s: float
) -> int:
    """Protect the durable STEP of ROOT (also given as ROOT/STEP) from every pruning, also by a running job, until
    `unpin`."""
    root, step = root_and_step(root, step)
    found = pin_step(root, step, reason=reason, step_prefix=step_prefix, dry_run=dry_run, timeout_s=timeout_s)
    return _pinned(found, dry_run, as_json, "pinned")


@click.command()
@click.argument("root")
@click.argument("step", type=click.IntRange(min=0), required=False)
@DRY_RUN
@JSON
@TIMEOUT
def unpin(root: str, step: int | None, dry_run: bool, as_json: bool, timeout_s: float) -> int:
    """Remove the pin of STEP of ROOT, also given as ROOT/STEP."""
    root, step = root_and_step(root, step)
    return _pinned(
        unpin_step(root, step, dry_run=dry_run, timeout_s=timeout_s), dry_run, as_json, "not pinned any more"
    )


def _pinned(found: Pinning, dry_run: bool, as_json: bool, words: str) -> int:
    if as_json:
        print_json({**found.to_json(), "done": not dry_run})
    else:
        pinned = ", ".join(map(str, found.pinned)) or "none"
        is_or_would = "would be" if dry_run else "is"
        print_line(f"{found.root}: step {found.step} {is_or_would} {words}; pinned are: {pinned}")
    return exit_with(found.problems)


def show_prune(plan: PrunePlan) -> None:
    """Prints it on stdout."""
    words = {"keep": "stays", "delete": "deleted" if plan.done else "would go", "leave": "left"}
    verb = "freed" if plan.done else "would be freed"
    proven = "no step of it is whole" if plan.proven is None else f"the newest whole step is {plan.proven}"
    freed = f"{len(plan.doomed)} of {count_text(len(plan.steps), 'step')}, {size_text(plan.freed_bytes)} {verb}"
    print_line(f"{plan.root}: {freed}; {proven}")
    for note in plan.notes:
        print_line(f"  left: {note}")
    rows = [
        [
            str(each.step),
            each.name,
            each.state,
            "" if each.save_id is None else str(each.save_id),
            size_text(each.stored_bytes),
            words[each.act],
            ", ".join(each.reasons),
        ]
        for each in plan.steps
    ]
    titles = ("step", "directory", "state", "save", "bytes", "what", "why")
    print_part([(title, title in ("step", "bytes")) for title in titles], rows)


def show_rollback(plan: RollbackPlan) -> None:
    """Prints it on stdout."""
    verb = "abandoned" if plan.done else "would be abandoned"
    print_line(f"{plan.root}: continues from step {plan.step}; {count_text(len(plan.abandoned), 'newer step')} {verb}")
    print_notes(plan.notes)
    rows = [
        [
            str(each.step),
            ", ".join(at.path.rpartition("/")[2] for at in each.holdings if at.tier == DURABLE),
            "" if each.save_id is None else str(each.save_id),
            ", ".join(holding.tier for holding in each.holdings),
        ]
        for each in plan.abandoned
    ]
    print_part([("step", True), ("directory", False), ("save", False), ("tiers", False)], rows)


_TITLES = ("step", "directory", "save", "bytes", "objects", "what")
_COLUMNS = [(title, title in ("step", "bytes", "objects")) for title in _TITLES]


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--as-step", type=click.IntRange(min=0), metavar="N", help="The number of the one step SRC in DST.")
@click.option(
    "--as",
    "adopted",
    type=click.Choice(["newest", "history"]),
    help="Give the one step SRC a new identity among the steps of another run in DST.",
)
@STEP_PREFIX
@DRY_RUN
@click.option("--resume", is_flag=True, help="Continue an interrupted run of the same copy.")
@JSON
@TIMEOUT
def copy(
    source: str,
    target: str,
    as_step: int | None,
    adopted: AdoptedAs | None,
    step_prefix: str | None,
    dry_run: bool,
    resume: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Copy the steps of the root SRC, or the one step SRC in a root, to the root DST, between disks and buckets.

    Every step is verified at DST before its commit marker is written, so DST holds the complete step or no step. A job
    may be running on SRC. A step of another run than that in DST is refused. With --as it gets a new identity: as the
    newest step, which the next restart takes, or as history, which a restart takes only by its number.
    """
    plan = plan_copy(source, target, as_step=as_step, adopted=adopted, step_prefix=step_prefix, timeout_s=timeout_s)
    if not dry_run:
        with progress_bar() as progress:
            plan = copy_steps(plan, resume=resume, timeout_s=timeout_s, progress=progress)
    print_found(plan, _show_copy, as_json)
    return exit_with(plan.problems)


def _show_copy(plan: CopyPlan) -> None:
    copied = [each for each in plan.steps if each.act == "copy"]
    verb = "copied and proven" if plan.done else "would be copied"
    count = f"{count_text(len(copied), 'step')}, {size_text(plan.copied_bytes)}"
    print_line(f"{plan.source} to {plan.target}: {count} {verb}")
    print_notes(plan.notes)
    print_line()
    words = {"copy": "copied" if plan.done else "to copy", "skip": "there already", "leave": "left"}
    rows = [
        [
            str(each.step),
            each.target.rpartition("/")[2],
            "" if each.save_id is None else str(each.save_id),
            size_text(each.stored_bytes),
            str(len(each.sizes)),
            words[each.act] + (f": {each.reason}" if each.act == "leave" else ""),
        ]
        for each in plan.steps
    ]
    print_table(_COLUMNS, rows)


@click.command()
@click.argument("path", metavar="STEP")
@click.option("--key", required=True, metavar="FILE", help="The private key: elliptic, in PEM, not encrypted.")
@DRY_RUN
@JSON
@TIMEOUT
def sign(path: str, key: str, dry_run: bool, as_json: bool, timeout_s: float) -> int:
    """Sign the committed step directory STEP, or a tree of `ckptkit.direct.save`: `verify --key` accepts it as it is
    now, and nothing else.

    STEP is verified first, and damage is not signed. Every byte is read twice. A job may be running. Needs
    ckptkit-jax[sign].
    """
    with leased_sources([path], timeout_s), progress_line() as progress:
        found = sign_step(path, key, dry_run=dry_run, timeout_s=timeout_s, progress=progress)
    print_found(found, _show_signing, as_json)
    return Exit.OK


def _show_signing(found: Signing) -> None:
    verb = "signed" if found.done else "would be signed"
    cells, files = count_text(found.cells[0], "cell"), count_text(found.files[0], "file")
    print_line(
        f"{found.path}: save {found.save_id} {verb} by {found.key}: {cells} ({size_text(found.cells[1])}), {files} "
        f"({size_text(found.files[1])})"
    )
