"""One training run under a schedule of faults, by the launcher that restarts it each time."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.fault_places import OURS, Every, Places
from bench.fault_schedule import Fault
from ckptkit.events import EventLog
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers

_GIVE_UP = 3  # lives in a row that end by themselves: what stops them will stop the next one too
_RESTARTS_MAX = 1000
_RETRY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Shared by all runs: the same program, data and seed, so the same bits."""

    state: str  # the trainer's preset
    seed: int
    processes: int
    shared: Path  # corpus and compiled programs

    def command(self, steps: int, places: Places, words: Sequence[str]) -> list[str]:
        """The trainer, to `steps` steps."""
        command = [sys.executable, "-m", "trainer", "--preset", self.state, "--seed", str(self.seed), "--quiet"]
        command += ["--steps", str(steps), "--schedule-steps", "1000"]  # with another schedule it is another program
        command += ["--run-dir", str(self.shared), "--events", str(places.events), "--attempt", "{attempt}"]
        if self.processes > 1:
            command += ["--coordinator", "{coordinator}", "--processes", "{processes}", "--process", "{process}"]
        return [*command, "--proof", str(places.proof), *words]


@dataclass(slots=True)
class Outcome:
    """How a run ended, and what was done to it."""

    code: ExitCode = ExitCode.INTERRUPTED
    happened: list[str] = field(default_factory=list)
    flips: int = 0
    unplanned: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))


def run(
    job: Job,
    places: Places,
    *,
    steps: int,
    contender: str | None = None,
    every: Every | None = None,
    faults: Sequence[Fault] = (),
    limit_s: float,
) -> Outcome:
    """Trains to `steps` steps while `faults` happen, with the checkpoints of `contender` (None: without).

    The run is stopped after `limit_s`, or when it dies at every start.
    """
    for directory in (places.ram, places.disk / "ssd", places.events):
        directory.mkdir(parents=True)
    words = places.words(contender, every) if contender is not None and every is not None else []
    is_warm = contender is not None and contender.startswith(OURS)  # what starts stock Orbax's jobs has no template
    return _Run(job.command(steps, places, words), job.processes, places, faults, is_warm=is_warm).run(limit_s)


class _Run:
    def __init__(self, command: list[str], processes: int, places: Places, faults: Sequence[Fault], *, is_warm: bool):
        self._places, self._faults = places, faults
        self._outcome = Outcome()
        self._lock = threading.Lock()
        self._pending: list[Fault] = []  # they killed the life that is ending now
        self._in_a_row = 0
        self._gave_up = False
        self._over = threading.Event()
        self._log = EventLog(places.events / "launcher.jsonl", process=-1)
        self._launcher = Launcher(
            Workers(command, processes=processes, devices_per_process=1, warm=WarmStart() if is_warm else None),
            policy=RestartPolicy(restarts=_RESTARTS_MAX, backoff_s=0.0, grace_s=0.2),
            events=self._log,
            hooks=Hooks(
                on_output=lambda process, line: self._outcome.last_lines.append(f"{process}: {line}"),
                on_lost=self._after_loss,
                say=lambda line: None,
            ),
        )

    def run(self, limit_s: float) -> Outcome:
        killer = threading.Thread(target=self._kill, name="bench-faults", daemon=True)
        overdue = threading.Timer(limit_s, self._give_up)
        overdue.daemon = True
        killer.start()
        overdue.start()
        try:
            self._outcome.code = self._launcher.run()
        finally:
            self._over.set()
            overdue.cancel()
            killer.join()
            self._log.close()
        if self._outcome.code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED) and not self._gave_up:
            raise KeyboardInterrupt  # the launcher had the signal, and it means the whole campaign
        return self._outcome

    def _give_up(self) -> None:
        self._gave_up = True
        self._launcher.stop()

    def _kill(self) -> None:
        start_s = time.monotonic()
        for fault in self._faults:
            if self._over.wait(max(0.0, start_s + fault.at_s - time.monotonic())):
                return
            while not self._hit(fault):  # between two lives: the next one is hit
                if self._over.wait(_RETRY_S):
                    return

    def _hit(self, fault: Fault) -> bool:
        with self._lock:
            killed = self._launcher.kill(fault.victim, wiped=("ram",) if fault.wipes else ())
            if killed:
                self._pending.append(fault)
            return killed

    def _after_loss(self, attempt: int, process: int) -> None:
        """All processes are dead: what goes with the host goes now."""
        with self._lock:
            faults, self._pending = self._pending, []
        if not faults:
            self._outcome.unplanned += 1
            self._outcome.happened.append(f"life {attempt}: process {process} died by itself")
            self._in_a_row += 1
            if self._in_a_row >= _GIVE_UP:
                self._give_up()
            return
        self._in_a_row = 0
        for fault in faults:
            if fault.wipes:
                self._places.wipe(fault.victim)
            flipped = self._places.flip(attempt) if fault.flips else None
            self._outcome.flips += flipped is not None
            self._outcome.happened.append(str(fault) + (f" ({flipped})" if flipped else ""))
