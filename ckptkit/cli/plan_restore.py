"""`ckptkit plan-restore`: the save that a restart would read, and the source of each part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import DEPTH, FOUND_TIERS, HOST_ID, JSON, TIMEOUT, TOP, fast_tiers
from ckptkit.cli.text import (
    count_text,
    names_of_tiers,
    print_found,
    print_line,
    print_notes,
    print_top,
    shape_text,
    size_text,
    tier_name,
)
from ckptkit.inspection.outlook import Outlook, outlook
from ckptkit.restore.plan import BoxRead, RestorePlan


@click.command("plan-restore")
@click.argument("root", metavar="PATH")
@FOUND_TIERS
@HOST_ID
@click.option("--like", metavar="PATH", help="Want the leaves and boxes of this slot directory, manifest or step.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only this step.")
@click.option("--leaves", is_flag=True, help="Also each piece of each leaf; --top and --depth do the same in short.")
@TOP
@DEPTH
@JSON
@TIMEOUT
def plan_restore(
    root: str,
    tiers: tuple[str, ...],
    host_id: str | None,
    like: str | None,
    step: int | None,
    leaves: bool,
    top: int | None,
    depth: int | None,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Show which save of PATH a restart on this host would take, and the source of each piece. Reads no array."""
    host = fast_tiers(tiers, host_id)
    found = outlook(root, tiers=tiers or None, host_id=host, like=like, step=step, timeout_s=timeout_s)
    print_found(found, partial(show_outlook, leaves=leaves, top=top, depth=depth), as_json)
    return exit_with(found.problems)


_READ_COLUMNS = [("leaf", False), ("from", True), ("to", True), ("bytes", True), ("tier", False)]


_GROUP_COLUMNS = [("group", False), ("tier", False), ("reads", True), ("bytes", True)]


def show_outlook(found: Outlook, leaves: bool = False, top: int | None = None, depth: int | None = None) -> None:
    """Prints it on stdout: with `leaves` the reads, with `top` the largest ones or groups of leaves, then their sum."""
    if found.plan is not None and (leaves or top is not None or depth is not None):
        _print_reads(found.plan, found.names, top, depth)
        print_line()
    chosen = found.chosen
    print_line(f"{found.root}: step {chosen.save_id.step}, save {chosen.save_id}, as host {found.host_id} sees it")
    for tier, step, reason in found.rejected:
        print_line(f"  rejected: step {step} in {tier_name(tier, found.names)}: {reason}")
    print_notes([*names_of_tiers(found.names), *found.notes])
    if found.plan is None:
        print_line("  stock Orbax wrote it: its own handlers read it, and nothing of it is proven")
        return
    for tier, read_bytes in found.plan.bytes_by_tier().items():
        keys = {read.key for read in found.plan.reads if _tier_of(found.plan, read) == tier}
        what = f"{count_text(len(keys), 'leaf', 'leaves')}, {size_text(read_bytes)} ({read_bytes} bytes)"
        print_line(f"  {what} from {tier_name(tier, found.names)}")


def _tier_of(plan: RestorePlan, read: BoxRead) -> str:
    return plan.tiers[read.sources[0][0]]


def _print_reads(plan: RestorePlan, names: Mapping[str, str], top: int | None, depth: int | None) -> None:
    if depth is None:
        reads = sorted(plan.reads, key=lambda read: 0 if top is None else -read.nbytes)
        print_top(_READ_COLUMNS, [_read_row(plan, read, names) for read in reads], top)
        return
    sizes: dict[tuple[str, str], list[int]] = {}
    for read in plan.reads:
        group = f"{read.key[0]}:{'.'.join(read.key[1][:depth])}"
        sizes.setdefault((group, tier_name(_tier_of(plan, read), names)), []).append(read.nbytes)
    groups = sorted(sizes.items(), key=lambda each: 0 if top is None else -sum(each[1]))
    print_top(_GROUP_COLUMNS, [[*of, str(len(each)), size_text(sum(each))] for of, each in groups], top)


def _read_row(plan: RestorePlan, read: BoxRead, names: Mapping[str, str]) -> list[str]:
    tier = tier_name(_tier_of(plan, read), names)
    start, stop = shape_text(read.wanted.start), shape_text(read.wanted.stop)
    return [f"{read.key[0]}:{'.'.join(read.key[1])}", start, stop, size_text(read.nbytes), tier]
