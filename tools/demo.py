"""The main job, end to end: train, lose a process, lose a host, resume, and prove that not one bit changed.

    make demo        or        CKPTKIT_DEMO_SEED=3 python -m tools.demo

Two processes train a small language model and save to a ramdisk, an SSD directory and a bucket. A process is
killed and its ramdisk wiped; later a host is lost with ramdisk and SSD. Each time the job restarts and goes on.
The end is then compared with that of a run which nothing happened to and which never saw a checkpoint.

Exit codes: 0 proven; 1 the proof or the run failed; 2 the machine or the seed cannot do it; 130 interrupted.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ckptkit.clock import monotonic_s
from ckptkit.events import EventLog
from ckptkit.goodput import Disruption, GoodputReport, goodput_report, load_run
from tools.launch import ExitCode, Launcher, RestartPolicy
from tools.proof import Verdict, compare

PROCESSES, DEVICES_PER_PROCESS, MESH = 2, 2, "data=2,fsdp=2"
STEPS, RAM_EVERY, SSD_EVERY, DURABLE_EVERY = 120, 5, 20, 40
# After the first SSD save, and after the first durable save: there is something to resume from, and to lose.
LOSS_OF_PROCESS_STEPS, LOSS_OF_HOST_STEPS = range(26, 60), range(70, 112)
BUCKET = "ckptkit-demo"
MEMORY = Path("/dev/shm")
MEMORY_NEEDED_BYTES = 256 * 2**20  # state of 5 MB on each of 2 hosts, in a few slots, and gloo's own files
RUN_LIMIT_S = 600.0  # a hang, not a slow machine: an undisturbed run takes 25 s on 2 cores
BUCKET_START_LIMIT_S = 30.0
STEP_LINE = re.compile(r"step +(\d+)/\d+ +loss +(\S+)")


class DemoError(Exception):
    """The demo cannot go on; the message says why, and what to do where something can be done."""

    def __init__(self, message: str, *, code: int = 1):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoss:
    """Process `process` is killed once `step` steps are done, and its host's directories in `wiped` are removed."""

    step: int
    process: int
    wiped: tuple[str, ...]

    def __str__(self) -> str:
        what = "host lost" if "ssd" in self.wiped else "process killed"
        return f"{what}: process {self.process} at step {self.step}, {' and '.join(self.wiped)} wiped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Every directory of the demo. `root` stays for the reader, `ram` goes at the end."""

    root: Path
    ram: Path

    def tier(self, name: str) -> Path:
        """The root of a fast tier."""
        return self.ram if name == "ram" else self.root / name

    @property
    def events(self) -> Path:
        """Event logs of the run with losses."""
        return self.root / "events"


def main() -> int:
    """Runs the demo; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    try:
        return run_demo(read_seed(os.environ))
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("demo: interrupted; all processes are stopped, the ramdisk is clean", file=sys.stderr)
        return ExitCode.INTERRUPTED


def run_demo(seed: int) -> int:
    """Trains twice, once undisturbed, and compares; returns 0 when the resume is proven, else 1."""
    started_s = monotonic_s()
    losses = plan_losses(seed)
    with Screen() as screen, fresh_places(seed) as places:
        screen.say(f"seed {seed}; logs, events and proofs are in {places.root}")
        train_reference(places, seed, screen)
        with running_bucket(places.root / "bucket") as url:
            train_with_losses(places, seed, losses, url, screen)
        try:
            verdict = compare(places.root / "reference" / "proof", places.root / "resumed" / "proof")
            report = goodput_report(load_run(places.events))
        except (ValueError, FileNotFoundError) as error:
            raise DemoError(f"the run ended well and left no account of itself: {error}") from error
        failures = [*verdict.differences, *vacuities(report, verdict, losses)]
        screen.show(account(report, losses))
        screen.show_verdict(verdict, failures, monotonic_s() - started_s)
        return 1 if failures else 0


def read_seed(environ: Mapping[str, str]) -> int:
    """The seed of the demo, from CKPTKIT_DEMO_SEED."""
    text = environ.get("CKPTKIT_DEMO_SEED", "1")
    if not text.isdecimal() or int(text) >= 2**31:
        raise DemoError(f"CKPTKIT_DEMO_SEED is {text!r}: give a whole number from 0 to 2^31 - 1", code=2)
    return int(text)


def plan_losses(seed: int) -> tuple[PlannedLoss, PlannedLoss]:
    """What is lost, and when: a process with its ramdisk, later a host with ramdisk and SSD."""
    chance = random.Random(f"demo {seed}")  # of a small integer the first draws are alike: seeds 1 to 3 take process 0
    process, host = chance.randrange(PROCESSES), chance.randrange(PROCESSES)
    return (
        PlannedLoss(step=chance.choice(LOSS_OF_PROCESS_STEPS), process=process, wiped=("ram",)),
        PlannedLoss(step=chance.choice(LOSS_OF_HOST_STEPS), process=host, wiped=("ram", "ssd")),
    )


def train_reference(places: Places, seed: int, screen: Screen) -> None:
    """The run that nothing happens to: no tier, no bucket, no checkpoint."""
    run = _Run("reference", places, screen)
    run.launch(trainer_command(places, "reference", seed), losses=(), env={}, events=None)


def train_with_losses(
    places: Places, seed: int, losses: Sequence[PlannedLoss], bucket_url: str, screen: Screen
) -> None:
    """The same training with all tiers, disturbed as planned."""
    words = ["--checkpoint", f"gs://{BUCKET}/run", "--save-every", str(DURABLE_EVERY)]
    words += ["--ram", str(places.tier("ram")), "--ram-every", str(RAM_EVERY)]
    words += ["--ssd", str(places.tier("ssd")), "--ssd-every", str(SSD_EVERY), "--host-id", host_id("{process}")]
    words += ["--events", str(places.events), "--attempt", "{attempt}"]
    env = {
        "STORAGE_EMULATOR_HOST": bucket_url,
        "TENSORSTORE_GCS_HTTP_URL": bucket_url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it probes Google over TLS, 33 to 60 s per process
    }
    events = EventLog(places.events / "launcher.jsonl", process=-1)
    run = _Run("resumed", places, screen)
    run.launch([*trainer_command(places, "resumed", seed), *words], losses=losses, env=env, events=events)
    events.close()


def trainer_command(places: Places, name: str, seed: int) -> list[str]:
    """What both runs share; the compile cache too, so that no restart compiles again."""
    words = [sys.executable, "-m", "trainer", "--preset", "tiny", "--mesh", MESH, "--log-every", "1"]
    words += ["--steps", str(STEPS), "--seed", str(seed), "--run-dir", str(places.root / name)]
    words += ["--corpus-dir", str(places.root.parent / "corpus")]  # named by its digest: kept for the next demo
    words += ["--compile-cache", str(places.root / "compile-cache")]
    words += ["--proof", str(places.root / name / "proof")]
    return [*words, "--coordinator", "{coordinator}", "--processes", "{processes}", "--process", "{process}"]


def host_id(process: object) -> str:
    """Each process plays a host of its own."""
    return f"host-{process}"


def vacuities(report: GoodputReport, verdict: Verdict, losses: Sequence[PlannedLoss]) -> list[str]:
    """Why identical runs would prove nothing: a loss that did not happen, or a restart that restored nothing."""
    found = []
    if len(report.disruptions) != len(losses):
        found.append(f"{len(report.disruptions)} losses happened, {len(losses)} were planned")
    restored = {restore.attempt for restore in report.restores if restore.step}
    for attempt in range(1, len(losses) + 1):
        if attempt not in restored:
            found.append(f"attempt {attempt} restored no step: it began again")
    if verdict.steps != STEPS:
        found.append(f"the reference took {verdict.steps} steps, expected {STEPS}")
    return found


class _Run:
    """One launched training: its log file, its progress, and the losses that befall it."""

    def __init__(self, name: str, places: Places, screen: Screen):
        self._name = name
        self._places = places
        self._screen = screen
        self._lock = threading.Lock()  # one thread per process calls `_hear`
        self._todo: deque[PlannedLoss] = deque()
        self._lost: PlannedLoss | None = None
        self._launcher: Launcher | None = None
        self._last_lines: deque[str] = deque(maxlen=30)

    def launch(
        self,
        command: Sequence[str],
        *,
        losses: Sequence[PlannedLoss],
        env: Mapping[str, str],
        events: EventLog | None,
    ) -> None:
        """Trains to the end, or raises `DemoError` with the last lines of the processes."""
        self._todo.extend(losses)
        self._launcher = Launcher(
            command,
            processes=PROCESSES,
            devices_per_process=DEVICES_PER_PROCESS,
            env=env,
            policy=RestartPolicy(restarts=len(losses), backoff_s=0.1, grace_s=0.5),
            on_output=self._hear,
            on_lost=self._wipe,
            say=self._screen.say,
            events=events,
        )
        self._screen.begin(self._name, STEPS)
        overdue = threading.Timer(RUN_LIMIT_S, self._launcher.stop)
        overdue.daemon = True
        overdue.start()
        with (self._places.root / f"{self._name}.log").open("w") as self._log:
            code = self._launcher.run()
        is_overdue = not overdue.is_alive()
        overdue.cancel()
        if is_overdue:
            raise DemoError(self._failure(f"was stopped after {RUN_LIMIT_S:.0f} s"))
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if code != ExitCode.OK:
            raise DemoError(self._failure("failed"), code=code)

    def _hear(self, process: int, line: str) -> None:
        with self._lock:
            self._log.write(f"[{process}] {line}\n")
            step = STEP_LINE.match(line)
            if step is None:
                if line not in self._last_lines:  # processes with the same complaint: once is enough
                    self._last_lines.append(line)
                return
            self._screen.advance(int(step[1]), step[2])
            if self._todo and self._lost is None and int(step[1]) >= self._todo[0].step:
                self._lost = self._todo.popleft()
                assert self._launcher is not None
                self._launcher.kill(self._lost.process, wiped=self._lost.wiped)

    def _wipe(self, attempt: int, process: int) -> None:
        """All processes are dead: what a lost host would take with it goes now."""
        if self._lost is None:
            raise DemoError(self._failure(f"lost process {process} in attempt {attempt} by itself"))
        for tier in self._lost.wiped:
            for directory in list(self._places.tier(tier).rglob(host_id(self._lost.process))):
                shutil.rmtree(directory)
                self._screen.say(f"wiped {directory}")
        self._lost = None

    def _failure(self, what: str) -> str:
        lines = "\n".join(f"  {line}" for line in self._last_lines)
        return f"the {self._name} run {what}; the end of {self._places.root / self._name}.log:\n{lines}"


@contextmanager
def fresh_places(seed: int) -> Iterator[Places]:
    """Empty directories under runs/ and in memory; what is in memory is removed at the end, whatever happens."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        raise DemoError(f"{MEMORY} is not there or not writable: the ramdisk tier needs a tmpfs", code=2)
    if (free_bytes := shutil.disk_usage(MEMORY).free) < MEMORY_NEEDED_BYTES:
        raise DemoError(
            f"{MEMORY} has {free_bytes >> 20} MiB free, the demo needs {MEMORY_NEEDED_BYTES >> 20}: "
            "remove what is there or mount it larger",
            code=2,
        )
    _remove_abandoned()
    places = Places(root=Path("runs") / f"demo-{seed}", ram=MEMORY / f"ckptkit-demo-{seed}-{os.getpid()}")
    try:
        shutil.rmtree(places.root, ignore_errors=True)
        for directory in (places.root / "ssd", places.events, places.ram):
            directory.mkdir(parents=True)
    except OSError as error:
        raise DemoError(f"cannot make the demo's directories: {error}", code=2) from error
    try:
        yield places
    finally:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave memory behind
        shutil.rmtree(places.ram, ignore_errors=True)
        signal.signal(signal.SIGINT, handler)


def _remove_abandoned() -> None:
    """Removes what a demo that was killed with SIGKILL left in memory."""
    for directory in MEMORY.glob("ckptkit-demo-*-*"):
        process = directory.name.rpartition("-")[2]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running_bucket(directory: Path) -> Iterator[str]:
    """A bucket on loopback for the time of the block; yields its address, which is its first line of output."""
    lines: deque[str] = deque(maxlen=20)
    said_first, first = threading.Event(), []

    def hear(process: int, line: str) -> None:
        del process
        (lines if first else first).append(line)
        said_first.set()

    command = [
        sys.executable,
        "-m",
        "ckptkit.testing.bucket",
        "--port",
        "0",
        "--dir",
        str(directory),
        "--bucket",
        BUCKET,
    ]
    policy = RestartPolicy(restarts=0, grace_s=2.0)
    server = Launcher(command, processes=1, policy=policy, on_output=hear, say=lines.append)
    thread = threading.Thread(target=lambda: (server.run(), said_first.set()), name="demo-bucket")
    thread.start()
    try:
        if not said_first.wait(BUCKET_START_LIMIT_S) or not thread.is_alive() or not first[0].startswith("http://"):
            said = "\n".join(f"  {line}" for line in [*first, *lines])
            raise DemoError(f"the bucket did not start; it said:\n{said}")
        yield first[0]
    finally:
        server.stop()
        thread.join()


def account(report: GoodputReport, losses: Sequence[PlannedLoss]) -> Table:
    """The table of what the losses cost, what the tiers did, and where the time went."""
    table = Table("what", "measured", title="The run with losses", title_justify="left")
    for planned, loss in zip(losses, report.disruptions, strict=False):
        table.add_row(str(planned), _words_of_loss(loss))
    table.add_section()
    for restore in report.restores:
        served = ", ".join(f"{tier} {size / 1e6:.2f} MB" for tier, size in restore.source_bytes.items())
        table.add_row(
            f"restore of step {restore.step} (attempt {restore.attempt})", f"{served} in {restore.restore_s:.2f} s"
        )
    table.add_section()
    saves = report.saves
    if saves.stall_ms_p50 is not None and saves.stall_ms_p99 is not None:
        stall = f"p50 {saves.stall_ms_p50:.1f} ms, p99 {saves.stall_ms_p99:.1f} ms"
        table.add_row(f"stall per save ({saves.saves} saves)", stall)
    for tier, commit_s in saves.commit_s_p50.items():
        table.add_row(f"commit to {tier}", f"p50 {1e3 * commit_s:.0f} ms")
    table.add_section()
    goodput = report.goodput
    table.add_row("goodput: productive step time / total", f"{goodput.ml_goodput:.1%}")
    table.add_row("goodput: new steps x median step / elapsed", f"{goodput.new_steps:.1%}")
    for part, seconds in sorted(report.parts_s.items(), key=lambda item: -item[1]):
        table.add_row(f"  {part}", f"{seconds:6.2f} s  {seconds / report.wall_s:6.1%}")
    table.add_row("  total", f"{report.wall_s:6.2f} s")
    return table


def _words_of_loss(loss: Disruption) -> str:
    if loss.resume_s is None:
        return f"{loss.lost_steps} steps lost; never resumed"
    parts = sorted(loss.resume_parts_s.items(), key=lambda item: -item[1])
    phases = "\n".join(f"  {seconds:.2f} s {part}" for part, seconds in parts if seconds >= 0.005)
    caught_up = "" if loss.caught_up_s is None else f"; caught up after {loss.caught_up_s:.1f} s"
    return f"{loss.lost_steps} steps lost; first step again after {loss.resume_s:.1f} s{caught_up}\n{phases}"


class Screen:
    """What a person sees: a live line on a terminal, a line now and then elsewhere, tables at the end."""

    EVERY_STEPS = 20  # without a terminal
    DIFFERENCES_SHOWN = 50

    def __init__(self):
        is_terminal = sys.stdout.isatty()
        self._console = Console(width=None if is_terminal else 110, highlight=False)
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            TextColumn("{task.description:>9}"), *columns, console=self._console, disable=not is_terminal
        )
        self._task: TaskID | None = None
        self._name = ""

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def begin(self, name: str, steps: int) -> None:
        """A run begins; its progress is shown from now."""
        self._name = name
        self._task = self._progress.add_task(name, total=steps, loss="-")
        if self._progress.disable:
            self.say(f"{name}: {steps} steps on {PROCESSES} processes x {DEVICES_PER_PROCESS} devices, mesh {MESH}")

    def advance(self, step: int, loss: str) -> None:
        """`step` steps are done; after a resume that is fewer than before."""
        if self._task is not None and not self._progress.disable:
            self._progress.update(self._task, completed=step, loss=loss)
        elif step % self.EVERY_STEPS == 0:
            self.say(f"{self._name}: step {step} loss {loss}")

    def show(self, table: Table) -> None:
        """Shows a table below the progress, which ends."""
        self._progress.stop()
        self._console.print(table)

    def show_verdict(self, verdict: Verdict, failures: Sequence[str], elapsed_s: float) -> None:
        """The last words: whether the resume is proven, or everything that is against it."""
        for failure in failures[: self.DIFFERENCES_SHOWN]:
            self.say(failure)
        if len(failures) > self.DIFFERENCES_SHOWN:
            self.say(f"... and {len(failures) - self.DIFFERENCES_SHOWN} more")
        compared = (
            f"{verdict.leaves} leaves in {verdict.boxes} boxes, records and loss of {verdict.steps} steps "
            f"({verdict.repeated_steps} of them taken again)"
        )
        said = f"NOT PROVEN: {len(failures)} differences in" if failures else "PROVEN: bit-identical to the reference:"
        self.say(f"{said} {compared}; {elapsed_s:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
