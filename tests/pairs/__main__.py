"""`python -m tests.pairs`: each pair of commands at once, at every operation of the first one."""

from __future__ import annotations

import multiprocessing
from typing import Final

import click

from tests.pairs import COMMANDS, pairs_of
from tests.pairs.campaign import run_pair

MEDIA: Final = ("disk", "bucket")
TELLING: Final = (("rollback", "prune"), ("prune", "copy-out"), ("verify", "prune"), ("job", "prune"))


@click.command(context_settings={"max_content_width": 120})
@click.option("--full", is_flag=True, help="Every pair of which one writes; without it a few telling ones.")
@click.option("--pair", "pairs", multiple=True, metavar="A,B", help="Only this pair: A pauses, B runs.")
@click.option("--medium", "media", type=click.Choice(MEDIA), multiple=True, help="[default: disk]")
@click.option("--at", type=click.IntRange(min=1), help="Only this operation of A.")
@click.option("--every", type=click.IntRange(min=1), default=1, show_default=True, help="Each n-th operation.")
@click.option("--apart", is_flag=True, help="As two machines, and A pauses longer than its claims live.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Processes at a time.")
def main(
    full: bool,
    pairs: tuple[str, ...],
    media: tuple[str, ...],
    at: int | None,
    every: int,
    apart: bool,
    workers: int,
) -> None:
    """Runs commands of ckptkit two at once over one root, and judges what is left."""
    chosen = [(first, second) for first, _, second in (each.partition(",") for each in pairs)]
    chosen = chosen or list(pairs_of() if full else TELLING)
    if unknown := {name for each in chosen for name in each} - set(COMMANDS):
        raise click.UsageError(f"{', '.join(sorted(unknown))} is not a command; there are {', '.join(COMMANDS)}")
    work = [(medium, *pair, at, every, apart) for medium in media or ("disk",) for pair in chosen]
    totals, kinds = 0, {"harmed": 0, "false damage": 0}
    with multiprocessing.get_context("spawn").Pool(min(workers, len(work)), maxtasksperchild=40) as pool:
        for done, (count, failures) in enumerate(pool.imap_unordered(run_pair, work), 1):
            totals += count
            for which, kind, text in failures:
                kinds[kind] += 1
                click.echo(f"{kind}: {text}\n  repeat: {which}")
            click.echo(f"{done} of {len(work)} pairs, {totals} interleavings, {kinds}", err=True)
    click.echo(
        f"{len(work)} pairs x {totals} interleavings, harmed {kinds['harmed']}, false damage {kinds['false damage']}"
    )
    raise SystemExit(1 if sum(kinds.values()) else 0)


if __name__ == "__main__":
    main()
