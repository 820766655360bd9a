"""`ckptkit chaos`."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, cast

import click

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import DRY_RUN, JSON, Parsed, named_number, seconds
from ckptkit.cli.text import count_text, print_json, print_line, print_notes, print_table
from ckptkit.events import EVENTS_DIRECTORY, Event, EventLog
from ckptkit.goodput import GoodputReport, Part, goodput_page, goodput_report, headline, load_run, timeline_of
from ckptkit.launch import HangPolicy, Hooks, Launcher, OncePrinter, RestartPolicy, WarmStart, Workers, next_attempt
from ckptkit.launch.chaos import Chaos, ChaosRun, Targets
from ckptkit.launch.faults import ANY, PLACES, Fault, FaultKind, FaultPlan, Hazard
from ckptkit.launch.harm import FullDisk, LocalBucket, flipped, places_of
from ckptkit.launch.logs import say_on_stderr
from ckptkit.launch.policy import ExitCode
from ckptkit.launch.run_command import COLD, COMMAND, COMMAND_SETTINGS, DEVICES, EVENTS, HANG, PROCESSES
from ckptkit.launch.status import AttachedJob
from ckptkit.snapshot.state_digest import STATE_DIGEST
from ckptkit.util.clock import time_text
from ckptkit.util.whole_file import write_whole

_RUNS = ("disturbed", "undisturbed")


def _flip_of(text: str) -> tuple[str, float]:
    """`DIR:CHANCE`, or a chance for any directory of the job."""
    return named_number("DIR:CHANCE").parse(text if ":" in text else f"{ANY}:{text}")


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
    help="Empty this directory at a fault, with this chance: a path ({process} and {host} are the victim's), or ram, "
    "ssd or durable for the victim's tier. Repeatable.",
)
@click.option(
    "--flip",
    "flips",
    type=Parsed("DIR:CHANCE", _flip_of),
    metavar="[DIR:]CHANCE",
    multiple=True,
    help="Flip one bit of one file below it at a fault, with this chance; without DIR below any of the victim's tiers. "
    "Repeatable.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed plans the same faults.")
@HANG
@COLD
@EVENTS
@click.option(
    "--report",
    "report_dir",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write report.json, report.txt and goodput.html to this new directory, with the event logs of the job.",
)
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
    report_dir: Path | None,
    compare: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Run COMMAND as `ckptkit run` does, while faults hit it, and report what each cost.

    The faults are real: processes are killed, directories are emptied, bits are flipped. In COMMAND, {run} is replaced
    by `disturbed`, with --compare also by `undisturbed`: give each its own directories. The states at the end are
    compared if COMMAND calls `ckptkit.state_digest(state)` there.

    With --report and without --events, a manager that is given no event log writes one there.

    With --attach the faults hit a job that runs on this host already. The job continues when this command has ended.
    """
    if bool(command) == (attach is not None):
        raise click.UsageError("no command to run: give it after --" if attach is None else "--attach runs no command")
    if attach is not None and (compare or bucket is not None):
        raise click.UsageError("--attach goes without --compare and --bucket")
    if compare and not any("{run}" in word for word in command):
        raise click.UsageError("--compare runs COMMAND twice: give each run its own directories, by {run} in COMMAND")
    try:
        plan = FaultPlan(
            seed=seed,
            mtbf_s=mtbf_s,
            count=faults,
            weights=cast("Mapping[FaultKind, float]", dict(kinds or [("kill", 1.0)])),
            wipes=tuple(map(_hazard, wipes)),
            flips=tuple(map(_hazard, flips)),
            hosts=hosts,
        )
        disk = None if fill is None else FullDisk(os.path.abspath(fill))
        job = None if attach is None else AttachedJob(Path(attach))
        planned = tuple(plan.faults(processes if job is None else job.processes))
        if dry_run:
            _show_plan(planned, as_json)
            return Exit.OK
        logs = _log_directory(events, report_dir, is_attached=job is not None)
        notes = None if logs is None else EventLog(logs / "launcher.jsonl", process=-1)
        targets = Targets(disk=disk, places=lambda process: {} if logs is None else places_of(logs, process))
        strike = partial(
            Chaos,
            planned,
            lasting_s=lasting_s,
            flip=partial(flipped, chance=random.Random(f"flips {seed}")),
            events=notes,
            say=say_on_stderr,
        )
        if job is not None:
            run, verdict = strike(targets=targets).attach(job), None
        else:
            with _served(bucket) as served, tempfile.TemporaryDirectory(prefix="ckptkit-chaos-") as home:

                def workers(run: str) -> Workers:
                    env = {STATE_DIGEST: str(Path(home) / f"{run}-{{process}}")} | (
                        {} if served is None else served.env
                    )
                    if logs is not None and events is None and run == _RUNS[0]:
                        env[EVENTS_DIRECTORY] = str(logs)
                    words = [word.replace("{run}", run) for word in command]
                    warm = WarmStart(is_cold=cold)
                    return Workers(
                        words, processes=processes, devices_per_process=devices_per_process, env=env, warm=warm
                    )

                def launcher(hooks: Hooks, first_attempt: int) -> Launcher:
                    return Launcher(
                        workers(_RUNS[0]),
                        policy=RestartPolicy(restarts=2 * faults + 3, backoff_s=0.0, grace_s=0.1),
                        hang=hang,
                        first_attempt=first_attempt,
                        events=notes,
                        hooks=hooks,
                    )

                first = next_attempt(None if logs is None else logs / "launcher.jsonl")
                output = OncePrinter(sys.stderr if as_json else None)
                hit = strike(targets=replace(targets, bucket=served))
                run = hit.run(launcher, first_attempt=first, on_output=output)
                verdict = _verdict(run, workers(_RUNS[1]), Path(home), as_json) if compare else None
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    report = ChaosReport(run, seed, verdict, logs)
    if report_dir is not None:
        report.write(report_dir)
    if as_json:
        print_json(report.found)
    else:
        report.show()
    sys.stdout.flush()
    if verdict == "different":
        return Exit.DIFFERENT
    not_compared = verdict not in (None, "equal")
    is_untried = not run.injected and not run.code
    if is_untried:
        say_on_stderr("chaos: the job ended before the first fault came; give it more steps, or a shorter --mtbf")
    return Exit(int(run.code or not_compared or is_untried))


def _hazard(given: tuple[str, float]) -> Hazard:
    place, chance = given
    path = place if place in PLACES else os.path.abspath(place.replace("{run}", _RUNS[0]))
    return Hazard(path=path, chance=chance)


def _log_directory(events: str | None, report_dir: Path | None, *, is_attached: bool) -> Path | None:
    """Where the event logs of the job are. A report has its own, unless the job writes them elsewhere."""
    if report_dir is not None and report_dir.is_dir() and any(report_dir.iterdir()):
        raise click.BadParameter(
            f"{report_dir} is not empty: a report has a directory of its own", param_hint="--report"
        )
    if report_dir is not None:
        report_dir.mkdir(parents=True, exist_ok=True)
    if events is not None:
        return Path(events.replace("{run}", _RUNS[0]))
    return None if report_dir is None or is_attached else report_dir.absolute() / "events"


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


def _show_plan(faults: Sequence[Fault], as_json: bool) -> None:
    if as_json:
        print_json({"format": _FORMAT, "faults": [asdict(fault) for fault in faults]})
        return
    for fault in faults:
        also = [*(f"empty {path}" for path in fault.wipes), *(f"flip a bit below {path}" for path in fault.flips)]
        line = f"fault {fault.number}: {time_text(fault.after_s)} after a step, {fault.text}"
        print_line("; ".join([line, *also]))


_FORMAT = "ckptkit.chaos/1"
_P99_MIN = 100  # of fewer times the 99th percentile is the longest one
_STATE = {
    "equal": "state at the end: equal to that of the undisturbed run, on every process",
    "different": "state at the end: DIFFERENT from that of the undisturbed run",
    "no digest": "state at the end: not compared; call ckptkit.state_digest(state) at the end of the job",
    "not compared": "state at the end: not compared, since a run did not end well",
}


class ChaosReport:
    """A campaign that is over. `events`: the job's event logs; without them its goodput is not known."""

    def __init__(self, run: ChaosRun, seed: int, verdict: str | None, events: Path | None):
        self._run = run
        self._logs, self._goodput, self._no_goodput = _account(events)
        self.found = _found(run, seed, verdict, self._goodput)

    def show(self) -> None:
        """Prints a table of the faults, and what they cost."""
        run, found = self._run, self.found
        print_line()
        _show_faults(run)
        how = "goes on" if run.code is None else "ended well" if run.code == ExitCode.OK else f"ended: {run.code.name}"
        missed = f", {run.missed} more planned for a later time" if run.missed else ""
        print_line(f"the job {how} after {time_text(run.seconds)}: {count_text(len(run.injected), 'fault')}{missed}")
        print_notes([*run.unplanned, *_cost_lines(found)])
        print_line(f"no goodput: {self._no_goodput}" if self._goodput is None else headline(self._goodput))
        if found["state"] is not None:
            print_line(_STATE[found["state"]])

    def write(self, directory: Path) -> None:
        """Writes `report.json`, `report.txt` (what `show` prints) and, where the goodput is known, `goodput.html`."""
        shown = io.StringIO()
        with redirect_stdout(shown):
            self.show()
        write_whole(directory / "report.json", json.dumps(self.found, indent=2) + "\n")
        write_whole(directory / "report.txt", shown.getvalue().lstrip("\n"))
        if self._goodput is not None:
            page = goodput_page(self._goodput, timeline_of(self._logs), title="Goodput under faults")
            write_whole(directory / "goodput.html", page)


def _account(events: Path | None) -> tuple[list[list[Event]], GoodputReport | None, str]:
    """The logs of the job, their account, and why there is none."""
    if events is None:
        return [], None, "give --report, or --events with the directory of the job's event logs"
    try:
        logs = load_run(events)
        return logs, goodput_report(logs), ""
    except (ValueError, FileNotFoundError) as error:
        return [], None, f"{events}: {error}"


def _found(run: ChaosRun, seed: int, verdict: str | None, account: GoodputReport | None) -> dict[str, Any]:
    back_s = [each.back_s for each in run.injected if each.back_s is not None]
    return {
        "format": _FORMAT,
        "seed": seed,
        "code": None if run.code is None else int(run.code),
        "seconds": run.seconds,
        "faults": [asdict(each) for each in run.injected],
        "faults_missed": run.missed,
        "unplanned": list(run.unplanned),
        "back_s_samples": len(back_s),
        "back_s_p50": median(back_s) if back_s else None,
        "back_s_p99": quantiles(back_s, n=100, method="inclusive")[98] if len(back_s) >= _P99_MIN else None,
        "back_s_max": max(back_s, default=None),
        "steps_repeated": sum(each.repeated or 0 for each in run.injected),
        "repeated_s": None if account is None else account.parts_s[Part.WASTED],
        "goodput": None if account is None else account.goodput.ml_goodput,
        "state": verdict,
    }


def _show_faults(run: ChaosRun) -> None:
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


def _cost_lines(found: Mapping[str, Any]) -> Sequence[str]:
    samples, p99_s = found["back_s_samples"], found["back_s_p99"]
    if not samples:
        return ["no step came after a fault"] if found["faults"] else []
    times = f"{time_text(found['back_s_p50'])} after the fault"
    if samples > 1:
        p99 = "" if p99_s is None else f"p99 {time_text(p99_s)}, "
        times = f"p50 {times}, {p99}at most {time_text(found['back_s_max'])} ({count_text(samples, 'fault')})"
    lost = count_text(found["steps_repeated"], "step")
    lost_s = "" if found["repeated_s"] is None else f", {time_text(found['repeated_s'])}"
    return [f"next step: {times}", f"work lost: {lost}{lost_s}"]
