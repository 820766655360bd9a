"""A restore plan as text."""

from __future__ import annotations

from ckptkit.cli.text import print_line, print_table, shape_text, size_text
from ckptkit.restore.outlook import Outlook
from ckptkit.restore.plan import BoxRead, RestorePlan

_COLUMNS = [("leaf", False), ("from", True), ("to", True), ("bytes", True), ("tier", False)]


def show_outlook(found: Outlook) -> None:
    """Prints it on stdout."""
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
    print_table(_COLUMNS, [_row(found.plan, read) for read in found.plan.reads])


def _row(plan: RestorePlan, read: BoxRead) -> list[str]:
    tier = plan.tiers[read.sources[0][0]]
    start, stop = shape_text(read.wanted.start), shape_text(read.wanted.stop)
    return [f"{read.key[0]}:{'.'.join(read.key[1])}", start, stop, size_text(read.nbytes), tier]
