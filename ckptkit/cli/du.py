"""`ckptkit du`: the bytes of a root."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import HOST_ID, JSON, KEEP, TIERS, TIMEOUT, fast_tiers
from ckptkit.cli.text import count_text, print_json, print_line, print_notes, print_part, size_text
from ckptkit.errors import CorruptCheckpointError
from ckptkit.upkeep import Usage
from ckptkit.upkeep import usage as usage_of

if TYPE_CHECKING:
    from ckptkit.upkeep import Keep, PrunePlan


@click.command()
@click.argument("root")
@TIERS
@HOST_ID
@click.option("--keep", type=KEEP, multiple=True, metavar="RULE", help="Show what `prune` would free.")
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
    """Show where the bytes of ROOT are: by step, item and kind, in this host's tiers, and which are dead weight.

    With --keep, also show the bytes that a pruning by these rules would free, without verifying any step. Changes
    nothing.
    """
    found = usage_of(root, tiers=tiers, host_id=fast_tiers(tiers, host_id), deep=deep, timeout_s=timeout_s)
    plan, problems = None, list(found.problems)
    if keep:
        try:
            plan = _pruning(root, keep, timeout_s)
        except CorruptCheckpointError as error:  # the table is still shown
            problems.append(f"what a pruning would free is not known: {error}")
    if as_json:
        print_json({**found.to_json(), "prune": None if plan is None else plan.to_json()})
    else:
        show_usage(found, plan)
    return exit_with(problems)


def _pruning(root: str, keep: tuple[Keep, ...], timeout_s: float) -> PrunePlan:
    from ckptkit.upkeep import plan_prune  # JAX and Orbax, which no other part of `du` needs

    return plan_prune(root, keep, unread=True, timeout_s=timeout_s)


_ARENA_NUMBERS = ("saves", "slots", "bytes")
_KINDS = ("arrays", "small", "metadata", "digests")


def show_usage(found: Usage, plan: PrunePlan | None) -> None:
    """Prints it on stdout."""
    dead = sum(each.stored_bytes for each in found.dead)
    print_line(
        f"{found.root}: {size_text(found.stored_bytes)} ({found.stored_bytes} bytes), "
        f"{count_text(len(found.steps), 'step')}, {size_text(dead)} dead weight"
    )
    if found.repeated_bytes:
        print_line(f"  steps share data files: {size_text(found.repeated_bytes)} of their sizes are counted again")
    print_notes(found.notes)
    rows = []
    for each in found.steps:
        pinned = f", pinned ({each.pin_reason})" if each.pin_reason else ", pinned" * each.pinned
        state = each.state + pinned + ", in use" * each.in_use
        items = ", ".join(f"{name} {size_text(size)}" for name, size in each.items.items() if name)
        sizes = [size_text(each.kinds.get(kind, 0)) for kind in _KINDS]
        rows.append([str(each.step), state, size_text(each.stored_bytes), *sizes, items])
    kinds = [(kind, True) for kind in _KINDS]
    print_part([("step", True), ("state", False), ("bytes", True), *kinds, ("items", False)], rows)
    rows = [
        [a.tier, a.path, "running" if a.live else "no", str(len(a.saves)), str(a.slots), size_text(a.stored_bytes)]
        for a in found.arenas
    ]
    print_part([(title, title in _ARENA_NUMBERS) for title in ("tier", "arena", "held", *_ARENA_NUMBERS)], rows)
    rows = [[each.kind, size_text(each.stored_bytes), each.path, each.remedy] for each in found.dead]
    print_part([("dead weight", False), ("bytes", True), ("where", False), ("how it goes", False)], rows)
    rows = [[path, size_text(size)] for path, size in found.others.items()]
    print_part([("not of this run", False), ("bytes", True)], rows)
    if plan is not None:
        print_line()
        gone = ", ".join(str(each.step) for each in plan.doomed)
        which = f"{size_text(plan.freed_bytes)}: {'steps' if len(plan.doomed) > 1 else 'step'} {gone}"
        print_line(f"a pruning would free {which if gone else 'nothing'}")
