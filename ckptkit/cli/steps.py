"""`ckptkit steps`: the steps of a root and of its tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import FOUND_TIERS, HOST_ID, JSON, STEP_PREFIX, TIMEOUT, fast_tiers
from ckptkit.cli.text import (
    age_text,
    count_text,
    names_of_tiers,
    print_found,
    print_line,
    print_notes,
    print_table,
    short_json,
    size_text,
    tier_name,
)
from ckptkit.inspection import Listing, StepEntry, list_steps
from ckptkit.util import clock


@click.command()
@click.argument("root")
@FOUND_TIERS
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
    listing = list_steps(root, tiers=tiers or None, host_id=host, step_prefix=step_prefix, timeout_s=timeout_s)
    print_found(listing, show_steps, as_json)
    return exit_with(listing.problems)


_TITLES = ("step", "state", "save", "tiers", "bytes", "age", "processes", "items")
_STEP_COLUMNS = [(title, title in ("step", "bytes", "age")) for title in _TITLES]
_METRICS_CHARS = 80


def show_steps(listing: Listing) -> None:
    """Prints it on stdout."""
    states = Counter(entry.state for entry in listing.steps)
    others = "".join(f", {count} {state}" for state, count in sorted(states.items()) if state != "committed")
    print_line(f"{listing.root}: {count_text(states['committed'], 'step')}{others}, host {listing.host_id}")
    print_notes([*names_of_tiers(listing.names), *listing.notes])
    if listing.steps:
        told = any(entry.metrics is not None for entry in listing.steps)
        print_line()
        rows = [[*_step_row(entry, listing.names), *[_metrics_text(entry.metrics)] * told] for entry in listing.steps]
        print_table([*_STEP_COLUMNS, *[("metrics", False)] * told], rows)


def _step_row(entry: StepEntry, names: Mapping[str, str]) -> list[str]:
    present = entry.processes
    of = "" if present is None else f"{len(present)} of {entry.expected}"
    age = "" if entry.committed_at_s is None else age_text(clock.wall_s() - entry.committed_at_s)
    return [
        str(entry.step),
        entry.state + ", certified" * entry.certified,
        "" if entry.save_id is None else str(entry.save_id),
        ", ".join(tier_name(holding.tier, names) for holding in entry.holdings),
        " + ".join(size_text(holding.held_bytes) for holding in entry.holdings),
        age,
        of,
        ", ".join(entry.items),
    ]


def _metrics_text(metrics: Any) -> str:
    if isinstance(metrics, dict):
        return ", ".join(f"{name} {short_json(value, 20)}" for name, value in metrics.items())[:_METRICS_CHARS]
    return "" if metrics is None else short_json(metrics, _METRICS_CHARS)
