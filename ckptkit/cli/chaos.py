"""`ckptkit chaos`."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import DRY_RUN, JSON, seconds
from ckptkit.cli.parsed import named_number
from ckptkit.cli.text import count_text, print_json, print_line, print_table
from ckptkit.cli.worker_options import COLD, COMMAND, COMMAND_SETTINGS, DEVICES, EVENTS, HANG, PROCESSES
from ckptkit.events import EventLog
from ckptkit.goodput import goodput_report, headline, load_run
from ckptkit.launch import (
    ExitCode,
    HangPolicy,
    Hooks,
    Launcher,
    OncePrinter,
    RestartPolicy,
    WarmStart,
    Workers,
    next_attempt,
)
from ckptkit.launch.attached import AttachedJob
from ckptkit.launch.chaos import Chaos, ChaosRun
from ckptkit.launch.faults import Fault, FaultKind, FaultPlan, Hazard
from ckptkit.launch.harm import FullDisk, LocalBucket, flipped
from ckptkit.launch.printer import say_on_stderr
from ckptkit.snapshot.state_digest import STATE_DIGEST
from ckptkit.util.clock import time_text

_FORMAT = "ckptkit.chaos/1"
_RUNS = ("disturbed", "undisturbed")


@click.command(context_settings=COMMAND_SETTINGS)
@COMMAND
@click.option("--attach", metavar="STATUS", help="Hit the job of `ckptkit run --status STATUS`, and start none.")
@PROCESSES
@click.option(
    "--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="Take them as those of N hosts."
)
@DEVICES
@click.option("--faults", type=click.IntRange(min=1), default=5, show_default=True, help="Faults in all.")
@seconds("--mtbf", "mtbf_s", least=0.01, default=30.0, help="Mean time from a step of the job to the next fault.")
@click.option(
    "--kind",
    "kinds",
    type=named_number("KIND:WEIGHT"),
    multiple=True,
    help="kill, host (all its processes), freeze, preempt, fill or outage, with its weight [default: kill:1].",
)
@seconds("--for", "lasting_s", least=0.01, default=5.0, help="A freeze, a full disk and an outage last so long.")
@click.option("--fill", metavar="DIR", help="For `fill`: fill the file system of DIR, which must not be that of /.")
@click.option(
    "--bucket",
    metavar="NAME=DIR",
    help="For `outage`: serve gs://NAME to the job, with its objects in DIR.",
)
@click.option(
    "--wipe",
    "wipes",
    type=named_number("DIR:CHANCE"),
    multiple=True,
    help="Empty this directory at a fault, with this chance; {process} and {host} are the victim's. Repeatable.",
)
@click.option(
    "--flip",
    "flips",
    type=named_number("DIR:CHANCE"),
    multiple=True,
    help="Flip one bit of one file below it at a fault, with this chance. Repeatable.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed plans the same faults.")
@HANG
@COLD
@EVENTS
@click.option("--compare", is_flag=True, help="Run COMMAND undisturbed too, and compare the states at the end.")
@DRY_RUN
@JSON
def chaos(
    command: tuple[str, ...],
    attach: str | None,
    processes: int,
    hosts: int,
    devices_per_process: int | None,
    faults: int,
    mtbf_s: float,
    kinds: tuple[tuple[str, float], ...],
    lasting_s: float,
    fill: str | None,
    bucket: str | None,
    wipes: tuple[tuple[str, float], ...],
    flips: tuple[tuple[str, float], ...],
    seed: int,
    hang: HangPolicy | None,
    cold: bool,
    events: str | None,
    compare: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run COMMAND as `ckptkit run` does, while faults hit it, and report what each cost.

    The faults are real: processes are killed, directories are emptied, bits are flipped. In COMMAND, {run} is replaced
    by `disturbed`, with --compare also by `undisturbed`: give each its own directories. The states at the end are
    compared if COMMAND calls `ckptkit.state_digest(state)` there.

    With --attach the faults hit a job that runs on this host already. It goes on when this command has ended.
    """
    if bool(command) == (attach is not None):
        raise click.UsageError("no command to run: give it after --" if attach is None else "--attach runs no command")
    if attach is not None and (compare or bucket is not None or events is not None):
        raise click.UsageError("--attach goes without --compare, --bucket and --events")
    if compare and not any("{run}" in word for word in command):
        raise click.UsageError("--compare runs COMMAND twice: give each run its own directories, by {run} in COMMAND")
    try:
        plan = FaultPlan(
            seed=seed,
            mtbf_s=mtbf_s,
            count=faults,
            weights=cast("Mapping[FaultKind, float]", dict(kinds or [("kill", 1.0)])),
            lasting_s=lasting_s,
            wipes=tuple(Hazard(path=os.path.abspath(path), chance=chance) for path, chance in wipes),
            flips=tuple(Hazard(path=os.path.abspath(path), chance=chance) for path, chance in flips),
            hosts=hosts,
        )
        disk = None if fill is None else FullDisk(os.path.abspath(fill))
        job = None if attach is None else AttachedJob(Path(attach))
        planned = tuple(plan.faults(processes if job is None else job.processes))
        if dry_run:
            _show_plan(planned)
            return Exit.OK
        flip = partial(flipped, chance=random.Random(f"flips {seed}"))
        strike = partial(Chaos, planned, lasting_s=lasting_s, disk=disk, flip=flip, say=say_on_stderr)
        if job is not None:
            run, verdict, log = strike().attach(job), None, None
        else:
            log = None if events is None else Path(events.replace("{run}", _RUNS[0])) / "launcher.jsonl"
            with _served(bucket) as served, tempfile.TemporaryDirectory(prefix="ckptkit-chaos-") as home:

                def workers(run: str) -> Workers:
                    return Workers(
                        [word.replace("{run}", run) for word in command],
                        processes=processes,
                        devices_per_process=devices_per_process,
                        env={
                            **({} if served is None else served.env),
                            STATE_DIGEST: str(Path(home) / f"{run}-{{process}}"),
                        },
                        warm=WarmStart(is_cold=cold),
                    )

                notes = None if log is None else EventLog(log, process=-1)

                def launcher(hooks: Hooks, first_attempt: int) -> Launcher:
                    return Launcher(
                        workers(_RUNS[0]),
                        policy=RestartPolicy(restarts=2 * faults + 3, backoff_s=0.0, grace_s=0.1),
                        hang=hang,
                        first_attempt=first_attempt,
                        events=notes,
                        hooks=hooks,
                    )

                run = strike(bucket=served).run(
                    launcher, first_attempt=next_attempt(log), on_output=OncePrinter(sys.stderr if as_json else None)
                )
                verdict = _verdict(run, workers(_RUNS[1]), Path(home), as_json) if compare else None
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found = _found(run, plan, verdict)
    if as_json:
        print_json(found)
    else:
        _show(run, found, None if log is None else log.parent)
    sys.stdout.flush()
    return Exit.DIFFERENT if verdict == "different" else Exit(int(run.code or 0))


@contextmanager
def _served(bucket: str | None) -> Iterator[LocalBucket | None]:
    """The bucket of `NAME=DIR`, while the block runs."""
    if bucket is None:
        yield None
        return
    name, equals, directory = bucket.partition("=")
    if not name or not equals or not directory:
        raise click.BadParameter(f"{bucket!r}; write NAME=DIR", param_hint="--bucket")
    served = LocalBucket(Path(directory), (name,))
    try:
        yield served
    finally:
        served.close()


def _verdict(run: ChaosRun, workers: Workers, home: Path, as_json: bool) -> str:
    """`equal`, `different`, `no digest`, or `not compared` where one of the runs did not end well."""
    if run.code != ExitCode.OK:
        return "not compared"
    say_on_stderr("chaos: the same job without faults")
    hooks = Hooks(on_output=OncePrinter(sys.stderr if as_json else None))
    if Launcher(workers, policy=RestartPolicy(restarts=0), hooks=hooks).run() != ExitCode.OK:
        return "not compared"
    told = [{path.name.partition("-")[2]: path.read_text() for path in home.glob(f"{run}-*")} for run in _RUNS]
    if not told[0] or not told[1]:
        return "no digest"
    return "equal" if told[0] == told[1] else "different"


def _found(run: ChaosRun, plan: FaultPlan, verdict: str | None) -> dict[str, Any]:
    back_s = [each.back_s for each in run.injected if each.back_s is not None]
    return {
        "format": _FORMAT,
        "seed": plan.seed,
        "code": None if run.code is None else int(run.code),
        "seconds": run.seconds,
        "faults": [asdict(each) for each in run.injected],
        "unplanned": list(run.unplanned),
        "back_s_p50": median(back_s) if back_s else None,
        "back_s_max": max(back_s, default=None),
        "steps_repeated": sum(each.repeated or 0 for each in run.injected),
        "state": verdict,
    }


def _show_plan(faults: Sequence[Fault]) -> None:
    for fault in faults:
        also = [*(f"empty {path}" for path in fault.wipes), *(f"flip a bit below {path}" for path in fault.flips)]
        line = f"fault {fault.number}: {time_text(fault.after_s)} after a step, {fault.text}"
        print_line("; ".join([line, *also]))


def _show(run: ChaosRun, found: Mapping[str, Any], events: Path | None) -> None:
    print_line()
    rows = [
        (
            str(each.fault.number),
            time_text(each.at_s),
            "; ".join(each.did),
            "-" if each.back_s is None else time_text(each.back_s),
            "-" if each.repeated is None else str(each.repeated),
        )
        for each in run.injected
    ]
    if rows:
        titles = ("fault", "at", "what", "next step after", "steps again")
        print_table([(title, title != "what") for title in titles], rows)
        print_line()
    back = (
        ""
        if found["back_s_p50"] is None
        else (f"; next step after {time_text(found['back_s_p50'])} (p50), {time_text(found['back_s_max'])} at most")
    )
    how = "goes on" if run.code is None else "ended well" if run.code == ExitCode.OK else f"ended with {run.code.name}"
    faults = count_text(len(run.injected), "fault")
    print_line(f"the job {how} after {time_text(run.seconds)}: {faults}{back}, {found['steps_repeated']} steps again")
    for line in run.unplanned:
        print_line(f"  {line}")
    if events is not None:
        try:
            print_line(headline(goodput_report(load_run(events))))
        except (ValueError, FileNotFoundError) as error:
            print_line(f"no goodput: {error}")
    if found["state"] is not None:
        print_line(_STATE[found["state"]])


_STATE = {
    "equal": "state at the end: equal to that of the undisturbed run, on every process",
    "different": "state at the end: DIFFERENT from that of the undisturbed run",
    "no digest": "state at the end: not compared; call ckptkit.state_digest(state) at the end of the job",
    "not compared": "state at the end: not compared, since a run did not end well",
}
