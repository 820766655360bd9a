"""One process of a job: it dies with the launcher, and its output is read to the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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


class Child:
    """One process in a session of its own, its pidfd, and the thread that reads its output."""

    returncode: int | None = None  # once reaped

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

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, a debugger): it lives, and sends no heartbeats."""
        with self._lock:
            if self._popen.returncode is not None:
                return False
            try:
                stat = Path(f"/proc/{self._popen.pid}/stat").read_text()
            except OSError:
                return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

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
        self.returncode = self._popen.wait()
        return self.returncode

    def _read(self) -> None:
        """Passes lines on until the pipe ends; goes on reading after an error, so that the child never blocks."""
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            while line := lines.readline(LINE_LIMIT_CHARS):
                try:
                    self._on_output(self.process, line.rstrip("\n"))
                except Exception as error:  # noqa: BLE001  (top of a thread: `run` raises it)
                    self._on_error(error)


def child_env(extra: Mapping[str, str], devices_per_process: int | None) -> dict[str, str]:
    """The environment of a child: this one's, `extra`, and so many virtual CPU devices where a number is given."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
    if devices_per_process is not None:
        name = "--xla_force_host_platform_device_count"
        others = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(name)]
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*others, f"{name}={devices_per_process}"])}
    return env
