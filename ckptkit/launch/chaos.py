"""Faults on a running job: workers or whole hosts killed, workers frozen, the job preempted, a disk filled, the bucket
taken away, directories emptied, bits flipped.

The faults are real: signals to the job's processes, deletions and writes in its directories. Each comes a random time
after the job has made a step, so a job that does not come back is never hit again.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from ckptkit.events import EventLog
from ckptkit.launch.attached import AttachedJob
from ckptkit.launch.faults import LASTING, Fault, FaultPlan
from ckptkit.launch.harm import FullDisk, LocalBucket, emptied, flipped
from ckptkit.launch.launcher import Launcher
from ckptkit.launch.policy import ExitCode, HangPolicy, RestartPolicy
from ckptkit.launch.workers import Hooks, Workers
from ckptkit.util.clock import Deadline, monotonic_s

_START_MAX_S = 60.0  # a job that marks no steps counts as running after this
_LOOK_S = 0.1


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
    """The end of a job under faults. `code` is None for a job that goes on, since it was not started here."""

    code: ExitCode | None
    seconds: float
    injected: tuple[Injected, ...]
    unplanned: tuple[str, ...]  # losses that no fault explains


@final
class Chaos:
    """Hits a job with the faults of a plan. A loss while a fault is under way counts as the fault's.

    `run` starts the job, and starts it again after each loss as `ckptkit run` does. `attach` hits one that runs.
    """

    def __init__(
        self,
        plan: FaultPlan,
        *,
        bucket: LocalBucket | None = None,
        disk: FullDisk | None = None,
        say: Callable[[str], None],
    ):
        if "outage" in plan.weights and bucket is None:
            raise ValueError("an outage needs a bucket to take away")
        if "fill" in plan.weights and disk is None:
            raise ValueError("a full disk needs a directory on the file system to fill")
        self._plan, self._bucket, self._disk, self._say = plan, bucket, disk, say
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._all_injected = threading.Event()
        self._error: Exception | None = None
        self._stepping = threading.Event()
        self._injected: list[Injected] = []
        self._unplanned: list[str] = []
        self._pending: Injected | None = None  # the job has not made a step since
        self._attempt = 0
        self._job: Launcher | AttachedJob | None = None
        self._flipper = random.Random(f"flips {plan.seed}")
        self._begun_s = 0.0
        self._recoveries = 0
        self._preempting = False

    def run(
        self,
        workers: Workers,
        *,
        policy: RestartPolicy,
        hang: HangPolicy | None = None,
        first_attempt: int = 0,
        events: EventLog | None = None,
        on_output: Callable[[int, str], None],
    ) -> ChaosRun:
        """Blocks until the job has ended. After the last fault it is left alone. Raises what `Launcher.run` raises."""
        self._attempt = first_attempt

        def launch() -> ExitCode:
            while True:
                self._recoveries = 0
                self._job = launcher = Launcher(
                    workers,
                    policy=policy,
                    hang=hang,
                    first_attempt=self._attempt,
                    events=events,
                    hooks=Hooks(
                        on_output=on_output,
                        on_attempt=self._begin,
                        on_lost=self._after_loss,
                        on_status=self._take_status,
                        say=self._say,
                    ),
                )
                code = launcher.run()
                if not self._preempting or code == ExitCode.OK or launcher.is_stopped:
                    return code
                self._preempting = False
                self._after_loss(self._attempt, -1)
                self._attempt += 1

        return self._under_faults(workers.processes, launch)

    def attach(self, job: AttachedJob) -> ChaosRun:
        """Blocks until the last fault is over and the job makes steps again, or until the job has ended.

        Only workers of this host are hit. Raises `ValueError` for a plan with preemptions: they would end the job.
        """
        if "preempt" in self._plan.weights:
            raise ValueError("a job that runs cannot be preempted from here: it would end")
        self._job, self._attempt = job, -1

        def follow() -> ExitCode | None:
            known = len(job.status["losses"])
            self._recoveries = len(job.status["recoveries"])
            while True:
                status = job.look()
                if status["state"] == "ended":
                    return ExitCode(status.get("code", ExitCode.INTERRUPTED))
                with self._lock:
                    new, known = status["losses"][known:], len(status["losses"])
                    if new and self._pending is None:
                        self._unplanned += [f"attempt {each['attempt']}: {each['cause']} by itself" for each in new]
                if status["attempt"] != self._attempt:
                    self._begin(status["attempt"])
                self._take_status(status)
                if self._all_injected.is_set() and self._pending is None:
                    return None
                self._over.wait(_LOOK_S)

        return self._under_faults(job.processes, follow)

    def _under_faults(self, processes: int, drive: Callable[[], ExitCode | None]) -> ChaosRun:
        faults = self._plan.faults(processes)
        self._begun_s = monotonic_s()
        injector = threading.Thread(target=self._inject_all, args=(faults,), name="ckptkit-chaos", daemon=True)
        injector.start()
        try:
            code = drive()
        finally:
            self._over.set()
            injector.join()
        if self._error is not None:
            raise self._error
        return ChaosRun(
            code=code,
            seconds=monotonic_s() - self._begun_s,
            injected=tuple(self._injected),
            unplanned=tuple(self._unplanned),
        )

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
            if back and self._pending is None:
                self._stepping.set()

    def _after_loss(self, attempt: int, process: int) -> None:
        """All processes are dead: the files that the fault takes with it go now."""
        with self._lock:
            if self._pending is None:
                self._unplanned.append(f"attempt {attempt}: process {process} was lost by itself")
                return
            self._harm(self._pending)

    def _harm(self, injected: Injected) -> None:
        for path in injected.fault.wipes:
            self._note(injected, f"emptied {path}: {emptied(Path(path))} files")
        for path in injected.fault.flips:
            hit = flipped(Path(path), self._flipper)
            self._note(injected, f"flipped a bit of {hit}" if hit else f"no file to flip below {path}")

    def _note(self, injected: Injected, text: str) -> None:
        injected.did.append(text)
        self._say(f"chaos: {text}")

    # In the thread of the faults.

    def _inject_all(self, faults: Iterator[Fault]) -> None:
        try:
            for fault in faults:
                start = Deadline(_START_MAX_S)
                while not self._stepping.is_set() and not start.passed:
                    if self._over.wait(_LOOK_S):
                        return
                if self._over.wait(fault.after_s):
                    return
                while not self._inject(fault):  # between two attempts: the next one is hit
                    if self._over.wait(_LOOK_S):
                        return
        except (OSError, ValueError) as error:  # raised where `run` waits
            self._error = error
            if isinstance(self._job, Launcher):
                self._job.stop()
        finally:
            self._all_injected.set()

    def _inject(self, fault: Fault) -> bool:
        job = self._job
        if job is None:
            return False
        injected = Injected(fault=fault, at_s=monotonic_s() - self._begun_s, attempt=self._attempt)
        with self._lock:
            text = self._begin_lasting(job, fault) if fault.kind in LASTING else self._strike(job, injected)
            if text is None:
                return False
            self._injected.append(injected)
            self._pending = injected
            if fault.kind not in LASTING:
                self._stepping.clear()
            self._note(injected, text)
        if fault.kind in LASTING:
            self._over.wait(self._plan.lasting_s)
            self._end_lasting(job, fault)
            with self._lock:
                if self._pending is injected and self._attempt == injected.attempt:
                    self._pending = None  # the job has gone on
        return True

    def _strike(self, job: Launcher | AttachedJob, injected: Injected) -> str | None:
        """The damage in words; None where the victims do not run now."""
        fault = injected.fault
        if fault.kind == "preempt":
            assert isinstance(job, Launcher), "refused at the start"
            self._preempting = True
            job.preempt()
            return "preempted the job"
        if isinstance(job, AttachedJob):
            does_harm = bool(fault.wipes or fault.flips)
            done = job.kill(fault.victims, (lambda: self._harm(injected)) if does_harm else None)
        else:
            killed = [job.kill(victim, wiped=fault.wipes) for victim in fault.victims]
            done = all(killed)
        return _past(fault) if done else None

    def _begin_lasting(self, job: Launcher | AttachedJob, fault: Fault) -> str | None:
        if fault.kind == "freeze":
            if not job.signal(fault.victims[0], signal.SIGSTOP):
                return None
        elif fault.kind == "fill":
            assert self._disk is not None
            return f"filled {self._disk.directory} with {self._disk.begin():,} bytes for {self._plan.lasting_s:g} s"
        else:
            assert self._bucket is not None
            self._bucket.begin()
        return f"{_past(fault)} for {self._plan.lasting_s:g} s"

    def _end_lasting(self, job: Launcher | AttachedJob, fault: Fault) -> None:
        if fault.kind == "freeze":
            job.signal(fault.victims[0], signal.SIGCONT)
        elif fault.kind == "fill":
            assert self._disk is not None
            self._disk.end()
        else:
            assert self._bucket is not None
            self._bucket.end()


def _past(fault: Fault) -> str:
    return fault.text.replace("kill ", "killed ").replace("freeze ", "froze ").replace("take ", "took ")
