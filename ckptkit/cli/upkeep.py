"""`ckptkit du`, `prune`, `rollback`, `pin` and `unpin`."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckptkit.cli.exits import Exit, exit_with
from ckptkit.cli.options import DRY_RUN, HOST_ID, JSON, TIERS, TIMEOUT, SizeType, fast_tiers
from ckptkit.cli.show_upkeep import show_prune, show_rollback, show_usage
from ckptkit.cli.show_verification import progress_line
from ckptkit.cli.text import print_json, print_line
from ckptkit.model.tiers import EverySteps, KeepBytes, KeepNewest
from ckptkit.upkeep import Keep, Pinning, plan_prune, plan_rollback
from ckptkit.upkeep import pin as pin_step
from ckptkit.upkeep import prune as prune_root
from ckptkit.upkeep import rollback as roll_back
from ckptkit.upkeep import unpin as unpin_step
from ckptkit.upkeep import usage as usage_of

UNREAD = click.option("--unread", is_flag=True, help="Take a step's records for its proof, and read no array.")


class KeepType(click.ParamType):
    """`newest=5`, `bytes=2TiB`, `every=1000`: the policies of the library on the command line."""

    name = "rule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Keep:
        """The policy, or click's message."""
        word, _, amount = str(value).partition("=")
        if word == "bytes":
            return KeepBytes(SizeType().convert(amount, param, ctx))
        try:
            return {"newest": KeepNewest, "every": EverySteps}[word](int(amount))
        except (KeyError, ValueError):
            self.fail(f"{value!r} is no rule; write newest=5, bytes=2TiB or every=1000", param, ctx)


@click.command()
@click.argument("root")
@TIERS
@HOST_ID
@click.option("--keep", type=KeepType(), multiple=True, metavar="RULE", help="Say what `prune` with it would free.")
@click.option("--deep", is_flag=True, help="Look for files of OCDBT databases that nothing refers to.")
@JSON
@TIMEOUT
def du(
    root: str,
    tiers: tuple[str, ...],
    host_id: str | None,
    keep: tuple[Keep, ...],
    deep: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Say where the bytes of ROOT are: by step, item and kind, in this host's tiers, and which are dead weight.

    With --keep, also what a pruning by these rules would free (nothing is read to prove a step for that). Changes
    nothing.
    """
    found = usage_of(root, tiers=tiers, host_id=fast_tiers(tiers, host_id), deep=deep, timeout_s=timeout_s)
    plan = plan_prune(root, keep, unread=True, timeout_s=timeout_s) if keep else None
    if as_json:
        print_json({**found.to_json(), "prune": None if plan is None else plan.to_json()})
    else:
        show_usage(found, plan)
    return exit_with(found.problems)


@click.command()
@click.argument("root")
@click.option(
    "--keep",
    type=KeepType(),
    multiple=True,
    required=True,
    metavar="RULE",
    help="newest=N, bytes=SIZE (the newest that fit) or every=N (multiples of N); repeatable: any of them keeps.",
)
@UNREAD
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Watch leases of steps that are to go: one that nobody renews is dropped.",
)
@DRY_RUN
@JSON
@TIMEOUT
def prune(
    root: str,
    keep: tuple[Keep, ...],
    unread: bool,
    wait_s: float,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Delete the durable steps of ROOT that no rule keeps, and those of branches that a rollback abandoned.

    Never the newest step that proves whole (it is read), a pinned one, or one that somebody reads. What is damaged or
    was never committed is left. A job may be running.
    """
    with progress_line() as progress:
        plan = plan_prune(root, keep, unread=unread, timeout_s=timeout_s, progress=progress)
    if not dry_run:
        plan = prune_root(plan, wait_s=wait_s, timeout_s=timeout_s)
    if as_json:
        print_json(plan.to_json())
    else:
        show_prune(plan)
    return exit_with(plan.problems)


@click.command()
@click.argument("root")
@click.option("--to", "step", type=click.IntRange(min=0), required=True, metavar="STEP", help="Where the run goes on.")
@TIERS
@HOST_ID
@UNREAD
@DRY_RUN
@JSON
@TIMEOUT
def rollback(
    root: str,
    step: int,
    tiers: tuple[str, ...],
    host_id: str | None,
    unread: bool,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Make every restart of ROOT go on from STEP: a record supersedes all newer steps, in every tier of every host.

    STEP is read and proven first. Nothing is deleted, and it cannot be taken back. Stop the job before: a run that is
    under way is refused its next durable save.
    """
    host = fast_tiers(tiers, host_id)
    with progress_line() as progress:
        plan = plan_rollback(
            root, step, tiers=tiers, host_id=host, unread=unread, timeout_s=timeout_s, progress=progress
        )
    if not dry_run:
        plan = roll_back(plan, timeout_s=timeout_s)
    if as_json:
        print_json(plan.to_json())
    else:
        show_rollback(plan)
    sys.stdout.flush()
    return Exit.OK


@click.command()
@click.argument("root")
@click.argument("step", type=click.IntRange(min=0))
@click.option("--reason", default="", metavar="TEXT", help="Kept with the pin; `du` shows it.")
@DRY_RUN
@JSON
@TIMEOUT
def pin(root: str, step: int, reason: str, dry_run: bool, as_json: bool, timeout_s: float) -> int:
    """Keep the durable STEP of ROOT from every pruning, a running job's too, until `unpin`."""
    return _pinned(
        pin_step(root, step, reason=reason, dry_run=dry_run, timeout_s=timeout_s), dry_run, as_json, "pinned"
    )


@click.command()
@click.argument("root")
@click.argument("step", type=click.IntRange(min=0))
@DRY_RUN
@JSON
@TIMEOUT
def unpin(root: str, step: int, dry_run: bool, as_json: bool, timeout_s: float) -> int:
    """Take the pin of STEP out."""
    return _pinned(
        unpin_step(root, step, dry_run=dry_run, timeout_s=timeout_s), dry_run, as_json, "not pinned any more"
    )


def _pinned(found: Pinning, dry_run: bool, as_json: bool, words: str) -> int:
    if as_json:
        print_json({**found.to_json(), "done": not dry_run})
    else:
        pinned = ", ".join(map(str, found.pinned)) or "none"
        would = "would be " if dry_run else ""
        print_line(f"{found.root}: step {found.step} is {would}{words}; pinned are: {pinned}")
    return Exit.OK
