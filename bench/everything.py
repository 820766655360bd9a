"""`python -m bench all`: every benchmark within a time budget, its JSON stored, the report rendered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from bench.render import write
from bench.rows import RESULTS, newest_results
from bench.slower import compared
from ckptkit.util.clock import Deadline

_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One benchmark. `minutes` is what it takes on two quiet cores: with less left it is not begun."""

    name: str
    words: tuple[str, ...] = ()
    minutes: float


# Of stock Orbax under faults: the peer is the better one, and nobody knows which it is before both were measured.
_BOTH_WAYS = ("--contender", "ckptkit", "--contender", "orbax", "--contender", "orbax-sync")
# In order of what a reader misses most.
ENTRIES = (
    Entry(name="stall", minutes=8),
    Entry(name="commit", minutes=5),
    Entry(name="restore", minutes=5),
    Entry(name="first", minutes=35),
    Entry(name="corruption", minutes=1),
    Entry(name="kill", words=("--kills", "50"), minutes=8),
    Entry(name="hosts", minutes=4),
    Entry(name="durable", minutes=8),
    Entry(name="proof", minutes=2),
    Entry(name="gather", minutes=1),
    Entry(name="unchanged", words=("--megabytes", "1500"), minutes=10),
    Entry(name="leaf", minutes=6),
    Entry(name="herd", minutes=1),
    Entry(name="crashpoints", minutes=1),
    Entry(name="policy", minutes=3),
    Entry(name="simulate", minutes=1),
    Entry(name="inspect", minutes=25),
    Entry(name="convert", words=("--size", "512MB"), minutes=10),
    Entry(name="broadcast", minutes=8),
    Entry(name="simulator", words=("--runs", "10"), minutes=12),
    Entry(name="faults", words=_BOTH_WAYS, minutes=80),
)
SMALL = {  # for a machine that has no time: shapes and files are the same, the figures mean little
    "stall": ("--scale", "0.002", "--repeats", "2"),
    "commit": ("--scale", "0.002", "--repeats", "2"),
    "restore": ("--scale", "0.002", "--repeats", "2"),
    "first": ("--gb", "0.01", "--repeats", "1", "--contender", "ckptkit", "--contender", "orbax_async"),
    "durable": ("--scale", "0.002", "--repeats", "2"),
    "corruption": ("--faults", "10"),
    "kill": ("--processes", "2", "--kills", "2"),
    "hosts": ("--hosts", "2", "--kills", "2"),
    "proof": ("--pairs", "3", "--megabytes", "8"),
    "gather": ("--processes", "100", "--repeats", "2"),
    "unchanged": ("--megabytes", "2", "--repeats", "1"),
    "leaf": ("--processes", "2", "--megabytes", "2", "--repeats", "1"),
    "herd": ("--hosts", "20", "--reads", "4", "--rate", "100"),
    "crashpoints": (),
    "policy": ("--runs", "2", "--failures", "20"),
    "simulate": ("--days", "2", "--runs", "10", "--repeats", "1"),
    "inspect": ("--leaves", "20", "--repeats", "1", "--orbax-repeats", "1"),
    "convert": ("--size", "20MB", "--repeats", "1", "--obvious-repeats", "1", "--job", "reshard"),
    "broadcast": ("--replicas", "2", "--megabytes", "2", "--rate", "400", "--repeats", "1"),
    "simulator": ("--runs", "4", "--run-s", "30"),
    "faults": ("--state", "tiny", "--seconds", "20", "--mtbf", "10", "--repeats", "1", "--sweep-seconds", "0"),
}
_SMALL_MINUTES = 0.2
_CLEANUP_S = 30.0


def run_all(entries: Sequence[Entry], directory: Path, *, minutes: float, small: bool) -> dict[str, str]:
    """Runs them in order, each in a process of its own; name to what became of it: `done`, or why not."""
    deadline = Deadline(60.0 * minutes)
    told: dict[str, str] = {}
    for entry in entries:
        needs_s, left_s = 60.0 * (_SMALL_MINUTES if small else entry.minutes), deadline.left_s
        took = ""
        if left_s < needs_s:
            told[entry.name] = f"left out: {left_s / 60:.1f} minutes are left, it takes {needs_s / 60:g}"
        else:
            told[entry.name] = _run(entry, directory, left_s, SMALL[entry.name] if small else ())
            took = f" ({(left_s - deadline.left_s) / 60:.1f} minutes)"
        click.echo(f"{entry.name}: {told[entry.name]}{took}", err=True)
    return told


def _run(entry: Entry, directory: Path, limit_s: float, more: Sequence[str]) -> str:
    path = directory / f"{entry.name}.json"
    command = [sys.executable, "-m", "bench", entry.name, *entry.words, *more, "--json", str(path)]
    before = path.stat().st_mtime_ns if path.exists() else None
    with subprocess.Popen(command, cwd=_ROOT) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # not at once SIGKILL: what it has in memory goes with it
            try:
                process.wait(_CLEANUP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return f"stopped after {limit_s / 60:.1f} minutes: the budget is spent"
    if not path.exists() or path.stat().st_mtime_ns == before:
        return f"failed with code {code}"
    return "done" if code == 0 else f"done, with a bar that is not met (code {code})"


@click.command(context_settings={"max_content_width": 120})
@click.option(
    "--minutes", type=click.FloatRange(0.1), default=250.0, show_default=True, help="The budget, all together."
)
@click.option(
    "--only", type=click.Choice([entry.name for entry in ENTRIES]), multiple=True, help="Only it; repeatable."
)
@click.option("--machine", default=f"{len(os.sched_getaffinity(0))}core", show_default=True, help="For the directory.")
@click.option("--small", is_flag=True, help="Tiny states: shows that all run, measures nothing.")
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), help="Instead of bench/results/DATE-MACHINE.")
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Recorded failures for `policy`; without them it judges made-up ones.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Render REPORT.md and the README's table.")
def main(
    minutes: float,
    only: tuple[str, ...],
    machine: str,
    small: bool,
    into: Path | None,
    traces: Path | None,
    report: bool,
) -> None:
    """Runs every benchmark, stores what it measured, and renders the report. Wants a quiet machine."""
    if small and into is None:
        raise click.UsageError("--small measures nothing: give --into, so that it does not become the newest result")
    directory = into or RESULTS / f"{time.strftime('%Y-%m-%d', time.gmtime())}-{machine}"
    directory.mkdir(parents=True, exist_ok=True)
    entries = [entry for entry in ENTRIES if not only or entry.name in only]
    if traces is not None:
        recorded = ("--traces", str(traces.resolve()))
        entries = [replace(e, words=(*e.words, *recorded)) if e.name == "policy" else e for e in entries]
    stored = newest_results()
    told = run_all(entries, directory.resolve(), minutes=minutes, small=small)
    for path in (directory / f"{name}.json" for name, what in told.items() if what.startswith("done") and not small):
        click.echo("\n".join(compared(json.loads(path.read_text()), stored)))
    if report and into is None:
        for path in write(pictures=True):
            click.echo(path)
    raise SystemExit(0 if all(what == "done" for what in told.values()) else 1)
