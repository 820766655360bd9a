"""One training run under a schedule of faults, by the launcher that restarts it each time."""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.environment import WORKER_ENV
from bench.fault_places import OURS, Every, Places
from bench.fault_schedule import text_of
from ckptkit.events import EventLog
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers
from ckptkit.launch.chaos import FLIPPED, Chaos, Injected
from ckptkit.launch.faults import Fault

_GIVE_UP = 3  # lives in a row that end by themselves: what stops them will stop the next one too
_RESTARTS_MAX = 1000


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
    workers = Workers(
        job.command(steps, places, words),
        processes=job.processes,
        devices_per_process=1,
        env=WORKER_ENV,
        warm=WarmStart() if is_warm else None,
    )
    return _Run(workers, places, faults).run(limit_s)


class _Run:
    def __init__(self, workers: Workers, places: Places, faults: Sequence[Fault]):
        self._workers, self._places, self._outcome = workers, places, Outcome()
        self._in_a_row = 0
        self._gave_up = False
        self._log = EventLog(places.events / "launcher.jsonl", process=-1)
        chance = random.Random("flips")
        self._chaos = Chaos(
            [places.at(fault) for fault in faults],
            flip=lambda _: places.flip(chance),
            on_lost=self._after_loss,
            say=lambda line: None,
        )

    def run(self, limit_s: float) -> Outcome:
        overdue = threading.Timer(limit_s, self._give_up)
        overdue.daemon = True
        overdue.start()
        try:
            ended = self._chaos.run(
                self._launcher,
                on_output=lambda process, line: self._outcome.last_lines.append(f"{process}: {line}"),
            )
        finally:
            overdue.cancel()
            self._log.close()
        assert ended.code is not None, "a job that was started here"
        self._outcome.code = ended.code
        if ended.code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED) and not self._gave_up:
            raise KeyboardInterrupt  # the launcher had the signal, and it means the whole campaign
        return self._outcome

    def _launcher(self, hooks: Hooks, first_attempt: int) -> Launcher:
        return Launcher(
            self._workers,
            policy=RestartPolicy(restarts=_RESTARTS_MAX, backoff_s=0.0, grace_s=0.2),
            first_attempt=first_attempt,
            events=self._log,
            hooks=hooks,
        )

    def _give_up(self) -> None:
        self._gave_up = True
        self._chaos.stop()

    def _after_loss(self, attempt: int, process: int, struck: Sequence[Injected]) -> None:
        self._in_a_row = 0 if struck else self._in_a_row + 1
        if not struck:
            self._outcome.unplanned += 1
            self._outcome.happened.append(f"life {attempt}: process {process} died by itself")
        if self._in_a_row >= _GIVE_UP:
            self._give_up()
        if any(injected.fault.wipes for injected in struck):
            self._places.drop_page_cache()
        for injected in struck:
            place = next((did for did in injected.did if did.startswith(FLIPPED)), None)
            self._outcome.flips += place is not None
            also = f" ({place.removeprefix(FLIPPED)})" if place is not None else ""
            self._outcome.happened.append(text_of(injected.fault) + also)
