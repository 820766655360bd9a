"""`python -m tests.killed`: commands are killed after each of their storage operations, and then run again.

Short without `--full`: a few points of each command.
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import click

from ckptkit.cli import main as command_line
from ckptkit.testing.crash import can_trace
from tests.killed.campaign import Campaign
from tests.killed.commands import COMMANDS

_MEDIA = ("disk", "bucket")


@click.command(context_settings={"max_content_width": 120})
@click.option("--full", is_flag=True, help="Every point; without it a few of each command.")
@click.option("--command", "names", type=click.Choice(list(COMMANDS)), multiple=True, help="[default: all]")
@click.option("--medium", "media", type=click.Choice(_MEDIA), multiple=True, help="[default: all]")
@click.option("--point", type=int, help="Only the state after this operation of the command.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of points without --full.")
def main(full: bool, names: tuple[str, ...], media: tuple[str, ...], point: int | None, seed: int) -> None:
    """Kills commands after each of their storage operations, runs them again, and looks whether others are harmed."""
    points = unfinished = harmed = 0
    chosen = names or tuple(COMMANDS)
    for medium in media or _MEDIA:
        if medium == "disk" and not can_trace():
            raise click.ClickException("strace is not there or may not trace; install it (make setup-system)")
        with (
            tempfile.TemporaryDirectory(prefix="ckptkit-killed-") as home,
            Campaign(Path(home), medium, [COMMANDS[name] for name in chosen], command_line) as campaign,
        ):
            for name in campaign.names:
                count = 0
                for number, what, failures in campaign.checked(name, full=full, point=point, seed=seed):
                    count += 1
                    for each in failures:
                        click.echo(f"{each.kind}: {name}, {medium}, after {number} {what}: {each.text}")
                        unfinished += each.kind == "unfinished"
                        harmed += each.kind == "harmed"
                    if failures:
                        words = ("python", "-m", "tests.killed", "--medium", medium, "--command", name)
                        click.echo(f"  repeat: {shlex.join([*words, '--point', str(number)])}")
                click.echo(f"{medium}: {name}: {count} points, {campaign.states(name)} states", err=True)
                points += count
    click.echo(f"{len(chosen)} commands x {points} points, unfinished {unfinished}, harmed {harmed}")
    raise SystemExit(1 if unfinished or harmed else 0)


if __name__ == "__main__":
    main()
