"""`python -m bench faults`: one training, the same faults, with ckptkit and with stock Orbax.

Processes are killed at moments that are the same for every contender; ramdisks are wiped and the page cache with them,
bits of the newest checkpoint flipped. All is measured: the trainer really runs, dies, and comes back.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.environment import environment, store_result
from bench.fault_places import CONTENDERS, DEFAULT, Every, Places
from bench.fault_report import Reference, judge, show, summary
from bench.fault_run import Job, Outcome, run
from bench.fault_schedule import ceiling_s, plan_faults, text_of
from bench.fault_tuning import first_guess, learned, sweep
from ckptkit.goodput import load_run
from ckptkit.launch import ExitCode
from ckptkit.launch.faults import Fault
from tools.corpus import build_corpus
from trainer.config import PRESETS

_PROBE_STEPS = 8
_STEPS_MIN = 4
_OVERTIME = 3.0  # times the seconds of a run, and then it is called unfinished
_LIMIT_MIN_S = 120.0  # of a short run, whose starts alone may take longer than that on a busy machine
_START_LIMIT_S = 600.0
_CALIBRATION_SEED = 1_000_003  # added to the seed: no measured schedule has it


@dataclass(slots=True)
class Campaign:
    """All runs of one call."""

    job: Job
    seconds: float
    sweep_seconds: float
    mtbf_s: float
    trace: Path | None
    system: str | None
    ramdisk: Path
    disk: Path
    kept: Path | None
    say: Any
    sweeps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def measure(self, contenders: tuple[str, ...], repeats: int) -> dict[str, Any]:
        """Reference, calibration, then the contenders alternating under the same schedules."""
        preset = PRESETS[self.job.state]
        build_corpus("stdlib", str(self.job.shared / "corpus"), preset.model.size.seq_len + 1)
        probe = self._undisturbed(_PROBE_STEPS)  # compiles for all later runs, and measures a step
        reference = self._undisturbed(
            self._budget(self.seconds, replace(probe, start_s=probe.start_s - probe.compile_s))
        )
        self.say(
            f"undisturbed: {reference.steps} steps of {reference.step_s:.3f} s, the first {reference.start_s:.1f} s "
            "after the launch"
        )
        every = {name: self._tune(name, reference) for name in contenders}
        runs: list[dict[str, Any]] = []
        schedules: list[tuple[Fault, ...]] = []
        for repeat in range(repeats):
            schedules.append(self._faults(self.job.seed + repeat, self.seconds))
            for name in contenders[repeat % len(contenders) :] + contenders[: repeat % len(contenders)]:
                found = self._run(name, every[name], reference, reference.steps, schedules[-1], self.seconds)
                runs.append({"contender": name, "repeat": repeat, **found})
                self.say(_line(runs[-1]))
        useful_s = reference.steps * reference.step_s
        times = {"steps": reference.steps, "start_s": reference.start_s, "step_s": reference.step_s}
        ceilings = [useful_s / ceiling_s(faults, **times) for faults in schedules]
        return {
            "settings": {
                **times,
                "state": self.job.state,
                "processes": self.job.processes,
                "seed": self.job.seed,
                "seconds": self.seconds,
                "sweep_seconds": self.sweep_seconds,
                "mtbf_s": self.mtbf_s,
                "trace": None if self.trace is None else self.trace.name,
                "every": {name: str(each) for name, each in every.items()},
            },
            "sweeps": self.sweeps,
            "schedules": [[text_of(fault) for fault in faults] for faults in schedules],
            "ceilings": ceilings,
            "runs": runs,
            "summary": summary(runs, ceilings, reference.step_s),
        }

    def _budget(self, seconds: float, probe: Reference) -> int:
        """Steps that a run with a free checkpoint takes about `seconds` for."""
        away_s = probe.start_s * (1.0 + seconds / self.mtbf_s)
        return max(_STEPS_MIN, round((seconds - away_s) / probe.step_s))

    def _faults(self, seed: int, seconds: float) -> tuple[Fault, ...]:
        horizon_s = _OVERTIME * seconds + _START_LIMIT_S
        return plan_faults(
            seed=seed,
            mtbf_s=self.mtbf_s,
            horizon_s=horizon_s,
            processes=self.job.processes,
            trace=self.trace,
            system=self.system,
        )

    def _undisturbed(self, steps: int) -> Reference:
        with self._places() as places:
            outcome = run(self.job, places, steps=steps, limit_s=_START_LIMIT_S + 10 * self.seconds)
            _check(outcome, "the undisturbed run")
            return Reference.of(places)

    def _tune(self, name: str, reference: Reference) -> Every:
        guess = first_guess(name, self.mtbf_s, reference.step_s)
        if self.sweep_seconds <= 0:
            return guess
        if name.startswith("orbax"):
            faults = self._faults(self.job.seed + _CALIBRATION_SEED, self.sweep_seconds)
            steps = min(reference.steps, self._budget(self.sweep_seconds, reference))

            def goodput_of(every: Every) -> float:
                found = self._run(name, every, reference, steps, faults, self.sweep_seconds)
                self.say(f"{name} every {every} steps, calibration: goodput {found['goodput']:.3f}")
                return found["goodput"] if found["finished"] else 0.0

            chosen, self.sweeps[name] = sweep(self.mtbf_s, reference.step_s, goodput_of)
            return chosen
        with self._places() as places:
            steps = max(_STEPS_MIN, min(reference.steps, round(self.sweep_seconds / reference.step_s)))
            outcome = run(
                self.job, places, steps=steps, contender=name, every=guess, limit_s=_START_LIMIT_S + 10 * self.seconds
            )
            _check(outcome, f"the calibration of {name}")
            events = [event for log in load_run(places.events) for event in log if event.process == 0]
        chosen = learned(name, events, self.mtbf_s, reference.step_s)
        self.say(f"{name}: by its own formula every {chosen} steps")
        return chosen

    def _run(
        self, name: str, every: Every, reference: Reference, steps: int, faults: tuple[Fault, ...], seconds: float
    ) -> dict[str, Any]:
        with self._places() as places:
            limit = limit_s(seconds, reference.start_s)
            outcome = run(self.job, places, steps=steps, contender=name, every=every, faults=faults, limit_s=limit)
            if self.kept is not None:
                self.kept.mkdir(parents=True, exist_ok=True)
                number = len(list(self.kept.iterdir()))
                shutil.copytree(places.events, self.kept / f"{number:02}-{name}-every-{every.durable}")
            return judge(places, outcome, reference, steps)

    @contextmanager
    def _places(self) -> Iterator[Places]:
        made = tempfile.mkdtemp(prefix="run-", dir=self.disk)
        places = Places(disk=Path(made), ram=Path(tempfile.mkdtemp(prefix="ckptkit-faults-", dir=self.ramdisk)))
        places.ram.rmdir()
        try:
            yield places
        finally:
            places.remove()


def limit_s(seconds: float, start_s: float) -> float:
    """Seconds after which a run of about `seconds` is called unfinished."""
    return max(_LIMIT_MIN_S, _OVERTIME * seconds + start_s)


def _check(outcome: Outcome, what: str) -> None:
    if outcome.code != ExitCode.OK:
        said = "\n".join(outcome.last_lines)
        raise click.ClickException(f"{what} ended with {outcome.code.name}:\n{said}")


def _line(found: dict[str, Any]) -> str:
    end = "" if found["finished"] else ", NEVER FINISHED"
    wrong = ", WRONG BITS" if found["wrong"] else ""
    return (
        f"repeat {found['repeat']}, {found['contender']}: goodput {found['goodput']:.3f} in "
        f"{found['elapsed_s']:.0f} s, {found['disruptions']} losses, {found['lost_work_s']:.1f} s of work lost"
        f"{end}{wrong}"
    )


@click.command(context_settings={"max_content_width": 120})
@click.option("--full", is_flag=True, help="Every contender.")
@click.option(
    "--contender", "asked", type=click.Choice(list(CONTENDERS)), multiple=True, help="Only these; repeatable."
)
@click.option("--state", type=click.Choice(list(PRESETS)), default="125m-cpu", show_default=True, help="The model.")
@click.option("--seconds", type=click.FloatRange(1), default=240.0, show_default=True, help="About how long a run is.")
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True, help="Schedules, each for all contenders."
)
@click.option("--mtbf", "mtbf_s", type=click.FloatRange(1), default=60.0, show_default=True, help="Seconds per fault.")
@click.option("--sweep-seconds", type=float, help="Length of a calibration run; 0: none.  [default: half of --seconds]")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Recorded failures to play."
)
@click.option("--system", help="Of a trace with several systems.  [default: the one with most failures]")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Of the job, one device each.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of training and schedules.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every run, as JSON.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the events of each run below it, for `ckptkit goodput`.",
)
@click.option("--ramdisk", type=click.Path(path_type=Path), default=Path("/dev/shm"), show_default=True)
@click.option("--disk", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()), show_default=True)
def main(
    full: bool,
    asked: tuple[str, ...],
    state: str,
    seconds: float,
    repeats: int,
    mtbf_s: float,
    sweep_seconds: float | None,
    trace: Path | None,
    system: str | None,
    processes: int,
    seed: int,
    json_path: Path | None,
    keep: Path | None,
    ramdisk: Path,
    disk: Path,
) -> None:
    """Trains under faults with ckptkit and with stock Orbax, and reports the use of the time."""
    if full and asked:
        raise click.UsageError("--full is every contender; leave --contender out")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    console = Console(stderr=True)
    where = environment(str(ramdisk), str(disk))
    home = Path(tempfile.mkdtemp(prefix="ckptkit-faults-", dir=disk))
    try:
        campaign = Campaign(
            job=Job(state=state, seed=seed, processes=processes, shared=home / "shared"),
            seconds=seconds,
            sweep_seconds=seconds / 2 if sweep_seconds is None else sweep_seconds,
            mtbf_s=mtbf_s,
            trace=trace,
            system=system,
            ramdisk=ramdisk,
            disk=home,
            kept=keep,
            say=lambda text: console.print(text, markup=False),
        )
        contenders = tuple(CONTENDERS) if full else tuple(name for name in CONTENDERS if name in (asked or DEFAULT))
        result = {"benchmark": "faults", "environment": where, **campaign.measure(contenders, repeats)}
    finally:
        shutil.rmtree(home, ignore_errors=True)
    show(result, Console())
    store_result(result, json_path)
