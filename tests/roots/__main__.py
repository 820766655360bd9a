"""`python -m tests.roots`: every command over every strange root, on a disk, in the shipped bucket and on a mount.

Cells run in worker processes, so that a command that ends its process, takes all memory or never returns is a failure
of its cell and of no other.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shlex
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from tests.mount import why_not
from tests.roots import ROOTS, Campaign, Cell, Failure, Tally, all_cells, chosen_cells
from tests.roots.campaign import MEDIA, failure_lines
from tests.roots.commands import ACTIONS

CELL_S_MAX = 120.0  # slower is hanging: the slowest cell takes 3 s
_MEMORY_BYTES = 16 << 30  # of addresses, of which libraries map more than they touch
_BATCH = 400  # cells of one worker: what it has built is of use for the next


@click.command(context_settings={"max_content_width": 120})
@click.option("--full", is_flag=True, help="Every cell; without it one of each root and each command.")
@click.option(
    "--medium",
    "media",
    type=click.Choice(MEDIA),
    multiple=True,
    help="[default: all]",
)
@click.option("--root", "roots", multiple=True, metavar="NAME", help="Only this root; repeatable, and implies --full.")
@click.option("--action", "actions", multiple=True, metavar="NAME", help="Only this command; repeatable, as --root.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of cells without --full.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Processes at a time.")
@click.option("--list", "listed", is_flag=True, help="Name the roots and the commands, and run nothing.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    full: bool,
    media: tuple[str, ...],
    roots: tuple[str, ...],
    actions: tuple[str, ...],
    seed: int,
    workers: int,
    listed: bool,
    worker: bool,
) -> None:
    """Runs every command of ckptkit over roots with strange things in them, and judges what is left."""
    if worker:
        _work()
        return
    if listed:
        _list()
        return
    for name in (*roots, *actions):
        if name not in ROOTS and name not in ACTIONS:
            raise click.UsageError(f"{name!r} is neither a root nor a command; --list names both")
    chosen, places = {name: ROOTS[name] for name in roots or ROOTS}, _possible(media or MEDIA)
    if full or roots or actions:
        cells = all_cells(chosen, places, actions or ACTIONS)
    else:
        cells = [cell for medium in places for cell in chosen_cells(ROOTS, medium, seed)]
    tally = campaign(cells, workers)
    click.echo(tally.line())
    raise SystemExit(1 if tally.failures else 0)


def _possible(media: Sequence[str]) -> Sequence[str]:
    if "mount" not in media or (reason := why_not()) is None:
        return media
    click.echo(f"nothing runs on a mounted bucket: {reason}", err=True)
    return [medium for medium in media if medium != "mount"]


def repeat(cell: Cell) -> str:
    """The command that runs this cell again."""
    flags = ["--medium", cell.medium, "--root", cell.root, "--action", cell.action]
    return shlex.join(["python", "-m", "tests.roots", *flags])


def campaign(cells: Sequence[Cell], workers: int) -> Tally:
    """Runs the cells in worker processes, prints each failure when it is found, and returns all of them."""
    tally, alone = Tally(), threading.Lock()

    def note(cell: Cell, failures: list[Failure]) -> None:
        with alone:
            tally.add(cell, failures)
            for failure in failures:
                click.echo(failure_lines(cell, failure, repeat))
            if tally.cells % 500 == 0:
                click.echo(f"{tally.cells} of {len(cells)} cells, {len(tally.failures)} failures", err=True)

    batches = [cells[start : start + _BATCH] for start in range(0, len(cells), _BATCH)]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda batch: _run_batch(deque(batch), note), batches))
    return tally


def _run_batch(left: deque[Cell], note: Callable[[Cell, list[Failure]], None]) -> None:
    while left:
        ended = _run_worker(left, note)
        if left:  # the worker ended in the first of those that are left
            note(left.popleft(), [Failure(kind="internal error", text=ended)])


def _run_worker(left: deque[Cell], note: Callable[[Cell, list[Failure]], None]) -> str:
    """Takes the cells that a worker has done from `left`; returns how the worker ended."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.roots", "--worker"]
    with (
        tempfile.TemporaryDirectory(prefix="ckptkit-zoo-") as home,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**environ, "TMPDIR": home},
            cwd=Path(__file__).parents[2],
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([[cell.medium, cell.root, cell.action] for cell in left]))
        process.stdin.close()
        while left and select.select([process.stdout], [], [], CELL_S_MAX)[0]:
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                return f"the process ended with {process.wait()}: {errors.read()[-500:]}"
            note(left.popleft(), [Failure(**found) for found in json.loads(line)])
        if left:
            process.kill()
        return f"it had not returned after {CELL_S_MAX:g} s"


def _work() -> None:
    """Runs the cells that stdin names, and prints the failures of each as a line of JSON."""
    from ckptkit.cli import main as command

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cells = [Cell(medium=medium, root=root, action=action) for medium, root, action in json.load(sys.stdin)]
    with tempfile.TemporaryDirectory() as home, Campaign(Path(home), command, ROOTS) as running:
        for cell in cells:
            failures: list[dict[str, Any]] = [{"kind": found.kind, "text": found.text} for found in running.run(cell)]
            answers.write(json.dumps(failures) + "\n")
            answers.flush()


def _list() -> None:
    for name, each in ROOTS.items():
        click.echo(f"{name}: {each.line}{'' if each.on_bucket else ' On a disk alone.'}")
    click.echo()
    for name in ACTIONS:
        click.echo(name)


if __name__ == "__main__":
    main()
