"""The main job, end to end: train, lose a process, lose a host, resume, and show that not one bit changed.

    make demo        or        CKPTKIT_DEMO_SEED=3 python -m tools.demo

Two processes train a small language model and save to a ramdisk, an SSD directory and a bucket. A process is
killed and its ramdisk wiped; later a host is lost with ramdisk and SSD. Each time the job restarts and
continues. Its final state is then compared with that of an undisturbed run without checkpoints.

Exit codes: 0 bit-identical; 1 a difference, or the run failed; 2 the machine or the seed cannot do it; 130 interrupted.
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

from ckptkit.events import EventLog
from ckptkit.goodput import GoodputReport, goodput_page, goodput_report, load_run, timeline_of
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers
from ckptkit.testing.bucket import BucketServer, client_env
from ckptkit.util.clock import monotonic_s
from tools.demo_screen import PlannedLoss, Screen, account
from tools.proof import Verdict, compare

PROCESSES, DEVICES_PER_PROCESS, MESH = 2, 2, "data=2,fsdp=2"
STEPS, RAM_EVERY, SSD_EVERY, DURABLE_EVERY = 120, 5, 20, 40
# After the first SSD save, and after the first durable save: there is something to resume from, and to lose.
LOSS_OF_PROCESS_STEPS, LOSS_OF_HOST_STEPS = range(26, 60), range(70, 112)
BUCKET = "ckptkit-demo"
MEMORY = Path("/dev/shm")
MEMORY_NEEDED_BYTES = 256 * 2**20  # state of 5 MB on each of 2 hosts, in a few slots, and gloo's own files
RUN_LIMIT_S = 600.0  # a hang, not a slow machine: an undisturbed run takes 25 s on 2 cores
STEP_LINE = re.compile(r"step +(\d+)/\d+ +loss +(\S+)")


class DemoError(Exception):
    """The demo cannot continue; the message has the reason, and a remedy if there is one."""

    def __init__(self, message: str, *, code: int = 1):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The directories of the demo. `root` stays for the reader, `ram` is deleted at the end."""

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
    """Trains twice, once undisturbed, and compares; returns 0 when the resume is bit-identical, else 1."""
    started_s = monotonic_s()
    losses = plan_losses(seed)
    job = f"on {PROCESSES} processes x {DEVICES_PER_PROCESS} devices, mesh {MESH}"
    with Screen(job) as screen, fresh_places(seed) as places:
        screen.say(f"seed {seed}; logs, events and proofs are in {places.root}")
        train_reference(places, seed, screen)
        with running_bucket(places.root / "bucket") as url:
            train_with_losses(places, seed, losses, url, screen)
        try:
            verdict = compare(places.root / "reference" / "proof", places.root / "resumed" / "proof")
            logs = load_run(places.events)
            report = goodput_report(logs)
        except (ValueError, FileNotFoundError) as error:
            raise DemoError(f"the run ended well and left no account of itself: {error}") from error
        failures = [*verdict.differences, *vacuities(report, verdict, losses)]
        page = places.root / "report.html"
        page.write_text(goodput_page(report, timeline_of(logs), title=f"The demo, seed {seed}"))
        screen.show(account(report, losses))
        screen.say(f"the account with its timeline: {page}")
        screen.show_verdict(verdict, failures, monotonic_s() - started_s)
        return 1 if failures else 0


def read_seed(environ: Mapping[str, str]) -> int:
    """The seed of the demo, from CKPTKIT_DEMO_SEED."""
    text = environ.get("CKPTKIT_DEMO_SEED", "1")
    if not text.isdecimal() or int(text) >= 2**31:
        raise DemoError(f"CKPTKIT_DEMO_SEED is {text!r}: give a whole number from 0 to 2^31 - 1", code=2)
    return int(text)


def plan_losses(seed: int) -> tuple[PlannedLoss, PlannedLoss]:
    """The losses and their times: a process with its ramdisk, later a host with ramdisk and SSD."""
    # Not the integer itself: the first draws of small integers are similar, and seeds 1 to 3 all take process 0.
    chance = random.Random(f"demo {seed}")
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
    events = EventLog(places.events / "launcher.jsonl", process=-1)
    run = _Run("resumed", places, screen)
    run.launch(
        [*trainer_command(places, "resumed", seed), *words], losses=losses, env=client_env(bucket_url), events=events
    )
    events.close()


def trainer_command(places: Places, name: str, seed: int) -> list[str]:
    """The directories that both runs share; the compile cache too, so that no restart compiles again."""
    words = [sys.executable, "-m", "trainer", "--preset", "tiny", "--mesh", MESH, "--log-every", "1"]
    words += ["--steps", str(STEPS), "--seed", str(seed), "--run-dir", str(places.root / name)]
    words += ["--corpus-dir", str(places.root.parent / "corpus")]  # named by its digest: kept for the next demo
    words += ["--compile-cache", os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(places.root / "compile-cache")]
    words += ["--proof", str(places.root / name / "proof")]
    return [*words, "--cluster", "detect"]


def host_id(process: object) -> str:
    """Each process plays a host of its own."""
    return f"host-{process}"


def vacuities(report: GoodputReport, verdict: Verdict, losses: Sequence[PlannedLoss]) -> list[str]:
    """Why identical runs would mean nothing: a loss did not happen, or a restart restored nothing."""
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
    """One launched training: its log file, its progress, and its planned losses."""

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
            Workers(command, processes=PROCESSES, devices_per_process=DEVICES_PER_PROCESS, env=env, warm=WarmStart()),
            policy=RestartPolicy(restarts=len(losses), backoff_s=0.1, grace_s=0.1),
            events=events,
            hooks=Hooks(on_output=self._hear, on_lost=self._wipe, say=self._screen.say),
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
        """All processes are dead: deletes what a lost host would take with it."""
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
    """Empty directories under runs/ and in memory; those in memory are removed at the end, also after an error."""
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
    """A bucket on loopback for the time of the block; yields its address."""
    server = BucketServer(dir=directory, buckets=[BUCKET])
    try:
        server.start()
    except OSError as error:
        raise DemoError(f"the bucket did not start: {error}") from error
    try:
        yield server.url
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
