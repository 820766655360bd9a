"""Faults on a running job: workers or whole hosts killed, workers frozen, the job preempted, a disk filled, the bucket
taken away, directories emptied, bits flipped.

The faults are real: signals to the job's processes, deletions and writes in its directories. A planned fault comes some
time after the job has made a step, so a job that does not come back is not hit again. Where several jobs are to get
the same faults, it comes some time after the launch. `Chaos.inject` injects one at a moment that the caller chooses.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

from ckptkit.events import Event, EventLog, Kind
from ckptkit.launch.faults import ANY, LASTING, PLACES, Fault, is_own
from ckptkit.launch.harm import FullDisk, LocalBucket, emptied, flipped
from ckptkit.launch.launcher import Launcher
from ckptkit.launch.policy import ExitCode, Hooks
from ckptkit.launch.signals import signals_mean
from ckptkit.launch.status import AttachedJob
from ckptkit.util.clock import Deadline, monotonic_s, wall_s
from ckptkit.util.words import count_text

_START_MAX_S = 60.0  # a job that marks no steps counts as running after this
_LOOK_S = 0.1
FLIPPED = "flipped a bit of "  # then the place, in `Injected.did`
_AGAIN_S = 0.02  # where the victims do not run now


@dataclass(slots=True, kw_only=True)
class Injected:
    """A fault that happened. `at_s`: seconds from the start of the job; `did`: the damage in words.

    `back_s`: until the job made a step again; `repeated`: the steps that it did again. None where it is not known.
    """

    fault: Fault
    at_s: float
    attempt: int
    did: list[str] = field(default_factory=list)
    back_s: float | None = None
    repeated: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """The end of a job under faults. `code` is None for a job that continues, since it was not started here."""

    code: ExitCode | None
    seconds: float
    injected: tuple[Injected, ...]
    missed: int  # faults that were planned for a time after the job's end
    unplanned: tuple[str, ...]  # losses that no fault explains


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The targets of faults other than processes. `places(process)` gives the directories of a process's tiers by
    name, for faults that name a tier."""

    bucket: LocalBucket | None = None
    disk: FullDisk | None = None
    places: Callable[[int], Mapping[str, str]] = lambda process: {}


@final
class Chaos:
    """Hits a job with faults, one after another. A loss while a fault is under way counts as the fault's.

    `run` starts the job, and starts it again after each loss as `ckptkit run` does. `attach` hits one that runs.
    Lasting faults take `lasting_s`. `flip(directory)` flips a bit and returns the place in words, None where it finds
    none. Each fault, and each damage, is an event in `events`. `on_lost(attempt, process, struck)` is called when all
    processes are dead and the damage is done; `struck` are the faults that ended the attempt, none for its own loss.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        lasting_s: float = 5.0,
        targets: Targets = Targets(),
        flip: Callable[[Path], str | None] | None = None,
        events: EventLog | None = None,
        on_lost: Callable[[int, int, Sequence[Injected]], None] = lambda attempt, process, struck: None,
        say: Callable[[str], None],
    ):
        self._faults, self._lasting_s, self._targets = tuple(faults), lasting_s, targets
        self._on_lost, self._say = on_lost, say
        self._events = events or EventLog(process=-1)
        self._flip = flip or partial(flipped, chance=random.Random(0))
        for fault in self._faults:
            self._check(fault)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._all_injected = threading.Event()
        self._error: Exception | None = None
        self._stepping = threading.Event()
        self._injected: list[Injected] = []
        self._unplanned: list[str] = []
        self._pending: Injected | None = None  # the job has not made a step since
        self._due: list[Injected] = []  # their damage is done at the next loss
        self._attempt = 0
        self._job: Launcher | AttachedJob | None = None
        self._begun_s = 0.0
        self._recoveries = 0
        self._preempting = False

    def run(
        self,
        make: Callable[[Hooks, int], Launcher],
        *,
        first_attempt: int = 0,
        on_output: Callable[[int, str], None],
    ) -> ChaosRun:
        """Blocks until the job has ended. After the last fault it is left alone. Raises what `Launcher.run` raises.

        `make(hooks, first_attempt)` makes the launcher; it is called again after a preemption.
        """
        self._attempt = first_attempt
        hooks = Hooks(
            on_output=on_output,
            on_attempt=self._begin,
            on_lost=self._after_loss,
            on_status=self._take_status,
            say=self._say,
        )

        def launch() -> ExitCode:
            while True:
                self._recoveries = 0
                self._job = launcher = make(hooks, self._attempt)
                code = launcher.run()
                if not self._preempting or code == ExitCode.OK or launcher.is_stopped:
                    return code
                self._preempting = False
                self._after_loss(self._attempt, -1)
                self._attempt += 1

        ended = self._under_faults(launch)
        for injected in self._due:
            self._note(injected, "the job ended without a loss")
        return ended

    def stop(self) -> None:
        """Makes `run` stop the job. From any thread."""
        if isinstance(self._job, Launcher):
            self._job.stop()

    def inject(self, fault: Fault) -> bool:
        """Injects a fault now, and returns after a lasting one has ended; False where its victims do not run. From any
        thread, also from `on_output`."""
        self._check(fault)
        job = self._job
        if job is None:
            return False
        lasts: dict[str, Any] = {"lasts_s": self._lasting_s} if fault.kind in LASTING else {}
        with self._lock:
            at_s = wall_s()
            injected = Injected(fault=fault, at_s=monotonic_s() - self._begun_s, attempt=self._attempt)
            text = self._begin_lasting(job, fault) if fault.kind in LASTING else self._strike(job, injected)
            if text is None:
                return False
            self._injected.append(injected)
            self._pending = injected
            self._due.append(injected)
            if fault.kind not in LASTING:
                self._stepping.clear()
            self._note(injected, text, what=fault.kind, target=fault.target, at_s=at_s, **lasts)
        if fault.kind in LASTING:
            self._over.wait(self._lasting_s)
            self._end_lasting(job, fault)
            with self._lock:
                if self._pending is injected and self._attempt == injected.attempt:
                    self._pending = None  # the job has gone on
                    self._due.remove(injected)
        return True

    def attach(self, job: AttachedJob) -> ChaosRun:
        """Blocks until the last fault is over and the job makes steps again, or until the job has ended.

        Only workers of this host are hit. Raises `ValueError` for preemptions: they would end the job.
        """
        if any(fault.kind == "preempt" for fault in self._faults):
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

        return self._under_faults(follow)

    def _check(self, fault: Fault) -> None:
        if fault.kind == "outage" and self._targets.bucket is None:
            raise ValueError("an outage needs a bucket to take away")
        if fault.kind == "fill" and self._targets.disk is None:
            raise ValueError("a full disk needs a directory on the file system to fill")

    def _under_faults(self, drive: Callable[[], ExitCode | None]) -> ChaosRun:
        self._begun_s = monotonic_s()
        injector = threading.Thread(target=self._inject_all, name="ckptkit-chaos", daemon=True)
        injector.start()
        try:
            with signals_mean({signal.SIGTERM: _interrupt, signal.SIGHUP: _interrupt}):
                code = drive()
        finally:  # a lasting fault ends too
            self._over.set()
            injector.join()
        if self._error is not None:
            raise self._error
        return ChaosRun(
            code=code,
            seconds=monotonic_s() - self._begun_s,
            injected=tuple(self._injected),
            missed=len(self._faults) - len(self._injected),
            unplanned=tuple(self._unplanned),
        )

    # In the thread of the launcher, and in the main thread.

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._stepping.clear()

    def _take_status(self, status: Mapping[str, Any]) -> None:
        with self._lock:
            back = status.get("newest_attempt_with_steps") == self._attempt
            found = status["recoveries"][self._recoveries :]
            self._recoveries += len(found)
            if self._pending is not None and back and self._pending.attempt < self._attempt:
                if self._pending.back_s is None:
                    self._pending.back_s = monotonic_s() - self._begun_s - self._pending.at_s
                self._pending = None
            for each in found if self._injected else ():
                last = self._injected[-1]
                last.repeated = each["repeated"]
                if last.fault.kind in ("kill", "host"):  # the loss is the fault: the launcher knows both ends better
                    last.back_s = each["seconds"]
            if back and self._pending is None:
                self._stepping.set()

    def _after_loss(self, attempt: int, process: int) -> None:
        """All processes are dead: the files that the faults take with them go now."""
        with self._lock:
            struck, self._due = self._due, []
            if not struck and self._pending is None:
                self._unplanned.append(f"attempt {attempt}: process {process} was lost by itself")
            for injected in struck:
                self._harm(injected)
        self._on_lost(attempt, process, struck)  # outside the lock: the caller may hold its own while it injects

    def _harm(self, injected: Injected) -> None:
        for place in injected.fault.wipes:
            paths = self._paths(place, injected)
            for path in paths:
                self._note(
                    injected, f"emptied {path}: {count_text(emptied(path), 'file')}", what="wipe", target=str(path)
                )
            if not paths:
                self._note(injected, f"no {place} to empty: the job's event log names no such directory")
        for place in injected.fault.flips:
            paths = self._paths(place, injected)
            for path in paths:
                if hit := self._flip(path):
                    self._note(injected, f"{FLIPPED}{hit}", what="flip", target=str(path))
                    break
            else:
                where = f"below {' or '.join(map(str, paths))}" if paths else f"in {place}: the event log names none"
                self._note(injected, f"no file to flip {where}")

    def _paths(self, place: str, injected: Injected) -> list[Path]:
        """The directories of a place; of any place all that the victim has, and another one first at each fault."""
        if place not in PLACES:
            return [Path(place)]
        places = sorted(self._targets.places(injected.fault.victims[0]).items())
        found = [Path(path) for name, path in places if place in (name, ANY) and is_own(path)]
        first = injected.fault.number % max(1, len(found))
        return [*found[first:], *found[:first]]

    def _note(self, injected: Injected, text: str, *, what: str = "", at_s: float | None = None, **fields: Any) -> None:
        """Keeps and shows what was done, in words; with `what` as an event too."""
        injected.did.append(text)
        if what:
            fields = {"fault": injected.fault.number, "what": what, "did": text, **fields}
            at_s = wall_s() if at_s is None else at_s
            self._events.record(Event(kind=Kind.INJECTED, at_s=at_s, process=-1, fields=fields))
        self._say(f"chaos: {text}")

    # In the thread of the faults.

    def _inject_all(self) -> None:
        try:
            for fault in self._faults:
                if not self._await(fault):
                    return
                while not self.inject(fault):  # between two attempts: the next one is hit
                    if self._over.wait(_AGAIN_S):
                        return
        except (OSError, ValueError) as error:  # raised where `run` waits
            self._error = error
            self.stop()
        finally:
            self._all_injected.set()

    def _await(self, fault: Fault) -> bool:
        """Waits for the moment of a fault; False if the job ends before."""
        if fault.since == "launch":
            return not self._over.wait(max(0.0, self._begun_s + fault.after_s - monotonic_s()))
        start = Deadline(_START_MAX_S)
        while not self._stepping.is_set() and not start.passed:
            if self._over.wait(_LOOK_S):
                return False
        return not self._over.wait(fault.after_s)

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
            wiped = tuple(str(path) for place in fault.wipes for path in self._paths(place, injected))
            killed = [job.kill(victim, wiped=wiped) for victim in fault.victims]
            done = any(killed)  # one that had ended already needs no second kill
        return _past(fault) if done else None

    def _begin_lasting(self, job: Launcher | AttachedJob, fault: Fault) -> str | None:
        if fault.kind == "freeze":
            if not job.signal(fault.victims[0], signal.SIGSTOP):
                return None
        elif fault.kind == "fill":
            disk = self._targets.disk
            assert disk is not None
            return f"filled {disk.directory} with {disk.begin():,} bytes for {self._lasting_s:g} s"
        else:
            assert self._targets.bucket is not None
            self._targets.bucket.begin()
        return f"{_past(fault)} for {self._lasting_s:g} s"

    def _end_lasting(self, job: Launcher | AttachedJob, fault: Fault) -> None:
        if fault.kind == "freeze":
            job.signal(fault.victims[0], signal.SIGCONT)
        elif fault.kind == "fill":
            assert self._targets.disk is not None
            self._targets.disk.end()
        else:
            assert self._targets.bucket is not None
            self._targets.bucket.end()


def _interrupt() -> None:
    raise KeyboardInterrupt


def _past(fault: Fault) -> str:
    return fault.text.replace("kill ", "killed ").replace("freeze ", "froze ").replace("take ", "took ")
