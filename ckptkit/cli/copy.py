"""`ckptkit copy`."""

from __future__ import annotations

import sys

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import DRY_RUN, JSON, TIMEOUT
from ckptkit.cli.progress import progress_bar
from ckptkit.cli.text import count_text, print_json, print_line, print_table, size_text
from ckptkit.upkeep import CopyPlan, plan_copy
from ckptkit.upkeep import copy as copy_steps

_COLUMNS = [(title, title in ("step", "bytes", "objects")) for title in ("step", "save", "bytes", "objects", "what")]


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@DRY_RUN
@click.option("--resume", is_flag=True, help="Go on where an interrupted run of the same copy stopped.")
@JSON
@TIMEOUT
def copy(source: str, target: str, dry_run: bool, resume: bool, as_json: bool, timeout_s: float) -> int:
    """Copy the steps of the root SRC, or the one step SRC in a root, to the root DST, between disks and buckets.

    A step is proven at DST before the mark of its commit is written, and is there whole or not at all. A job may be
    running on SRC.
    """
    plan = plan_copy(source, target, timeout_s=timeout_s)
    if not dry_run:
        with progress_bar() as progress:
            plan = copy_steps(plan, resume=resume, timeout_s=timeout_s, progress=progress)
    if as_json:
        print_json(plan.to_json())
    else:
        _show(plan)
    sys.stdout.flush()
    return Exit.OK


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
            "" if each.save_id is None else str(each.save_id),
            size_text(each.stored_bytes),
            str(len(each.sizes)),
            words[each.act] + (f": {each.reason}" if each.act == "leave" else ""),
        ]
        for each in plan.steps
    ]
    print_table(_COLUMNS, rows)
