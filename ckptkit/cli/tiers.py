"""`ckptkit tiers`: the arenas of fast tiers on this host."""

from __future__ import annotations

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import HOST_ID, JSON, fast_tiers, seconds
from ckptkit.cli.text import age_text, count_text, print_json, print_line, print_notes, print_part, size_text
from ckptkit.inspection.records import FORMAT
from ckptkit.upkeep import ArenaEntry, clean_arenas, list_arenas, require_tiers
from ckptkit.util import clock

_COLUMNS = [(title, title in ("slots", "bytes")) for title in ("arena", "held", "slots", "bytes", "newest", "used")]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def tiers() -> None:
    """Show or free the slots that jobs have left in fast tiers on this host."""


@tiers.command("list")
@click.argument("paths", metavar="TIER...", nargs=-1, required=True)
@click.option("--root", metavar="ROOT", help="Only jobs that save to this durable root.")
@JSON
def list_command(paths: tuple[str, ...], root: str | None, as_json: bool) -> int:
    """List the slot directories below each TIER: the owner, the saves in them, and whether a process holds them.

    A TIER is the path of a job's Tier.ram or Tier.ssd. Changes nothing.
    """
    fast_tiers(paths, None)
    require_tiers(paths)
    found = list_arenas(paths, root=root)
    if as_json:
        print_json({"format": FORMAT, "arenas": [each.to_json() for each in found]})
        return Exit.OK
    live = sum(each.live for each in found)
    total = size_text(sum(each.stored_bytes + each.quarantine_bytes for each in found))
    print_line(f"{count_text(len(found), 'arena')}, {live} held by a running process, {total}")
    print_part(_COLUMNS, [_row(each) for each in found])
    return Exit.OK


@tiers.command("clean")
@click.argument("paths", metavar="TIER...", nargs=-1, required=True)
@click.option("--job", metavar="NAME", help="The job with this directory name, as `tiers list` shows it.")
@click.option("--root", metavar="ROOT", help="The jobs that save to this durable root.")
@seconds("--idle", "idle_s", help="Jobs without a save for this time (7d).")
@HOST_ID
@click.option("--dry-run", is_flag=True, help="Show what would be freed, and change nothing.")
@JSON
def clean_command(
    paths: tuple[str, ...],
    job: str | None,
    root: str | None,
    idle_s: float | None,
    host_id: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Free the slots of ended jobs below each TIER, never those of a job that runs on this host.

    Give --job, --root or --idle; all that are given must hold. A job that is started again later would not find its
    newest steps.
    """
    host = fast_tiers(paths, host_id)
    if job is None and root is None and idle_s is None:
        raise click.UsageError("give one of --job, --root and --idle")
    found = clean_arenas(paths, host_id=host, job=job, root=root, idle_s=idle_s, dry_run=dry_run)
    if as_json:
        print_json(found.to_json())
        return Exit.OK
    verb = "freed" if found.done else "would be freed"
    removed = count_text(len(found.removed), "arena")
    print_line(f"{removed} of host {host}, {size_text(found.freed_bytes)} {verb}; {len(found.kept)} kept")
    print_notes(found.notes)
    rows = [[*_row(each), "freed" if found.done else "would go"] for each in found.removed]
    rows += [[*_row(each), f"kept: {why}"] for each, why in found.kept]
    print_part([*_COLUMNS, ("what", False)], rows)
    return Exit.OK


def _row(each: ArenaEntry) -> list[str]:
    size = size_text(each.stored_bytes) + f" + {size_text(each.quarantine_bytes)} aside" * bool(each.quarantine_bytes)
    more = len(each.saves) - 1
    newest = f"step {each.saves[-1][0]}" + f", {more} more" * (more > 0) if each.saves else ""
    newest += ", of another root" * each.other_root
    used = "" if each.used_at_s is None else f"{age_text(clock.wall_s() - each.used_at_s)} ago"
    return [each.path, "running" if each.live else "no", str(each.slots), size, newest, used]
