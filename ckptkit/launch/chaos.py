"""Faults on a running job, from a seed: workers killed or frozen, the job preempted, directories emptied, bits flipped.

The faults are real: signals to the job's processes, deletions and writes in its directories. Each comes a random time
after the job has made a step, so a job that does not come back is never hit again.
"""

from __future__ import annotations

import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, final

from ckptkit.events import EventLog
from ckptkit.launch.launcher import Launcher
from ckptkit.launch.policy import ExitCode, HangPolicy, RestartPolicy
from ckptkit.launch.workers import Hooks, Workers
from ckptkit.util.clock import Deadline, monotonic_s

FaultKind = Literal["kill", "freeze", "preempt"]
KINDS: Final = ("kill", "freeze", "preempt")

_START_MAX_S = 60.0  # a job that marks no steps counts as running after this
_LOOK_S = 0.1
_FLIPPED_BYTES_MIN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """A directory, and the chance that a fault also damages it. `{process}` in the path is the number of the victim."""

    path: str
    chance: float

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1:
            raise ValueError(f"{self.path}: the chance is {self.chance:g}, expected 0 to 1")
        if len(Path(self.path).parts) < 3 or not Path(self.path).is_absolute():
            raise ValueError(f"{self.path}: give a directory of the job's own, by its whole path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planned fault: `after_s` seconds after the job has made a step. `wipes`, `flips`: directories."""

    number: int
    after_s: float
    kind: FaultKind
    victim: int
    wipes: tuple[str, ...] = ()
    flips: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The faults of a seed: `count` of them, on average `mtbf_s` apart. The same seed plans the same faults.

    `weights`: how often each kind is drawn, in relation to the others. A frozen process gets SIGCONT after `freeze_s`.
    """

    seed: int
    mtbf_s: float
    count: int
    weights: Mapping[FaultKind, float] = field(default_factory=lambda: {"kill": 1.0})
    freeze_s: float = 5.0
    wipes: tuple[Hazard, ...] = ()
    flips: tuple[Hazard, ...] = ()

    def faults(self, processes: int) -> Iterator[Fault]:
        """The faults of a job of so many processes, in order."""
        chance = random.Random(f"chaos {self.seed}")
        kinds, weights = list(self.weights), list(self.weights.values())
        for number in range(self.count):
            after_s = chance.expovariate(1.0 / self.mtbf_s)
            kind = chance.choices(kinds, weights)[0]
            victim = chance.randrange(processes)
            wipes, flips = (
                tuple(each.path.replace("{process}", str(victim)) for each in hazards if chance.random() < each.chance)
                for hazards in (self.wipes, self.flips)
            )
            yield Fault(number=number, after_s=after_s, kind=kind, victim=victim, wipes=wipes, flips=flips)


@dataclass(slots=True, kw_only=True)
class Injected:
    """A fault that happened. `at_s`: seconds from the start of the job; `did`: the damage in words.

    `back_s`: until the job made a step again; `repeated`: the steps that it did again. None where nobody knows.
    """

    fault: Fault
    at_s: float
    attempt: int
    did: list[str] = field(default_factory=list)
    back_s: float | None = None
    repeated: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """The end of a job under faults."""

    code: ExitCode
    seconds: float
    injected: tuple[Injected, ...]
    unplanned: tuple[str, ...]  # losses that no fault explains


@final
class Chaos:
    """Runs a job under the faults of a plan, and starts it again after each as `ckptkit run` does.

    After the last fault the job is left alone. A loss while a fault is under way counts as the fault's.
    """

    def __init__(
        self,
        workers: Workers,
        plan: FaultPlan,
        *,
        policy: RestartPolicy,
        hang: HangPolicy | None = None,
        first_attempt: int = 0,
        events: EventLog | None = None,
        on_output: Callable[[int, str], None],
        say: Callable[[str], None],
    ):
        self._workers, self._plan, self._policy, self._hang = workers, plan, policy, hang
        self._events = events
        self._on_output, self._say = on_output, say
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._stepping = threading.Event()
        self._injected: list[Injected] = []
        self._unplanned: list[str] = []
        self._pending: Injected | None = None  # the job has not made a step since
        self._attempt = first_attempt
        self._launcher: Launcher | None = None
        self._flipper = random.Random(f"flips {plan.seed}")
        self._begun_s = 0.0
        self._recoveries = 0
        self._preempting = False

    def run(self) -> ChaosRun:
        """Blocks until the job has ended. Raises what `Launcher.run` raises."""
        self._begun_s = monotonic_s()
        injector = threading.Thread(target=self._inject_all, name="ckptkit-chaos", daemon=True)
        injector.start()
        try:
            code = self._run_attempts()
        finally:
            self._over.set()
            injector.join()
        return ChaosRun(
            code=code,
            seconds=monotonic_s() - self._begun_s,
            injected=tuple(self._injected),
            unplanned=tuple(self._unplanned),
        )

    def _run_attempts(self) -> ExitCode:
        while True:
            self._recoveries = 0
            self._launcher = Launcher(
                self._workers,
                policy=self._policy,
                hang=self._hang,
                first_attempt=self._attempt,
                events=self._events,
                hooks=Hooks(
                    on_output=self._on_output,
                    on_attempt=self._begin,
                    on_lost=self._after_loss,
                    on_status=self._take_status,
                    say=self._say,
                ),
            )
            code = self._launcher.run()
            if not self._preempting or code == ExitCode.OK or self._launcher.is_stopped:
                return code
            self._preempting = False
            self._after_loss(self._attempt, -1)
            self._attempt += 1

    # In the thread of the launcher, and in the main thread.

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._stepping.clear()

    def _take_status(self, status: Mapping[str, Any]) -> None:
        with self._lock:
            back = status.get("stepped") == self._attempt
            found = status["recoveries"][self._recoveries :]
            self._recoveries += len(found)
            if self._pending is not None and back and self._pending.attempt < self._attempt:
                self._pending.back_s = monotonic_s() - self._begun_s - self._pending.at_s
                self._pending = None
            for each in found:
                if self._injected and each["reached"] is not None:
                    self._injected[-1].repeated = max(0, each["reached"] - each["step"] + 1)
        if back:
            self._stepping.set()

    def _after_loss(self, attempt: int, process: int) -> None:
        """All processes are dead: the files that the fault takes with it go now."""
        with self._lock:
            if self._pending is None:
                self._unplanned.append(f"attempt {attempt}: process {process} was lost by itself")
                return
            for path in self._pending.fault.wipes:
                self._note(self._pending, f"emptied {path}: {_emptied(Path(path))} files")
            for path in self._pending.fault.flips:
                flipped = _flipped(Path(path), self._flipper)
                self._note(self._pending, f"flipped a bit of {flipped}" if flipped else f"no file to flip below {path}")

    def _note(self, injected: Injected, text: str) -> None:
        injected.did.append(text)
        self._say(f"chaos: {text}")

    # In the thread of the faults.

    def _inject_all(self) -> None:
        for fault in self._plan.faults(self._workers.processes):
            start = Deadline(_START_MAX_S)
            while not self._stepping.is_set() and not start.passed:
                if self._over.wait(_LOOK_S):
                    return
            if self._over.wait(fault.after_s):
                return
            while not self._inject(fault):  # between two attempts: the next one is hit
                if self._over.wait(_LOOK_S):
                    return

    def _inject(self, fault: Fault) -> bool:
        launcher = self._launcher
        if launcher is None:
            return False
        injected = Injected(fault=fault, at_s=monotonic_s() - self._begun_s, attempt=self._attempt)
        with self._lock:
            if fault.kind == "preempt":
                self._preempting = True
                launcher.preempt()
                text = "preempted the job"
            elif fault.kind == "freeze":
                if not launcher.signal(fault.victim, signal.SIGSTOP):
                    return False
                text = f"froze process {fault.victim} for {self._plan.freeze_s:g} s"
            else:
                if not launcher.kill(fault.victim, wiped=fault.wipes):
                    return False
                text = f"killed process {fault.victim}"
            self._injected.append(injected)
            self._pending = injected
            if fault.kind != "freeze":
                self._stepping.clear()
            self._note(injected, text)
        if fault.kind == "freeze":
            self._over.wait(self._plan.freeze_s)
            launcher.signal(fault.victim, signal.SIGCONT)
            with self._lock:
                if self._pending is injected and self._attempt == injected.attempt:
                    self._pending = None  # the job has gone on
        return True


def _emptied(directory: Path) -> int:
    """Deletes everything below a directory; returns the number of files."""
    count = sum(1 for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else 0
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return count


def _flipped(directory: Path, chance: random.Random) -> str | None:
    """Flips one bit of one file below a directory; None if no file has 64 bytes."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    files = sorted(path for path in paths if path.stat().st_size >= _FLIPPED_BYTES_MIN)
    if not files:
        return None
    path = chance.choice(files)
    offset, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
    with open(path, "r+b") as file:
        file.seek(offset)
        before = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([before ^ (1 << bit)]))
    return f"{path}, byte {offset:,}"
