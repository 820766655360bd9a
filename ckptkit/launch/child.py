"""One process of a job: it dies with the agent, and its output is read to the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from mmap import mmap
from multiprocessing import connection
from pathlib import Path

from ckptkit.launch.stacks import BusyStacks
from ckptkit.util.clock import Deadline

LINE_LIMIT_CHARS = 65536  # a longer line is passed on in pieces: a child may never write a newline
OUTPUT_DRAIN_S = 5.0  # for what a dead child left in its pipe
_FOR_ALL = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
_GROUP_S = 1.0  # for what it started and SIGKILL has not ended yet

# Between fork and exec: `preexec_fn` runs Python in a forked, threaded process, which may deadlock.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process that was started, and the end of the pipe from which its output is read.

    `is_wrapper`: it may be a shell, which passes no signal on to the process that does the work.
    """

    pid: int
    output_fd: int
    is_wrapper: bool = False


def spawn_command(argv: Sequence[str], env: Mapping[str, str]) -> Running:
    """Starts a command that knows nothing of its agent."""
    shim = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    return replace(spawn([*shim, *argv], env), is_wrapper=True)


def spawn(
    argv: Sequence[str], env: Mapping[str, str], *, fds: Sequence[int] = (), output: int | None = None
) -> Running:
    """Starts `argv` in a session of its own, with `fds` open under the same numbers. It ends itself with its parent.

    Its output goes to a pipe, or to the open file `output`.
    """
    output_fd, write_fd = os.pipe() if output is None else (output, os.dup(output))
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        *((os.POSIX_SPAWN_DUP2, write_fd, fd) for fd in (1, 2)),
        *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds),  # the same number: it is kept over exec
    ]
    ignored_here = [signal.SIGPIPE, signal.SIGXFSZ]  # by Python
    try:
        pid = os.posix_spawnp(argv[0], list(argv), env, file_actions=actions, setsid=True, setsigdef=ignored_here)
    except BaseException:
        if output is None:
            os.close(output_fd)
        raise
    finally:
        os.close(write_fd)
    return Running(pid=pid, output_fd=output_fd)


class Child:
    """One process in a session of its own, its pidfd, and the thread that reads its output."""

    returncode: int | None = None  # once reaped

    def __init__(
        self,
        process: int,
        running: Running,
        on_output: Callable[[int, str], None],
        on_error: Callable[[Exception], None],
        beats: mmap | None = None,
    ):
        """`beats` is where it marks its steps, if it can."""
        self.process, self.beats = process, beats
        self.pid = running.pid
        self._is_wrapper = running.is_wrapper
        self._on_output = on_output
        self._on_error = on_error
        self._lock = threading.Lock()  # a reaped process id may be another's: no signal after that
        self._output_fd = running.output_fd
        self.pidfd = os.pidfd_open(running.pid)
        self._reader = threading.Thread(target=self._read, name=f"launch-output-{process}", daemon=True)

    def start_reading(self) -> None:
        """Passes output on from now; what came before has waited in the pipe."""
        self._reader.start()

    def signal(self, signum: int) -> bool:
        """Signals the process; False when it has been reaped. SIGKILL, SIGSTOP and SIGCONT reach all that it started.

        Another signal is for the process alone, unless it may be a wrapper: it would end the processes of the data
        loader, which a trainer needs until its last save.
        """
        with self._lock:
            if self.returncode is not None:
                return False
            if self._is_wrapper or signum in _FOR_ALL:
                os.killpg(self.pid, signum)
            else:
                signal.pidfd_send_signal(self.pidfd, signum)
            return True

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, a debugger): it lives, and sends no heartbeats."""
        with self._lock:
            if self.returncode is not None:
                return False
            try:
                stat = Path(f"/proc/{self.pid}/stat").read_text()
            except OSError:
                return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def reap(self) -> int:
        """Waits for the end, ends what it left behind, delivers its last lines; returns its return code."""
        if self.returncode is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.signal(signal.SIGKILL)  # its group: a grandchild would keep the pipe open
            with self._lock:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._reap_group()
            if self._reader.ident is not None:  # it never started when a later process could not be
                self._reader.join(OUTPUT_DRAIN_S)
            else:
                os.close(self._output_fd)
            os.close(self.pidfd)
        return self.returncode

    def _reap_group(self) -> None:
        """Where this process is a subreaper, it inherits what the child had started."""
        deadline = Deadline(_GROUP_S)
        with suppress(ChildProcessError):
            while not deadline.passed:
                if os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG) is None:
                    threading.Event().wait(0.001)

    def _read(self) -> None:
        """Passes lines on until the pipe ends; continues to read after an error, so that the child never blocks."""
        stacks = BusyStacks()
        with open(self._output_fd, encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(LINE_LIMIT_CHARS):
                self._pass_on(stacks.taken(line.rstrip("\n")))
        self._pass_on(stacks.rest())

    def _pass_on(self, lines: Sequence[str]) -> None:
        for line in lines:
            try:
                self._on_output(self.process, line)
            except Exception as error:  # noqa: BLE001  (top of a thread: `run` raises it)
                self._on_error(error)


def ended_among(children: Sequence[Child], wake: int, timeout_s: float | None) -> list[Child]:
    """Those of `children` that have ended, as soon as one has; none when the eventfd `wake` is set, which is then
    cleared, or the time is over."""
    ready = connection.wait([wake, *(child.pidfd for child in children)], timeout_s)
    if wake in ready:
        os.eventfd_read(wake)
    return [child for child in children if child.pidfd in ready]


def child_env(extra: Mapping[str, str], devices_per_process: int | None) -> dict[str, str]:
    """The environment of a child: this one's, `extra`, and so many virtual CPU devices where a number is given."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
    env.pop("CKPTKIT_SECRET", None)  # it is the agents'
    if devices_per_process is not None:
        name = "--xla_force_host_platform_device_count"
        others = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(name)]
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*others, f"{name}={devices_per_process}"])}
    return env
