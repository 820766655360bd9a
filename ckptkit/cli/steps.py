"""`ckptkit steps` and `ckptkit plan-restore`: what a root has, and what a restart would take of it."""

from __future__ import annotations

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import HOST_ID, JSON, TIERS, TIMEOUT, fast_tiers
from ckptkit.cli.show_steps import show_outlook, show_steps
from ckptkit.cli.text import print_json
from ckptkit.inspection import list_steps
from ckptkit.restore.outlook import outlook


@click.command()
@click.argument("root")
@TIERS
@HOST_ID
@JSON
@TIMEOUT
def steps(root: str, tiers: tuple[str, ...], host_id: str | None, as_json: bool, timeout_s: float) -> int:
    """List the steps of ROOT over its durable directory and this host's fast tiers, with their state."""
    host = fast_tiers(tiers, host_id)
    listing = list_steps(root, tiers=tiers, host_id=host, timeout_s=timeout_s)
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
@JSON
@TIMEOUT
def plan_restore(
    root: str,
    tiers: tuple[str, ...],
    host_id: str | None,
    like: str | None,
    step: int | None,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Say which save of PATH a restart on this host would take, and where each piece comes from. Reads no array."""
    host = fast_tiers(tiers, host_id)
    found = outlook(root, tiers=tiers, host_id=host, like=like, step=step, timeout_s=timeout_s)
    if as_json:
        print_json(found.to_json())
    else:
        show_outlook(found)
    return exit_with(found.problems)
