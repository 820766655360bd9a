"""Starts the processes of a job on this machine, notices at once when one is lost, and starts the job again.

Of the command's words, {process}, {processes}, {coordinator} and {attempt} are replaced. Exit codes: 0 all
processes ended with 0; 1 the restart budget is spent; 2 the launcher's or the command's usage (a process that
exits with 2 has bad input and is never restarted); 130 interrupted (Ctrl-C or SIGTERM).
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ckptkit.clock import Deadline
from ckptkit.events import EventLog, Kind

BACKOFF_LIMIT_S = 60.0
LINE_LIMIT_CHARS = 65536  # a longer line is passed on in pieces: a child may never write a newline
OUTPUT_DRAIN_S = 5.0  # for what a dead child left in its pipe

# Between fork and exec, not as preexec_fn: that runs Python in a forked, threaded process, which may deadlock.
# The signal comes when the *thread* that started the child ends, so the thread of `run` is the one that starts.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):  # it died before prctl
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"cannot start {sys.argv[2]}: {error.strerror}\\n")
    os._exit(2)
"""


class ExitCode(IntEnum):
    """How a launched job ended; also the exit codes of `python -m tools.launch`."""

    OK = 0
    BUDGET_SPENT = 1
    USAGE = 2
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """At most `restarts`, the n-th after `backoff_s` * 2**n; survivors of a loss have `grace_s` after SIGTERM."""

    restarts: int = 3
    backoff_s: float = 1.0
    grace_s: float = 5.0

    def __post_init__(self):
        for name in ("restarts", "backoff_s", "grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The first process of an attempt that did not end well."""

    process: int
    returncode: int

    @property
    def cause(self) -> str:
        """The signal's name, or the exit code."""
        if self.returncode < 0:
            return signal.Signals(-self.returncode).name
        return f"exit code {self.returncode}"

    @property
    def is_usage(self) -> bool:
        """Whether it refused its input, which a restart does not mend."""
        return self.returncode == ExitCode.USAGE


class Launcher:
    """Runs `command` as `processes` processes until all end with 0, restarting all when one is lost.

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
        self._env = _child_env(env or {}, devices_per_process)
        self._policy = policy or RestartPolicy()
        self._on_output = on_output or OncePrinter()
        self._on_lost = on_lost or (lambda attempt, process: None)
        self._say = say or (lambda line: print(f"launch: {line}", file=sys.stderr, flush=True))
        self._events = events or EventLog(process=-1)
        self._children: list[_Child] = []
        self._wiped: dict[int, tuple[str, ...]] = {}
        self._errors: list[Exception] = []
        self._stops = 0
        self._wake_lock = threading.RLock()  # re-entrant: a signal handler may interrupt its holder
        self._wake: int | None = None

    def run(self) -> ExitCode:
        """Blocks until the job has ended, and returns how. Emits STARTED, DISRUPTED, RELAUNCHED, FINISHED.

        In the main thread SIGINT and SIGTERM mean `stop` while this runs.
        """
        code = ExitCode.INTERRUPTED
        self._events.emit(Kind.STARTED, attempt=0, pid=os.getpid())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with _signals_mean(self.stop):
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

    def kill(self, process: int, *, wiped: Sequence[str] = ()) -> bool:
        """SIGKILLs `process` and all that it started; False when it is not running. From any thread.

        `wiped` names the tiers that the caller wipes with it; it is only recorded in the event of the loss.
        """
        self._wiped[process] = tuple(wiped)  # first: the loss is noticed at once
        if any(child.signal(signal.SIGKILL) for child in self._children if child.process == process):
            return True
        self._wiped.pop(process, None)
        return False

    def _run_attempts(self) -> ExitCode:
        for attempt in range(self._policy.restarts + 1):
            loss = self._run_attempt(attempt)
            if self._stops:
                self._say("interrupted: all processes are stopped")
                return ExitCode.INTERRUPTED
            if loss is None:
                return ExitCode.OK
            if loss.is_usage:
                self._say(f"process {loss.process} refused its input ({loss.cause}): not restarted")
                return ExitCode.USAGE
            if attempt < self._policy.restarts:
                self._prepare_relaunch(attempt, loss)
        self._say(f"all {self._policy.restarts} restarts are spent: giving up")
        return ExitCode.BUDGET_SPENT

    def _prepare_relaunch(self, attempt: int, loss: Loss) -> None:
        self._on_lost(attempt, loss.process)
        backoff_s = min(self._policy.backoff_s * 2**attempt, BACKOFF_LIMIT_S)
        left = self._policy.restarts - attempt - 1
        self._say(f"restarting all {self._processes} processes in {backoff_s:g} s ({left} restarts left)")
        self._wait([], backoff_s)
        self._events.emit(Kind.RELAUNCHED, attempt=attempt + 1)

    def _run_attempt(self, attempt: int) -> Loss | None:
        """The loss that ended the attempt; None when it ended well or was stopped."""
        coordinator = f"127.0.0.1:{_free_port()}"
        try:
            for process in range(0 if self._stops else self._processes):
                argv = self._argv(process=process, coordinator=coordinator, attempt=attempt)
                self._children.append(_Child(process, argv, self._env, self._on_output, self._fail))
            for child in self._children:  # only now: `on_output` may `kill` any of them
                child.start_reading()
            loss = self._wait_for_loss()
            if loss is not None and not loss.is_usage:
                wiped = self._wiped.get(loss.process, ())
                self._events.emit(Kind.DISRUPTED, attempt=attempt, lost=loss.process, cause=loss.cause, wiped=wiped)
                self._say(f"attempt {attempt}: process {loss.process} was lost ({loss.cause})")
            return loss
        finally:
            self._stop_all()
            self._children, self._wiped = [], {}
            if self._errors:
                raise self._errors.pop()

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
        """Returns at the first child that does not end with 0, or None once all have, or when it must stop."""
        alive = list(self._children)
        while alive and not self._stops and not self._errors:
            ended = self._wait(alive)
            alive = [child for child in alive if child not in ended]
            losses = [Loss(process=child.process, returncode=code) for child in ended if (code := child.reap())]
            if losses and not self._errors:
                return min(losses, key=self._blame)
        return None

    def _wait(self, children: Sequence[_Child], timeout_s: float | None = None) -> list[_Child]:
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
        is_abort = loss.returncode == -signal.SIGABRT
        return not loss.is_usage, loss.process not in self._wiped, is_abort, loss.process

    def _stop_all(self) -> None:
        """SIGTERM, and SIGKILL after the grace; a hung JAX process ignores the first (its notifier eats it)."""
        alive = [child for child in self._children if child.signal(signal.SIGTERM)]
        grace = Deadline(self._policy.grace_s)
        while alive and not grace.passed and self._stops < 2:
            ended = self._wait(alive, grace.left_s)
            alive = [child for child in alive if child not in ended]
        for child in self._children:
            child.signal(signal.SIGKILL)
        for child in self._children:
            child.reap()


class _Child:
    """One process in a session of its own, its pidfd, and the thread that reads its output."""

    def __init__(
        self,
        process: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_output: Callable[[int, str], None],
        on_error: Callable[[Exception], None],
    ):
        self.process = process
        self._on_output = on_output
        self._on_error = on_error
        self._lock = threading.Lock()  # a reaped process id may be another's: no signal after that
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=env,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self._popen.pid)
        self._reader = threading.Thread(target=self._read, name=f"launch-output-{process}", daemon=True)

    def start_reading(self) -> None:
        """Passes output on from now; what came before has waited in the pipe."""
        self._reader.start()

    def signal(self, signum: int) -> bool:
        """Signals the process and all that it started; False when it has been reaped."""
        with self._lock:
            if self._popen.returncode is not None:
                return False
            os.killpg(self._popen.pid, signum)
            return True

    @property
    def is_reaped(self) -> bool:
        """Whether `reap` has seen its end."""
        return self._popen.returncode is not None

    def reap(self) -> int:
        """Waits for the end, ends what it left behind, delivers its last lines; returns its return code."""
        if self._popen.returncode is None:
            os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
            self.signal(signal.SIGKILL)  # its group: a grandchild would keep the pipe open
            with self._lock:
                self._popen.wait()
            if self._reader.ident is not None:  # it never started when a later process could not be
                self._reader.join(OUTPUT_DRAIN_S)
            os.close(self.pidfd)
        return self._popen.wait()

    def _read(self) -> None:
        """Passes lines on until the pipe ends; goes on reading after an error, so that the child never blocks."""
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            while line := lines.readline(LINE_LIMIT_CHARS):
                try:
                    self._on_output(self.process, line.rstrip("\n"))
                except Exception as error:  # noqa: BLE001  (top of a thread: `run` raises it)
                    self._on_error(error)


@contextmanager
def _signals_mean(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `stop` in the block; only the main thread may say so, elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, lambda *_: stop()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class OncePrinter:
    """Prints lines with their process, and a line that several processes print alike only once.

    The n-th time that a process prints a line is shown unless another process has already printed it n times.
    """

    LINES_KEPT = 10_000

    def __init__(self):
        self._lock = threading.Lock()
        self._printed: Counter[tuple[int, str]] = Counter()
        self._shown: Counter[str] = Counter()

    def __call__(self, process: int, line: str) -> None:
        """Prints `line` unless it is a repetition."""
        with self._lock:
            if len(self._printed) > self.LINES_KEPT:
                self._printed.clear()
                self._shown.clear()
            self._printed[process, line] += 1
            if self._printed[process, line] > self._shown[line]:
                self._shown[line] += 1
                print(f"[{process}] {line}", flush=True)


def _child_env(extra: Mapping[str, str], devices_per_process: int | None) -> dict[str, str]:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
    if devices_per_process is not None:
        name = "--xla_force_host_platform_device_count"
        others = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(name)]
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*others, f"{name}={devices_per_process}"])}
    return env


def _free_port() -> int:
    """A port that was free a moment ago; should another take it, the attempt fails and the next has a new one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _parse(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True, help="processes to start")
    parser.add_argument("--devices-per-process", type=int, help="virtual CPU devices of each (default: JAX's own)")
    parser.add_argument("--restarts", type=int, default=3, help="restart budget (default: %(default)s)")
    parser.add_argument("--backoff-s", type=float, default=1.0, help="wait before the first restart; doubles")
    parser.add_argument("--grace-s", type=float, default=5.0, help="from SIGTERM to SIGKILL (default: %(default)s)")
    parser.add_argument("--events", type=Path, help="directory for launcher.jsonl")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="what each process runs")
    return parser, parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser, args = _parse(sys.argv[1:] if argv is None else argv)
    try:
        launcher = Launcher(
            args.command,
            processes=args.processes,
            devices_per_process=args.devices_per_process,
            policy=RestartPolicy(restarts=args.restarts, backoff_s=args.backoff_s, grace_s=args.grace_s),
            events=EventLog(args.events / "launcher.jsonl", process=-1) if args.events else None,
        )
    except ValueError as error:
        parser.error(str(error))
    return launcher.run()


if __name__ == "__main__":
    sys.exit(main())
