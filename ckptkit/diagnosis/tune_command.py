"""`ckptkit tune` and `ckptkit explain`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import DRY_RUN, JSON, TIMEOUT, OutputFile, size
from ckptkit.cli.text import count_text, print_json, print_line, print_part, print_table, size_text
from ckptkit.diagnosis.tuner import Proposal, TunePlan, explain_checkpoint, measure, plan_tune
from ckptkit.diagnosis.tuner.forecasting import SaveForecast
from ckptkit.diagnosis.tuner.proposing import PROBE_BYTES
from ckptkit.inspection.records import FORMAT
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.util.clock import time_text
from ckptkit.util.whole_file import write_whole

_KNOBS = ("data_file_bytes", "write_concurrency", "copied_bytes", "read_ahead_bytes", "compression")
_NUMBERS = ("data file", "concurrency", "copied below", "read ahead")
_PROFILE = click.option(
    "--profile", "profile_path", metavar="FILE", help="A profile that tune wrote [default: the defaults]."
)


@click.command()
@click.argument("url", metavar="URL")
@click.option("--like", metavar="CHECKPOINT", help="Leaves as in this checkpoint, of any format; samples its bytes.")
@click.option("--output", type=OutputFile(), metavar="FILE", help="Write the profile here, for DurableProfile.load.")
@size("--probe", "probe_bytes", default=PROBE_BYTES, help="Bytes of one trial.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Trials of each profile.")
@DRY_RUN
@JSON
@TIMEOUT
def tune(
    url: str,
    like: str | None,
    output: Path | None,
    probe_bytes: int,
    rounds: int,
    dry_run: bool,
    as_json: bool,
    timeout_s: float,
) -> int:
    """Measure the durable root URL and propose a profile for it.

    Writes below URL/_ckptkit and deletes what it wrote.
    """
    plan = plan_tune(
        url, like=like, probe_bytes=probe_bytes, rounds=rounds, timeout_s=timeout_s, progress=_say_on_terminal
    )
    if dry_run:
        _show_plan(plan, as_json)
        return Exit.OK
    found = measure(plan, progress=_say_on_terminal)
    if output is not None:
        write_whole(output, found.profile.text())
    if as_json:
        print_json({"format": FORMAT, **found.to_json()})
    else:
        _show(found, output)
    return Exit.OK


@click.command()
@click.argument("url", metavar="URL")
@click.option("--like", metavar="CHECKPOINT", required=True, help="A checkpoint of any format with the same leaves.")
@_PROFILE
@click.option(
    "--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Number of processes of the job."
)
@click.option(
    "--unchanged", multiple=True, metavar="GLOB", help="Leaves with the bytes of the two saves before; repeatable."
)
@JSON
@TIMEOUT
def explain(
    url: str,
    like: str,
    profile_path: str | None,
    processes: int,
    unchanged: tuple[str, ...],
    as_json: bool,
    timeout_s: float,
) -> int:
    """Estimate the cost of a durable save to URL: files, requests, bytes, memory. Writes nothing."""
    profile = _loaded(profile_path)
    found = explain_checkpoint(
        url, like, durable=profile, processes=processes, unchanged=unchanged, timeout_s=timeout_s
    )
    if as_json:
        print_json({"format": FORMAT, "url": url, "like": like, **found.to_json()})
    else:
        _show_forecast(url, found)
    return Exit.OK


def _say_on_terminal(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"{what} ...", err=True)


def _loaded(path: str | None) -> DurableProfile:
    try:
        return DurableProfile() if path is None else DurableProfile.load(path)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--profile") from error


def _show_plan(plan: TunePlan, as_json: bool) -> None:
    if as_json:
        print_json({"format": FORMAT, **plan.to_json()})
        return
    trials = f"{count_text(len(plan.profiles), 'profile')}, {count_text(plan.rounds + 1, 'time')} each"
    print_line(
        f"{plan.url}: {size_text(plan.probe_bytes)} would be written, read and deleted with {trials}: "
        f"{size_text(plan.written_bytes)} in all"
    )
    print_line()
    rows = [_knobs(profile) for profile in plan.profiles]
    print_table([*((name, True) for name in _NUMBERS), ("compression", False)], rows)


def _show(found: Proposal, output: Path | None) -> None:
    put, got = time_text(found.latency.put_s), time_text(found.latency.get_s)
    print_line(f"{found.url}: a small object takes {put} to put, {got} to get")
    print_line()
    rows = [
        [*_knobs(trial.profile), _rate(trial.write_bytes_per_s), _rate(trial.read_bytes_per_s)]
        for trial in found.trials
    ]
    rates = [("written", True), ("read", True)]
    print_table([*((name, True) for name in _NUMBERS), ("compression", False), *rates], rows)
    rows = [[each.dtype, each.codec, f"{each.ratio:.2f}", _rate(each.bytes_per_s)] for each in found.compressions]
    print_part([("dtype", False), ("codec", False), ("stored", True), ("encoded", True)], rows)
    print_line()
    for reason in found.reasons:
        print_line(reason)
    if output is None:
        print_line("give --output FILE to write the profile")
    else:
        print_line(f'written: CheckpointManager(..., durable=DurableProfile.load("{output}"))')


def _show_forecast(url: str, found: SaveForecast) -> None:
    rows = [
        ["leaves", str(found.leaves)],
        ["pieces", str(found.pieces)],
        ["files", f"{found.files}, {found.data_files} of data"],
        ["requests", str(found.requests) if found.requests else "none: no bucket"],
        ["bytes", size_text(found.written_bytes)],
        *([["not written again", size_text(found.shared_bytes)]] if found.shared_bytes else []),
        ["memory besides the snapshot", f"{size_text(found.peak_bytes)} at most, in one process"],
    ]
    print_line(f"a save to {url} would take")
    print_table([("", False), ("", False)], rows)


def _knobs(profile: DurableProfile) -> list[str]:
    values: list[Any] = [getattr(profile, knob) for knob in _KNOBS]
    return [size_text(values[0]), str(values[1]), *map(size_text, values[2:4]), values[4] or "none"]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.0f} MB/s"
