"""Runs the processes of a job, notices at once when one is lost, and starts all of them again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckptkit.events import EventLog, Kind
from ckptkit.launch.child import Child, ended_among
from ckptkit.launch.host import LocalHost
from ckptkit.launch.policy import (
    ExitCode,
    HangPolicy,
    Hooks,
    JobPlace,
    Loss,
    RestartPolicy,
    Workers,
    free_port,
    specs_of,
)
from ckptkit.launch.roster import Roster
from ckptkit.launch.signals import Told, passed_by, signals_mean
from ckptkit.launch.status import Status
from ckptkit.launch.watch import Hang, Watch
from ckptkit.util.clock import Deadline, monotonic_s
from ckptkit.util.words import count_text, first_of

_TICK_S = 0.1  # for beats, and for templates
_DUMP_S = 1.0  # for the stacks of a job that hangs


class Launcher:
    """Runs `workers` until all end with 0, restarting all when one is lost.

    A worker may also end with `ExitCode.PREEMPTED`: once all have ended and one of them so, the job is over for now.
    The steps of warm workers are watched: one without steps is lost after the time of `hang` (None:
    never). With the roster that `make_roster` makes, other hosts run as many workers of the same command each.

    No child outlives the launcher, not even a launcher that is killed.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        policy: RestartPolicy | None = None,
        hang: HangPolicy | None = None,
        first_attempt: int = 0,
        coordinator_host: str = "127.0.0.1",
        make_roster: Callable[[Callable[[], None]], Roster] | None = None,
        hooks: Hooks | None = None,
        events: EventLog | None = None,
    ):
        self._workers, self._hooks = workers, hooks or Hooks()
        self._total = workers.processes
        self._policy = policy or RestartPolicy()
        self._first_attempt = first_attempt
        self._coordinator_host = coordinator_host
        self._status = Status(self._hooks.on_status)
        self._say = self._hooks.say
        self._events = events or EventLog(process=-1)
        self._local = LocalHost(workers, self._hooks, self._fail, self._is_told)
        self._watch = Watch(hang) if workers.warm is not None else None
        self._wiped: dict[int, tuple[str, ...]] = {}
        self._errors: list[Exception] = []
        self._killed_s: dict[int, float] = {}
        self._told = Told()
        self._to_pass: list[int] = []
        self._codes: dict[int, int] = {}  # of workers of other hosts that have ended
        self._wake_lock = threading.RLock()  # re-entrant: a signal handler may interrupt its holder
        self._wake: int | None = None
        self._roster = None if make_roster is None else make_roster(self._wake_up)

    def run(self) -> ExitCode:
        """Blocks until the job has ended, and returns how. Emits STARTED, DISRUPTED, RELAUNCHED, FINISHED.

        In the main thread SIGINT and SIGHUP mean `stop`, SIGTERM means `preempt`, and SIGUSR1 and SIGUSR2 go to the
        processes of this host while this runs.
        """
        code = ExitCode.INTERRUPTED
        self._events.emit(Kind.STARTED, attempt=self._first_attempt, pid=os.getpid())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        acts = {signal.SIGINT: self.stop, signal.SIGHUP: self.stop, signal.SIGTERM: self.preempt}
        try:
            with signals_mean({**acts, **passed_by(self.pass_on)}):
                code = self._run_attempts()
        finally:
            self._local.templates.close()
            if self._roster is not None:
                self._roster.close(int(code))
            with self._wake_lock:
                os.close(self._wake)
                self._wake = None
            self._events.emit(Kind.FINISHED, code=int(code))
            self._status.ended(int(code))
        return code

    def stop(self) -> None:
        """Makes `run` stop all processes and return INTERRUPTED; a second call cuts the grace. From anywhere.

        A flag and a wake-up, never an exception: that could come between a fork and noting its child.
        """
        self._told.stopped += 1
        self._wake_up()

    def preempt(self) -> None:
        """Makes `run` give all processes SIGTERM and `preempt_grace_s` to save a last step. From anywhere.

        `run` then returns PREEMPTED where all ended with that code (or were done), else INTERRUPTED. A second call
        means `stop`.
        """
        self._told.preempted += 1
        self._wake_up()

    def pass_on(self, signum: int) -> None:
        """Makes `run` give the processes of this host the signal, if they run. From anywhere."""
        self._to_pass.append(signum)
        self._wake_up()

    def kill(self, process: int, *, wiped: Sequence[str] = ()) -> bool:
        """SIGKILLs `process` and all that it started; False when it is not running. From any thread.

        `wiped` names the tiers that the caller wipes with it; it is only recorded in the event of the loss.
        """
        self._wiped[process] = tuple(wiped)  # first: the loss is noticed at once
        self._killed_s[process] = monotonic_s()
        if self.signal(process, signal.SIGKILL):
            return True
        self._wiped.pop(process, None)
        return False

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has called `stop`, or pressed Ctrl-C."""
        return self._stops > 0

    @property
    def _stops(self) -> int:
        return max(self._told.stops, 0 if self._roster is None else self._roster.told.stops)

    @property
    def _is_preempted(self) -> bool:
        return self._told.preempted > 0 or (self._roster is not None and self._roster.told.preempted > 0)

    def signal(self, process: int, signum: int) -> bool:
        """Sends a signal to `process` of this host; False when it is not running. From any thread."""
        return any(child.signal(signum) for child in self._local.children if child.process == process)

    def _run_attempts(self) -> ExitCode:
        in_a_row = 0
        for number in range(self._policy.restarts + 1):
            ended = self._run_attempt(self._first_attempt + number)
            if isinstance(ended, ExitCode):
                return ended
            if self._is_told():
                self._say("interrupted: all processes are stopped")
                return ExitCode.INTERRUPTED
            if ended.is_usage:
                self._say(f"process {ended.process} refused its input ({ended.cause}): not restarted")
                return ExitCode.USAGE
            if number < self._policy.restarts:
                self._prepare_relaunch(number, ended, in_a_row)
            in_a_row = 0 if self._went_on else in_a_row + 1
        spent = f"all {self._policy.restarts} restarts are spent" if self._policy.restarts > 1 else "no restart is left"
        self._say(f"{spent}: giving up")
        return ExitCode.BUDGET_SPENT

    def _prepare_relaunch(self, number: int, loss: Loss, in_a_row: int) -> None:
        """Waits before a restart, unless the lost attempt went on: then what ended it is not what a start does."""
        attempt = self._first_attempt + number
        self._hooks.on_lost(attempt, loss.process)
        backoff_s = 0.0 if self._went_on else self._policy.backoff_after(in_a_row)
        left = self._policy.restarts - number - 1
        again = ""
        if self._watch is not None and self._watch.fails_again:
            again = f"it failed after step {self._watch.reached} again; "
        these = "the process" if self._total == 1 else f"all {self._total} processes"
        self._say(f"{again}restarting {these} in {backoff_s:g} s ({count_text(left, 'restart')} left)")
        if backoff_s:
            self._wait([], backoff_s)
        self._events.emit(Kind.RELAUNCHED, attempt=attempt + 1)

    @property
    def _went_on(self) -> bool:
        return self._watch is not None and self._watch.has_stepped and not self._watch.fails_again

    def _run_attempt(self, attempt: int) -> Loss | ExitCode:
        """The loss that ended the attempt, or how the job ended with it."""
        hosts = 1 if self._roster is None else self._roster.assemble(self._is_told)
        if hosts is None and not self._is_told():
            self._say("too few hosts came: giving up")
            return ExitCode.BUDGET_SPENT
        self._hooks.on_attempt(attempt)
        try:
            if hosts is not None and not self._is_told():
                self._start(attempt, hosts)
            loss = self._wait_for_loss()
            noticed_s = monotonic_s()
            if loss is not None and not loss.is_usage:
                self._tell_loss(attempt, loss)
            self._stop_all()
            if loss is not None and not loss.is_usage:
                self._status.all_ended(monotonic_s() - noticed_s)
            return loss or self._how_it_ended()
        finally:
            self._stop_all()
            self._local.children = []
            self._wiped, self._killed_s, self._codes = {}, {}, {}
            if self._errors:
                raise self._errors.pop()

    def _is_told(self) -> bool:
        return self._stops > 0 or self._is_preempted

    def _start(self, attempt: int, hosts: int) -> None:
        here = self._workers.processes
        self._total = hosts * here
        coordinator = f"{self._coordinator_host}:{free_port('' if hosts > 1 else '127.0.0.1')}"
        if self._roster is not None:
            self._roster.start(attempt, coordinator)
        place = JobPlace(first=0, here=here, processes=self._total, coordinator=coordinator, attempt=attempt)
        self._local.start(specs_of(self._workers.command, place, self._workers.prefixes))
        if self._watch is not None:
            self._watch.begin(attempt)
        self._to_pass.clear()  # they were for workers that have ended: new ones have no handlers yet
        for child in self._local.children:  # only now: `on_output` may `kill` any of them
            child.start_reading()
        self._status.running(attempt, {child.process: child.pid for child in self._local.children}, self._total)

    def _tell_loss(self, attempt: int, loss: Loss) -> None:
        noticed_s = monotonic_s()
        lost_s = self._killed_s.get(loss.process, noticed_s)  # by `kill`: the moment of other losses is not known
        fields: dict[str, Any] = {"wiped": self._wiped.get(loss.process, ())}
        if loss.process in self._killed_s:
            fields["detect_s"] = round(noticed_s - lost_s, 6)
        if self._watch is not None:
            self._take_beats(self._watch)  # the last steps before the loss
            self._watch.lost(lost_s, failed=loss.returncode > 0)
        self._events.emit(Kind.DISRUPTED, attempt=attempt, lost=loss.process, cause=loss.cause, **fields)
        self._status.lost(attempt, loss.process, loss.cause)
        self._say(f"attempt {attempt}: process {loss.process} was lost ({loss.cause})")

    def _how_it_ended(self) -> ExitCode:
        """How the job ended with an attempt in which nothing was lost."""
        codes = {child.process: child.returncode for child in self._local.children} | self._codes
        well = {process for process, code in codes.items() if code is not None and not Loss.is_one(code)}
        if not codes or len(well) < self._total:
            if self._is_preempted and codes:
                missing = first_of([process for process in range(self._total) if process not in well], 5)
                self._say(f"preempted, but these processes ended before they had saved their last step: {missing}")
            self._say("interrupted: all processes are stopped")
            return ExitCode.INTERRUPTED
        if ExitCode.PREEMPTED not in codes.values():
            first = self._local.beats().get(0)
            if first is not None and first.behind is not None:
                self._say(f"the job has ended, and {first.behind}; the last warning of process 0 has the reason")
            return ExitCode.OK
        self._say("preempted: the same command continues from the newest save")
        return ExitCode.PREEMPTED

    def _fail(self, error: Exception) -> None:
        """A callback raised in a reader's thread: `_run_attempt` raises it."""
        self._errors.append(error)
        self._wake_up()

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    def _wait_for_loss(self) -> Loss | None:
        """Returns at the first child that is lost, or None once all have, or when it must stop."""
        alive = list(self._local.children)
        others = self._total - len(alive) if alive else 0  # workers of other hosts
        while (alive or len(self._codes) < others) and not (self._is_told() or self._errors):
            ended = self._wait(alive, None if self._watch is None else _TICK_S)
            alive = [child for child in alive if child not in ended]
            codes = [(child.process, child.reap()) for child in ended]
            losses = [Loss(process=process, returncode=code) for process, code in codes if Loss.is_one(code)]
            losses += self._take_reports()
            if losses and not self._errors:
                return self._silent(min(losses, key=self._blame), alive)
            while self._to_pass:
                self._local.signal(self._to_pass.pop(0))
            if self._watch is not None and (hung := self._look(self._watch)) is not None:
                return hung
        if self._watch is not None and self._local.children:
            self._take_beats(self._watch)  # the last steps of the attempt
        return None

    def _take_reports(self) -> list[Loss]:
        """Notes the return codes that other hosts have reported, and returns their losses."""
        if self._roster is None:
            return []
        codes, losses = self._roster.take()
        self._codes |= codes
        return losses

    def _look(self, watch: Watch) -> Loss | None:
        """Looks at the beats: the first worker that hangs is the loss. The log has the stacks of all, from the first
        suspicion on."""
        self._local.tick()
        if self._roster is not None and self._local.templates.is_warm:
            self._roster.warm_spares()
        hung = self._take_beats(watch)
        if hung is None:
            return None
        passed = f"process {hung.process} has made no step for {hung.pause_s:.0f} s"
        rule = f"it is ended as hung after {2 * hung.limit_s:.0f} s; --hang-timeout sets another limit"
        self._say(f"{passed}; the stacks of its busy threads are in the log" + ("" if hung.is_lost else f"; {rule}"))
        self._local.dump()
        if self._roster is not None:
            self._roster.tell("dump")
        if not hung.is_lost:
            return None
        self._wait([], _DUMP_S)
        why = f"no step for {hung.pause_s:.0f} s, the limit is {hung.limit_s:.0f} s; --hang-timeout sets another"
        return Loss(process=hung.process, returncode=-signal.SIGSTOP, why=why)

    def _take_beats(self, watch: Watch) -> Hang | None:
        """Shows the content of the newest beats; returns the worker that hangs."""
        beats = self._local.beats()
        if (back := watch.recovery(beats)) is not None:
            self._say(back.text)
            self._status.recovered(back)
        if self._roster is not None:
            beats |= self._roster.beats()
        for line in watch.pace.look(beats):
            self._say(line)
        hung = watch.look(beats)
        if watch.has_stepped:
            self._status.stepped(watch.attempt, watch.reached)
        return hung

    @staticmethod
    def _silent(loss: Loss, alive: Sequence[Child]) -> Loss:
        """The one that others gave up: who aborts has missed the heartbeats of one that is stopped."""
        stopped = [child for child in alive if child.is_stopped()] if loss.is_abort else []
        return Loss(process=stopped[0].process, returncode=-signal.SIGSTOP) if stopped else loss

    def _wait(self, children: Sequence[Child], timeout_s: float | None = None) -> list[Child]:
        """Those of `children` that have ended, as soon as one has; none when woken or the time is over."""
        assert self._wake is not None, "only `run` waits"
        return ended_among(children, self._wake, timeout_s)

    def _blame(self, loss: Loss) -> tuple[bool, bool, bool, int]:
        """Of several lost at once: bad input, then who was killed from here, and last who aborted over others."""
        return not loss.is_usage, loss.process not in self._wiped, loss.is_abort, loss.process

    def _stop_all(self) -> None:
        """SIGTERM, and SIGKILL after the grace; a hung JAX process ignores the first (its notifier eats it)."""
        alive = [child for child in self._local.children if child.signal(signal.SIGTERM)]
        is_last_save = self._is_preempted and not self._stops
        if is_last_save and alive:
            self._say(f"preempted: the processes have {self._policy.preempt_grace_s:g} s to save their last step")
        grace_s = self._policy.preempt_grace_s if is_last_save else self._policy.grace_s
        if self._roster is not None:
            self._roster.tell("stop", grace_s=grace_s)
        grace = Deadline(grace_s)
        stops_max = 0 if is_last_save else 1
        while alive and not grace.passed and self._stops <= stops_max:
            ended = self._wait(alive, grace.left_s)
            alive = [child for child in alive if child not in ended]
        self._local.kill()
        if self._roster is not None:
            self._roster.wait_until_stopped(grace_s, lambda: self._stops > stops_max)
            self._take_reports()
