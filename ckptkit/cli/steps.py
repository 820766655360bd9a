"""`ckptkit steps` and `ckptkit plan-restore`: what a root has, and what a restart would take of it."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import DEPTH, HOST_ID, JSON, STEP_PREFIX, TIERS, TIMEOUT, TOP, fast_tiers
from ckptkit.cli.text import (
    age_text,
    count_text,
    print_json,
    print_line,
    print_table,
    print_top,
    shape_text,
    short_json,
    size_text,
)
from ckptkit.inspection import Listing, StepEntry, list_steps
from ckptkit.restore.outlook import Outlook, outlook
from ckptkit.restore.plan import BoxRead, RestorePlan
from ckptkit.util import clock


@click.command()
@click.argument("root")
@TIERS
@HOST_ID
@STEP_PREFIX
@JSON
@TIMEOUT
def steps(
    root: str,
    tiers: tuple[str, ...],
    host_id: str | None,
    step_prefix: str | None,
    as_json: bool,
    timeout_s: float,
) -> int:
    """List the steps of ROOT over its durable directory and this host's fast tiers, with their state."""
    host = fast_tiers(tiers, host_id)
    listing = list_steps(root, tiers=tiers, host_id=host, step_prefix=step_prefix, timeout_s=timeout_s)
    if as_json:
        print_json(listing.to_json())
    else:
        show_steps(listing)
    return exit_with(listing.problems)


@click.command("plan-restore")
@click.argument("root", metavar="PATH")
@TIERS
@HOST_ID
@click.option("--like", metavar="PATH", help="Want the leaves and boxes of this slot directory, manifest or step.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only this step.")
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
    top: int | None,
    depth: int | None,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Show which save of PATH a restart on this host would take, and the source of each piece. Reads no array."""
    host = fast_tiers(tiers, host_id)
    found = outlook(root, tiers=tiers, host_id=host, like=like, step=step, timeout_s=timeout_s)
    if as_json:
        print_json(found.to_json())
    else:
        show_outlook(found, top, depth)
    return exit_with(found.problems)


_STEP_COLUMNS = [
    ("step", True),
    ("state", False),
    ("save", False),
    ("tiers", False),
    ("bytes", True),
    ("age", True),
    ("processes", False),
    ("items", False),
]
_METRICS_CHARS = 80


def show_steps(listing: Listing) -> None:
    """Prints it on stdout."""
    print_line(f"{listing.root}: {count_text(len(listing.steps), 'step')}, host {listing.host_id}")
    for note in listing.notes:
        print_line(f"  {note}")
    if listing.steps:
        told = any(entry.metrics is not None for entry in listing.steps)
        print_line()
        rows = [[*_step_row(entry), *[_metrics_text(entry.metrics)] * told] for entry in listing.steps]
        print_table([*_STEP_COLUMNS, *[("metrics", False)] * told], rows)


def _step_row(entry: StepEntry) -> list[str]:
    present = entry.processes
    of = "" if present is None else f"{len(present)} of {entry.expected}"
    age = "" if entry.committed_at_s is None else age_text(clock.wall_s() - entry.committed_at_s)
    return [
        str(entry.step),
        entry.state,
        "" if entry.save_id is None else str(entry.save_id),
        ", ".join(holding.tier for holding in entry.holdings),
        " + ".join(size_text(holding.held_bytes) for holding in entry.holdings),
        age,
        of,
        ", ".join(entry.items),
    ]


def _metrics_text(metrics: Any) -> str:
    if isinstance(metrics, dict):
        return ", ".join(f"{name} {short_json(value, 20)}" for name, value in metrics.items())[:_METRICS_CHARS]
    return "" if metrics is None else short_json(metrics, _METRICS_CHARS)


_READ_COLUMNS = [("leaf", False), ("from", True), ("to", True), ("bytes", True), ("tier", False)]


_GROUP_COLUMNS = [("group", False), ("tier", False), ("reads", True), ("bytes", True)]


def show_outlook(found: Outlook, top: int | None = None, depth: int | None = None) -> None:
    """Prints it on stdout; with `top` the largest reads, or groups of leaves, first."""
    chosen = found.chosen
    print_line(f"{found.root}: step {chosen.save_id.step}, save {chosen.save_id}, as host {found.host_id} sees it")
    for tier, step, reason in found.rejected:
        print_line(f"  rejected: step {step} in {tier}: {reason}")
    for note in found.notes:
        print_line(f"  {note}")
    if found.plan is None:
        print_line("  stock Orbax wrote it: its own handlers read it, and nothing of it is proven")
        return
    for tier, read_bytes in found.plan.bytes_by_tier().items():
        print_line(f"  {size_text(read_bytes)} ({read_bytes} bytes) from {tier}")
    print_line()
    if depth is None:
        reads = sorted(found.plan.reads, key=lambda read: 0 if top is None else -read.nbytes)
        print_top(_READ_COLUMNS, [_read_row(found.plan, read) for read in reads], top)
        return
    sizes: dict[tuple[str, str], list[int]] = {}
    for read in found.plan.reads:
        group = f"{read.key[0]}:{'.'.join(read.key[1][:depth])}"
        sizes.setdefault((group, found.plan.tiers[read.sources[0][0]]), []).append(read.nbytes)
    groups = sorted(sizes.items(), key=lambda each: 0 if top is None else -sum(each[1]))
    print_top(_GROUP_COLUMNS, [[*of, str(len(each)), size_text(sum(each))] for of, each in groups], top)


def _read_row(plan: RestorePlan, read: BoxRead) -> list[str]:
    tier = plan.tiers[read.sources[0][0]]
    start, stop = shape_text(read.wanted.start), shape_text(read.wanted.stop)
    return [f"{read.key[0]}:{'.'.join(read.key[1])}", start, stop, size_text(read.nbytes), tier]
