"""Runs the processes of a job, notices at once when one is lost, and starts all of them again."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckptkit.events import EventLog, Kind
from ckptkit.util.clock import Deadline, monotonic_s
from tools.launch.child import Child, child_env
from tools.launch.policy import ExitCode, Loss, RestartPolicy
from tools.launch.printer import OncePrinter


class Launcher:
    """Runs `command` as `processes` processes until all end with 0, restarting all when one is lost.

    Of the command's words, {process}, {processes}, {coordinator} and {attempt} are replaced. A process may also end
    with `ExitCode.PREEMPTED`: once all have ended and one of them so, the job is over for now, its state saved.

    No child outlives the launcher, not even a launcher that is killed. `on_output(process, line)` is called
    from one thread per child, in order of its lines; `on_lost(attempt, process)` after all children of the
    attempt are dead and before the next starts. What a callback raises stops the job and is raised by `run`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        devices_per_process: int | None = None,
        env: Mapping[str, str] | None = None,
        policy: RestartPolicy | None = None,
        first_attempt: int = 0,
        coordinator_host: str = "127.0.0.1",
        on_output: Callable[[int, str], None] | None = None,
        on_lost: Callable[[int, int], None] | None = None,
        say: Callable[[str], None] | None = None,
        events: EventLog | None = None,
    ):
        if not command:
            raise ValueError("no command to launch: give it after --")
        if processes < 1:
            raise ValueError(f"processes is {processes}, expected 1 or more")
        if devices_per_process is not None and devices_per_process < 1:
            raise ValueError(f"devices per process is {devices_per_process}, expected 1 or more")
        self._command = tuple(command)
        self._processes = processes
        self._env = child_env(env or {}, devices_per_process)
        self._policy = policy or RestartPolicy()
        self._first_attempt = first_attempt
        self._coordinator_host = coordinator_host
        self._on_output = on_output or OncePrinter()
        self._on_lost = on_lost or (lambda attempt, process: None)
        self._say = say or (lambda line: print(f"launch: {line}", file=sys.stderr, flush=True))
        self._events = events or EventLog(process=-1)
        self._children: list[Child] = []
        self._wiped: dict[int, tuple[str, ...]] = {}
        self._errors: list[Exception] = []
        self._killed_s: dict[int, float] = {}
        self._stops = 0
        self._preempted = False
        self._wake_lock = threading.RLock()  # re-entrant: a signal handler may interrupt its holder
        self._wake: int | None = None

    def run(self) -> ExitCode:
        """Blocks until the job has ended, and returns how. Emits STARTED, DISRUPTED, RELAUNCHED, FINISHED.

        In the main thread SIGINT means `stop` and SIGTERM `preempt` while this runs.
        """
        code = ExitCode.INTERRUPTED
        self._events.emit(Kind.STARTED, attempt=self._first_attempt, pid=os.getpid())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with _signals_mean({signal.SIGINT: self.stop, signal.SIGTERM: self.preempt}):
                code = self._run_attempts()
        finally:
            with self._wake_lock:
                os.close(self._wake)
                self._wake = None
            self._events.emit(Kind.FINISHED, code=int(code))
        return code

    def stop(self) -> None:
        """Makes `run` stop all processes and return INTERRUPTED; a second call cuts the grace. From anywhere.

        A flag and a wake-up, never an exception: that could come between a fork and noting its child.
        """
        self._stops += 1
        self._wake_up()

    def preempt(self) -> None:
        """Makes `run` give all processes SIGTERM and `preempt_grace_s` to save a last step. From anywhere.

        `run` then returns PREEMPTED where all ended with that code (or were done), else INTERRUPTED. A second call
        means `stop`.
        """
        if self._preempted:
            self._stops += 1
        self._preempted = True
        self._wake_up()

    def kill(self, process: int, *, wiped: Sequence[str] = ()) -> bool:
        """SIGKILLs `process` and all that it started; False when it is not running. From any thread.

        `wiped` names the tiers that the caller wipes with it; it is only recorded in the event of the loss.
        """
        self._wiped[process] = tuple(wiped)  # first: the loss is noticed at once
        self._killed_s[process] = monotonic_s()
        if any(child.signal(signal.SIGKILL) for child in self._children if child.process == process):
            return True
        self._wiped.pop(process, None)
        return False

    def _run_attempts(self) -> ExitCode:
        for number in range(self._policy.restarts + 1):
            ended = self._run_attempt(self._first_attempt + number)
            if isinstance(ended, ExitCode):
                return ended
            if self._stops or self._preempted:
                self._say("interrupted: all processes are stopped")
                return ExitCode.INTERRUPTED
            if ended.is_usage:
                self._say(f"process {ended.process} refused its input ({ended.cause}): not restarted")
                return ExitCode.USAGE
            if number < self._policy.restarts:
                self._prepare_relaunch(number, ended)
        self._say(f"all {self._policy.restarts} restarts are spent: giving up")
        return ExitCode.BUDGET_SPENT

    def _prepare_relaunch(self, number: int, loss: Loss) -> None:
        attempt = self._first_attempt + number
        self._on_lost(attempt, loss.process)
        backoff_s = self._policy.backoff_after(number)
        left = self._policy.restarts - number - 1
        self._say(f"restarting all {self._processes} processes in {backoff_s:g} s ({left} restarts left)")
        self._wait([], backoff_s)
        self._events.emit(Kind.RELAUNCHED, attempt=attempt + 1)

    def _run_attempt(self, attempt: int) -> Loss | ExitCode:
        """The loss that ended the attempt, or how the job ended with it."""
        coordinator = f"{self._coordinator_host}:{free_port()}"
        is_told = self._stops or self._preempted
        try:
            for process in range(0 if is_told else self._processes):
                argv = self._argv(process=process, coordinator=coordinator, attempt=attempt)
                self._children.append(Child(process, argv, self._env, self._on_output, self._fail))
            for child in self._children:  # only now: `on_output` may `kill` any of them
                child.start_reading()
            loss = self._wait_for_loss()
            if loss is not None and not loss.is_usage:
                self._tell_loss(attempt, loss)
            self._stop_all()
            return loss or self._how_it_ended()
        finally:
            self._stop_all()
            self._children, self._wiped, self._killed_s = [], {}, {}
            if self._errors:
                raise self._errors.pop()

    def _tell_loss(self, attempt: int, loss: Loss) -> None:
        fields: dict[str, Any] = {"wiped": self._wiped.get(loss.process, ())}
        if loss.process in self._killed_s:  # by `kill`: nobody else's moment is known
            fields["detect_s"] = round(monotonic_s() - self._killed_s[loss.process], 6)
        self._events.emit(Kind.DISRUPTED, attempt=attempt, lost=loss.process, cause=loss.cause, **fields)
        self._say(f"attempt {attempt}: process {loss.process} was lost ({loss.cause})")

    def _how_it_ended(self) -> ExitCode:
        """How the job ended with an attempt in which nothing was lost."""
        codes = [child.returncode for child in self._children]
        if not codes or any(Loss.is_one(code) for code in codes if code is not None):
            self._say("interrupted: all processes are stopped")
            return ExitCode.INTERRUPTED
        if ExitCode.PREEMPTED not in codes:
            return ExitCode.OK
        self._say("preempted, state saved: the same command goes on from there")
        return ExitCode.PREEMPTED

    def _fail(self, error: Exception) -> None:
        """A callback raised in a reader's thread: `_run_attempt` raises it."""
        self._errors.append(error)
        self._wake_up()

    def _wake_up(self) -> None:
        with self._wake_lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    def _argv(self, **values: object) -> list[str]:
        """The command for one process; not `str.format`, since a command may hold other braces."""
        words = list(self._command)
        for name, value in {"processes": self._processes, **values}.items():
            words = [word.replace(f"{{{name}}}", str(value)) for word in words]
        return words

    def _wait_for_loss(self) -> Loss | None:
        """Returns at the first child that is lost, or None once all have, or when it must stop."""
        alive = list(self._children)
        while alive and not (self._stops or self._preempted or self._errors):
            ended = self._wait(alive)
            alive = [child for child in alive if child not in ended]
            codes = [(child.process, child.reap()) for child in ended]
            losses = [Loss(process=process, returncode=code) for process, code in codes if Loss.is_one(code)]
            if losses and not self._errors:
                return self._silent(min(losses, key=self._blame), alive)
        return None

    @staticmethod
    def _silent(loss: Loss, alive: Sequence[Child]) -> Loss:
        """The one that others gave up: who aborts has missed the heartbeats of one that is stopped."""
        stopped = [child for child in alive if child.is_stopped()] if loss.is_abort else []
        return Loss(process=stopped[0].process, returncode=-signal.SIGSTOP) if stopped else loss

    def _wait(self, children: Sequence[Child], timeout_s: float | None = None) -> list[Child]:
        """Those of `children` that have ended, as soon as one has; none when woken or the time is over."""
        assert self._wake is not None, "only `run` waits"
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for child in children:
                selector.register(child.pidfd, selectors.EVENT_READ, child)
            ready = [key for key, _ in selector.select(timeout_s)]
            if any(key.fd == self._wake for key in ready):
                os.eventfd_read(self._wake)
            return [key.data for key in ready if key.fd != self._wake]

    def _blame(self, loss: Loss) -> tuple[bool, bool, bool, int]:
        """Of several lost at once: bad input, then who was killed from here, and last who aborted over others."""
        return not loss.is_usage, loss.process not in self._wiped, loss.is_abort, loss.process

    def _stop_all(self) -> None:
        """SIGTERM, and SIGKILL after the grace; a hung JAX process ignores the first (its notifier eats it)."""
        alive = [child for child in self._children if child.signal(signal.SIGTERM)]
        is_last_save = self._preempted and not self._stops
        if is_last_save and alive:
            self._say(f"preempted: the processes have {self._policy.preempt_grace_s:g} s to save their last step")
        grace = Deadline(self._policy.preempt_grace_s if is_last_save else self._policy.grace_s)
        stops_max = 0 if is_last_save else 1
        while alive and not grace.passed and self._stops <= stops_max:
            ended = self._wait(alive, grace.left_s)
            alive = [child for child in alive if child not in ended]
        for child in self._children:
            child.signal(signal.SIGKILL)
        for child in self._children:
            child.reap()


@contextmanager
def _signals_mean(acts: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """The signals call the acts in the block; only the main thread may say so, elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, lambda *_, act=act: act()) for signum, act in acts.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def free_port() -> int:
    """A port that was free a moment ago; should another take it, the attempt fails and the next has a new one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
