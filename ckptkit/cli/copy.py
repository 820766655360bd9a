"""`ckptkit copy`."""

from __future__ import annotations

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import DRY_RUN, JSON, STEP_PREFIX, TIMEOUT
from ckptkit.cli.progress import progress_bar
from ckptkit.cli.text import count_text, print_json, print_line, print_table, size_text
from ckptkit.upkeep import AdoptedAs, CopyPlan, plan_copy
from ckptkit.upkeep import copy as copy_steps

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
    if as_json:
        print_json(plan.to_json())
    else:
        _show(plan)
    return exit_with(plan.problems)


def _show(plan: CopyPlan) -> None:
    copied = [each for each in plan.steps if each.act == "copy"]
    verb = "copied and proven" if plan.done else "would be copied"
    count = f"{count_text(len(copied), 'step')}, {size_text(plan.copied_bytes)}"
    print_line(f"{plan.source} to {plan.target}: {count} {verb}")
    for note in plan.notes:
        print_line(f"  {note}")
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
