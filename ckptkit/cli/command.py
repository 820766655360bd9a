"""The commands and their flags: flags to arguments, a library function, its records to text or JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from ckptkit.cli.assemble import extract, merge
from ckptkit.cli.convert import convert
from ckptkit.cli.copy import copy
from ckptkit.cli.diff import diff
from ckptkit.cli.doctor import doctor
from ckptkit.cli.exits import Exit, exit_of, exit_with, quiet_libraries
from ckptkit.cli.goodput import goodput
from ckptkit.cli.options import HOST_ID, JSON, MEMORY, TIERS, TIMEOUT, fast_tiers
from ckptkit.cli.reshard import reshard
from ckptkit.cli.show_inspection import matching, show_inspection
from ckptkit.cli.show_outlook import show_outlook
from ckptkit.cli.show_statistics import show_statistics, statistics, stats_json
from ckptkit.cli.show_steps import show_steps
from ckptkit.cli.show_verification import progress_line, show_scrub, show_verification
from ckptkit.cli.simulate import simulate
from ckptkit.cli.text import print_json
from ckptkit.cli.tiers import tiers
from ckptkit.cli.tune import explain, tune
from ckptkit.cli.upkeep import du, pin, prune, rollback, unpin
from ckptkit.formats import inspect as inspect_path
from ckptkit.inspection import list_steps, outlook
from ckptkit.verification import scrub as scrub_root
from ckptkit.verification import verify as verify_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (default: the process's own) and returns its exit code. Never raises."""
    try:
        with quiet_libraries():
            code = commands.main(
                None if arguments is None else list(arguments), prog_name="ckptkit", standalone_mode=False
            )
        return int(code or Exit.OK)
    except BrokenPipeError:  # `ckptkit ... | head`: what reads us has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.ERROR
    except SystemExit as end:  # rich's own answer to a broken pipe
        return int(end.code or Exit.OK)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the top of a process: one message, never a traceback
        return exit_of(error)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Look at checkpoints, prove them, mend them, keep them in order. Needs no accelerator."""


@commands.command()
@click.argument("path")
@JSON
@click.option("--depth", type=click.IntRange(min=1), help="Group leaves by the first N parts of their names.")
@click.option("--match", "pattern", metavar="GLOB", help="Only leaves whose name, or item:name, matches.")
@click.option("--sort", type=click.Choice(["name", "bytes"]), help="Order of the leaves [default: as they were saved].")
@click.option(
    "--stats", is_flag=True, help="Read every byte: min, max, mean, std, norm, NaN and Inf counts of each leaf."
)
@MEMORY
@TIMEOUT
def inspect(
    path: str,
    as_json: bool,
    depth: int | None,
    pattern: str | None,
    sort: str | None,
    stats: bool,
    memory_bytes: int,
    timeout_s: float,
) -> int:
    """Say what PATH is: a step directory (ckptkit's or Orbax's), an item in one, a root with steps, a slot, or a
    checkpoint in another format (safetensors, npz, torch's zip, Flax's msgpack).

    Without --stats only metadata is read. PATH is local, file://, gs:// or s3://.
    """
    found = matching(inspect_path(path, timeout_s=timeout_s), pattern, sort)
    known = statistics(found, memory_bytes, timeout_s) if stats else None
    if as_json:
        print_json({**found.to_json(depth=depth or 1), **({} if known is None else {"stats": stats_json(known)})})
    else:
        show_inspection(found, depth)
        if known is not None:
            show_statistics(known)
    return exit_with(found.problems)


@commands.command()
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


@commands.command("plan-restore")
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


@commands.command()
@click.argument("path")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only this step.")
@JSON
@TIMEOUT
def verify(path: str, step: int | None, as_json: bool, timeout_s: float) -> int:
    """Read every byte of the saves at PATH and compare it with the digests taken when it was saved.

    PATH is a root, a step directory or an item in one (local, file:// or gs://), or a fast tier, or a directory in it.
    """
    with progress_line() as progress:
        found = verify_path(path, step, timeout_s=timeout_s, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        show_verification(found)
    findings = [str(finding) for proof in found.steps for finding in proof.findings]
    return exit_with([*found.problems, *findings])


@commands.command()
@click.argument("root")
@TIERS
@HOST_ID
@click.option("--repair", is_flag=True, help="Mend what another copy has, put aside what none has.")
@click.option("--dry-run", is_flag=True, help="Say what --repair would do, and change nothing (as without --repair).")
@JSON
@TIMEOUT
def scrub(
    root: str,
    tiers: tuple[str, ...],
    host_id: str | None,
    repair: bool,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Prove every copy of every save of ROOT on this host, and mend damaged ones from another copy of the same save."""
    host = fast_tiers(tiers, host_id)
    with progress_line() as progress:
        found = scrub_root(
            root, tiers, repair=repair and not dry_run, host_id=host, timeout_s=timeout_s, progress=progress
        )
    if as_json:
        print_json(found.to_json())
    else:
        show_scrub(found)
    left = [str(finding) for finding in found.findings] if found.damaged else []
    return exit_with([*found.problems, *left])


_OTHERS = (convert, copy, diff, doctor, du, explain, extract, goodput, merge, pin, prune, reshard, rollback, simulate)
for each in (*_OTHERS, tiers, tune, unpin):
    commands.add_command(each)
