"""A listing of steps as text."""

from __future__ import annotations

from ckptkit import clock
from ckptkit.cli.text import age_text, print_line, print_table, size_text
from ckptkit.inspection import Listing, StepEntry

_COLUMNS = [
    ("step", True),
    ("state", False),
    ("save", False),
    ("tiers", False),
    ("bytes", True),
    ("age", True),
    ("processes", False),
    ("items", False),
]


def show_steps(listing: Listing) -> None:
    """Prints it on stdout."""
    steps = len(listing.steps)
    print_line(f"{listing.root}: {steps} step{'s' * (steps != 1)}, host {listing.host_id}")
    for note in listing.notes:
        print_line(f"  {note}")
    if listing.steps:
        print_line()
        print_table(_COLUMNS, [_row(entry) for entry in listing.steps])


def _row(entry: StepEntry) -> list[str]:
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
