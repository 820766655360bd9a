"""`python -m bench simulator`: the simulator against reality, fault-injected runs of the trainer.

Each run trains on 2 processes for a fixed time. Its seed draws its intervals and failures: a process is killed (its
ramdisk stays), or a host (a process with its ramdisk). The cost of saves, steps and restarts is fitted
on the first runs. For the others the simulator gets only the intervals and the planned failures.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import click
from rich.console import Console

from bench.environment import environment, store_result
from bench.simulator_fit import Planned, RunPlan, compare, fit
from bench.simulator_report import plot, show
from ckptkit.events import EventLog
from ckptkit.goodput import load_run
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from ckptkit.util.clock import monotonic_s

PROCESSES, DEVICES_PER_PROCESS, MESH = 2, 2, "fsdp=4"  # a host that is lost takes its half of the state along
FITTED = 3
INTERVALS_STEPS = ((2, 6), (4, 8), (3, 12))  # ramdisk, durable: near what the rates of failure ask for
MTBFS_S = (14.0, 25.0)
PROCESS_SHARE = 0.6  # of the failures; the others are of hosts
FIRST_S, LAST_S = 8.0, 3.0  # no failure is planned before a run has begun, or just before its end
STEPS = 1_000_000  # more than any run comes to: the clock ends it


def plan_run(number: int, run_s: float) -> RunPlan:
    """The run of this number: intervals and rates of failure take turns, the failures are drawn."""
    chance = random.Random(f"simulator {number}")
    mtbf_s = MTBFS_S[number % len(MTBFS_S)]
    ram, durable = INTERVALS_STEPS[number % len(INTERVALS_STEPS)]
    at_s, failures = FIRST_S, []
    while (at_s := at_s + chance.expovariate(1.0 / mtbf_s)) < run_s - LAST_S:
        kind = "process" if chance.random() < PROCESS_SHARE else "host"
        failures.append(Planned(at_s, kind, chance.randrange(PROCESSES)))
    return RunPlan(run_s=run_s, ram_every=ram, durable_every=durable, failures=tuple(failures))


class _Faults:
    """Kills as planned; a kill that falls into a restart hits the next attempt as soon as it has processes."""

    def __init__(self, launcher: Launcher, plan: RunPlan, ram: Path):
        self._launcher, self._plan, self._ram = launcher, plan, ram
        self._begun_s = monotonic_s()
        self._over, self._wiped = threading.Event(), threading.Event()
        self._hit: Planned | None = None
        self.unplanned = False
        self._thread = threading.Thread(target=self._kill_all, name="bench-faults")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._wiped.set()
        self._thread.join()

    def after_loss(self, attempt: int, process: int) -> None:
        """All processes are dead: what the host takes with it goes now."""
        del attempt, process
        if self._hit is None:
            self.unplanned = True
        elif self._hit.kind == "host":
            for directory in self._ram.rglob(host_id(self._hit.process)):
                shutil.rmtree(directory)
        self._hit = None
        self._wiped.set()

    def _kill_all(self) -> None:
        for planned in self._plan.failures:
            if self._over.wait(max(0.0, self._begun_s + planned.at_s - monotonic_s())):
                return
            self._wiped.clear()
            self._hit = planned
            wiped = ("ram",) if planned.kind == "host" else ()
            while not self._launcher.kill(planned.process, wiped=wiped):
                if self._over.wait(0.02):
                    return
            self._wiped.wait()
        self._over.wait(max(0.0, self._begun_s + self._plan.run_s - monotonic_s()))
        self._launcher.stop()


def host_id(process: object) -> str:
    """Each process plays a host of its own."""
    return f"host-{process}"


def record(plan: RunPlan, events: Path, cache: Path) -> None:
    """Trains as planned; the logs lie in `events` afterwards. Raises ClickException for a loss that nobody planned."""
    # All of it in memory: other writes to the disk are not a part of the comparison.
    home, ram = (Path(tempfile.mkdtemp(prefix="ckptkit-simulator-", dir="/dev/shm")) for _ in range(2))
    words = [sys.executable, "-m", "trainer", "--preset", "tiny", "--mesh", MESH, "--steps", str(STEPS)]
    words += ["--schedule-steps", "1000", "--quiet", "--run-dir", str(home), "--corpus-dir", str(cache / "corpus")]
    words += ["--compile-cache", str(cache / "compiled"), "--checkpoint", str(home / "durable")]
    words += ["--save-every", str(plan.durable_every), "--ram", str(ram), "--ram-every", str(plan.ram_every)]
    words += ["--events", str(home / "events"), "--attempt", "{attempt}", "--host-id", host_id("{process}")]
    words += ["--coordinator", "{coordinator}", "--processes", "{processes}", "--process", "{process}"]
    lines: list[str] = []
    log = EventLog(home / "events" / "launcher.jsonl", process=-1)
    launcher = Launcher(
        Workers(words, processes=PROCESSES, devices_per_process=DEVICES_PER_PROCESS),
        policy=RestartPolicy(restarts=len(plan.failures) + 1, backoff_s=0.1, grace_s=0.0),
        events=log,
        hooks=Hooks(
            on_output=lambda process, line: lines.append(f"{process}: {line}"),
            on_lost=lambda attempt, process: faults.after_loss(attempt, process),
            say=lambda line: None,
        ),
    )
    faults = _Faults(launcher, plan, ram)
    faults.start()
    try:
        code = launcher.run()
        faults.close()
        if code != ExitCode.INTERRUPTED or faults.unplanned:
            raise click.ClickException("the run was disturbed by something else:\n" + "\n".join(lines[-20:]))
        shutil.move(home / "events", events)
    finally:
        faults.close()
        log.close()
        for directory in (home, ram):
            shutil.rmtree(directory, ignore_errors=True)


@click.command(context_settings={"max_content_width": 120})
@click.option("--runs", type=click.IntRange(1), default=12, show_default=True, help="The first 3 are fitted.")
@click.option("--run-s", type=click.FloatRange(20.0), default=40.0, show_default=True, help="Length of a run.")
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the runs' logs here; those that are there are not run again.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every run, as JSON.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="A PNG (needs matplotlib).")
def main(runs: int, run_s: float, logs: Path | None, json_path: Path | None, plot_path: Path | None) -> None:
    """Runs the trainer with failures, and compares its goodput with the simulator's prediction."""
    console = Console()
    if not console.is_terminal:
        console.width = 120
    root = logs or Path(tempfile.mkdtemp(prefix="ckptkit-simulator-logs-"))
    try:
        plans = [plan_run(number, run_s) for number in range(runs)]
        cache = root / "cache"
        if not cache.exists():
            console.print("the first run only fills the compile cache", markup=False)
            record(RunPlan(run_s=30.0, ram_every=8, durable_every=24), root / "warm-up", cache)
        for number, plan in enumerate(plans):
            events = root / f"run-{number}-{run_s:g}s"
            if not events.exists():
                console.print(f"run {number + 1}/{runs}: {plan}", markup=False)
                record(plan, events, cache)
        recorded = [load_run(root / f"run-{number}-{run_s:g}s") for number in range(runs)]
    finally:
        if logs is None:
            shutil.rmtree(root, ignore_errors=True)
    if runs <= FITTED:
        console.print(f"{runs} runs: {FITTED} are fitted, so there is none to predict", markup=False)
        return
    costs = fit(list(zip(plans[:FITTED], recorded[:FITTED], strict=True)))
    result = {
        "benchmark": "simulator",
        "environment": environment("/dev/shm", tempfile.gettempdir()),
        **compare(costs, list(zip(plans, recorded, strict=True)), fitted=FITTED),
    }
    show(result, console)
    if plot_path is not None:
        plot(plot_path, result)
    store_result(result, json_path)
