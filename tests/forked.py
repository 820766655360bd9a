"""Python processes that begin with JAX, Orbax and ckptkit imported: forked from one template of the test process.

A cold process imports for two to three seconds of processor time before its first line. Their work is
otherwise that of `python -m MODULE`, `python -c CODE` or `python SCRIPT`, with an environment and a directory of their
own. They are not for tests of imports, of the start of an interpreter, or of variables that JAX reads at its import.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ckptkit.launch import ExitCode, Launcher, WarmStart, standby
from ckptkit.launch.child import Running
from ckptkit.launch.command import python_command
from ckptkit.launch.standby import Standby, StandbyError

MODULES = (
    *("jax", "jax.numpy", "jax.experimental.serialize_executable", "orbax.checkpoint", "orbax.checkpoint.v1"),
    *("flax.nnx", "optax", "grain.python", "google.cloud.storage", "gcsfs"),
    *("ckptkit", "ckptkit.cli", "ckptkit.manager", "ckptkit.goodput", "ckptkit.testing"),
)
WARM = WarmStart(preload=MODULES)
_ROOT = Path(__file__).parents[1]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))}
_COMMAND = python_command([sys.executable, "-m", "tests.forked_main"])


class Forked:
    """A forked process, with as much of `subprocess.Popen` as tests need; its outputs are read when it has ended."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        is_joined: bool = False,  # stderr goes where stdout goes
    ):
        self._outputs = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]  # noqa: SIM115  read later
        paths = [f"/proc/{os.getpid()}/fd/{self._outputs[at].fileno()}" for at in (0, 0 if is_joined else 1)]
        order = {"agent": os.getpid(), "process": 0, "files": []}
        (running,) = _template().fork([_order(order, words[1:], env or os.environ, cwd, paths)], [[]])
        os.close(running.output_fd)  # nothing is printed before it has the files
        self.args, self.pid, self.returncode = words, running.pid, None
        self._pidfd = os.pidfd_open(running.pid)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its stdout and stderr, once it has ended."""
        self.wait(timeout)
        for each in self._outputs:
            each.seek(0)
        return self._outputs[0].read(), self._outputs[1].read()

    def wait(self, timeout: float | None = None) -> int:
        """Its return code, once it has ended."""
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode

    def kill(self) -> None:
        """Ends it, if it has not ended, and waits for that."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self.wait()


def run_forked(
    words: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with captured text, in a forked process."""
    process = Forked(words, env=env, cwd=cwd)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    code = process.wait()
    if check and code:
        raise subprocess.CalledProcessError(code, words, out, err)
    return subprocess.CompletedProcess(words, code, out, err)


def launch_forked(launcher: Launcher) -> ExitCode:
    """`launcher.run()`; workers that have `warm=WARM` are forked from the template of the test process too."""
    with one_template():
        return launcher.run()


@contextmanager
def one_template() -> Iterator[None]:
    """Every launcher of the block takes the template of the test process for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby, "Standby", _Borrowed)
        yield


class _Borrowed:
    """The template of the test process, in place of a launcher's own."""

    was_ready = True

    def __init__(
        self,
        command: object,
        modules: object,
        env: Mapping[str, str],
        *,
        arguments: object = (),
        prefix: Sequence[str] = (),
    ):
        assert not prefix, "workers with words before their command need their own template"
        self._env = env

    @property
    def is_importing(self) -> bool:
        return _template().is_importing

    def is_ready(self) -> bool:
        return True

    def wait_until_ready(self, is_over: Callable[[], bool]) -> bool:
        return _template().wait_until_ready(is_over)

    def fork(self, orders: Sequence[Mapping[str, Any]], files: Sequence[Sequence[int]]) -> list[Running]:
        return _template().fork(
            [
                _order(order, [*order["command"]["named"], *order["arguments"]], {**self._env, **order["environment"]})
                for order in orders
            ],
            files,
        )

    def close(self) -> None:
        """The next launcher forks from it too."""


def _order(
    order: Mapping[str, Any],
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | str | None = None,
    outputs: Sequence[str] = ("", ""),
) -> dict[str, Any]:
    assert _COMMAND is not None
    arguments = [os.fspath(cwd or os.getcwd()), *outputs, *words]
    environment = {**dict.fromkeys(_ENVIRONMENT), **env}
    return {**order, "command": _COMMAND.to_json(), "arguments": arguments, "environment": environment}


@cache
def _template() -> Standby:
    """It ends with this process. Without a module whose import makes a fork unsafe: then processes import that."""
    assert _COMMAND is not None
    modules = list(MODULES)
    while True:
        template = Standby(_COMMAND, modules, _ENVIRONMENT)
        try:
            template.wait_until_ready()
        except StandbyError as error:
            template.close()
            if error.culprit not in modules:
                raise
            modules.remove(error.culprit)
            continue
        return template
