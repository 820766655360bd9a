"""The arguments of a launch and of each worker, when a lost job is started again, and how it ended: pure values."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from ckptkit.events import Kind, read_events
from ckptkit.launch.logs import OncePrinter, say_on_stderr

BACKOFF_LIMIT_S = 60.0
_DOUBLINGS_MAX = 64
HANG_LIMIT_S = 1800.0  # no shorter limit is learnt: an evaluation, or the last upload, makes no steps either
HANG_PAUSES = 10.0  # times the longest pause so far
_PLACEHOLDERS = ("process", "processes", "coordinator", "attempt")


class ExitCode(IntEnum):
    """How a launched job ended; also the exit codes of `ckptkit run`."""

    OK = 0
    BUDGET_SPENT = 1
    USAGE = 2
    PREEMPTED = 75  # sysexits.h has it for "try again later"; a process ends so after its last save, or the try
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """At most `restarts`, the n-th after `backoff_s` * 2**n, at most 60 s.

    After SIGTERM the survivors of a loss have `grace_s`, all processes of a job that is preempted `preempt_grace_s`
    to save their last step (Kubernetes gives a pod 30 s); then comes SIGKILL.
    """

    restarts: int = 3
    backoff_s: float = 1.0
    grace_s: float = 5.0
    preempt_grace_s: float = 30.0

    def __post_init__(self):
        for name in ("restarts", "backoff_s", "grace_s", "preempt_grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")

    def backoff_after(self, restarts: int) -> float:
        """How long to wait before the next restart, in seconds."""
        doublings = min(restarts, _DOUBLINGS_MAX)  # 2.0**1024 overflows
        return min(self.backoff_s * 2.0**doublings, BACKOFF_LIMIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The first process of an attempt that did not end well. `why`: what is known in addition to its return code."""

    process: int
    returncode: int
    why: str | None = None

    @property
    def cause(self) -> str:
        """`why`, or else the signal's name, or else the exit code."""
        if self.why is not None:
            return self.why
        if self.returncode < 0:
            try:
                return signal.Signals(-self.returncode).name
            except ValueError:  # a real-time signal
                return f"signal {-self.returncode}"
        return f"exit code {self.returncode}"

    @staticmethod
    def is_one(returncode: int) -> bool:
        """Whether a process with this exit code was lost: it neither finished nor saved its state in a preemption."""
        return returncode not in (ExitCode.OK, ExitCode.PREEMPTED)

    @property
    def is_abort(self) -> bool:
        """Whether it aborted, as a JAX process does that has missed another one's heartbeats."""
        return self.returncode == -signal.SIGABRT

    @property
    def is_usage(self) -> bool:
        """Whether it refused its input, which a restart does not mend."""
        return self.returncode == ExitCode.USAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Workers that run Python are forked from a template.

    The template has imported the libraries that the program imports before it does anything else (decision 16), so a
    worker is what a cold start gives. A program that begins otherwise starts cold. `preload` names other modules
    instead: they are imported before the first statement of the program, and the caller answers for it that they are
    the same there. `is_cold`: every start is cold.
    """

    preload: tuple[str, ...] = ()
    is_cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HangPolicy:
    """When a job that makes no step is lost: after `limit_s`, also before the first step of an attempt.

    If it is None, only a loop that marks its steps has a limit: it calls `should_save`, `save` or a `step` span
    far more often than it saves. A loop that calls the manager only where it saves is never ended, because its next
    call may be hours away. The learnt limit is ten times the longest pause of this job between two steps, and 1,800 s
    at least. Before the first step of an attempt it is ten times the longest time to a first step. When a learnt limit
    has passed once, the stacks go to the log; when it has passed twice, the job is lost.
    """

    limit_s: float | None = None

    def __post_init__(self):
        if self.limit_s is not None and self.limit_s <= 0:
            raise ValueError(f"the hang limit is {self.limit_s} s, expected more than 0")

    def limit_after(self, longest_s: float | None) -> float:
        """The limit for a pause, where the longest one of its kind was `longest_s` (None: there was none)."""
        if self.limit_s is not None:
            return self.limit_s
        return math.inf if longest_s is None else max(HANG_LIMIT_S, HANG_PAUSES * longest_s)


def next_attempt(log: Path | None) -> int:
    """One more than the last attempt that an earlier launch of the job noted in `log`."""
    if log is None or not log.exists():
        return 0
    begun = (event for event in read_events(log) if event.kind in (Kind.STARTED, Kind.RELAUNCHED))
    return max((event.fields["attempt"] + 1 for event in begun), default=0)


def _ignore(*_: Any) -> None:
    """A hook that is not set."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of one host: `processes` times `command`.

    Of the command's words, {process}, {processes}, {coordinator} and {attempt} are replaced. The environment has the
    same as CKPTKIT_PROCESS, CKPTKIT_PROCESSES, CKPTKIT_COORDINATOR and CKPTKIT_ATTEMPT, and `env`. `prefixes[i]` are
    words before the command of worker i. With `warm`, a command that runs Python is forked from a template where that
    is possible. Raises ValueError where no worker could start.
    """

    command: Sequence[str]
    _: KW_ONLY
    processes: int
    devices_per_process: int | None = None  # virtual CPU devices; None: what JAX finds
    env: Mapping[str, str] = field(default_factory=dict)
    prefixes: Sequence[Sequence[str]] | None = None
    warm: WarmStart | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no command to launch: give it after --")
        if self.processes < 1:
            raise ValueError(f"processes is {self.processes}, expected 1 or more")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise ValueError(f"devices per process is {self.devices_per_process}, expected 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The functions that an agent calls while it runs. An error in one stops the job, and is raised by `run`.

    `on_output(process, line)` is called from one thread per worker, in order of its lines. `on_attempt(attempt)` is
    called before its workers start, `on_lost(attempt, process)` after all workers of the attempt are dead and before
    the next starts, `on_status` with the content of `--status` at each change. The function `say` gets
    each line of the agent's own.
    """

    on_output: Callable[[int, str], None] = field(default_factory=OncePrinter)
    on_attempt: Callable[[int], None] = _ignore
    on_lost: Callable[[int, int], None] = _ignore
    on_status: Callable[[dict[str, Any]], None] = _ignore
    say: Callable[[str], None] = say_on_stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to start: the words of its command, and the variables added to the host's environment."""

    process: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """The part of a host in an attempt: `here` workers of `processes`, from number `first` on."""

    first: int
    here: int
    processes: int
    coordinator: str
    attempt: int


def specs_of(
    command: Sequence[str], place: JobPlace, prefixes: Sequence[Sequence[str]] | None = None
) -> list[WorkerSpec]:
    """One for each worker of the host. `prefixes[i]` are words before the command of its i-th worker."""
    found = []
    for local in range(place.here):
        values = {
            "process": str(place.first + local),
            "processes": str(place.processes),
            "coordinator": place.coordinator,
            "attempt": str(place.attempt),
        }
        environment = {f"CKPTKIT_{name.upper()}": value for name, value in values.items()}
        environment |= {"CKPTKIT_LOCAL_PROCESS": str(local), "CKPTKIT_LOCAL_PROCESSES": str(place.here)}
        environment["CKPTKIT_AGENT"] = str(os.getpid())
        found.append(
            WorkerSpec(
                process=place.first + local,
                argv=filled_in(command, values),
                prefix=tuple(prefixes[local]) if prefixes is not None else (),
                environment=environment,
            )
        )
    return found


def has_placeholders(words: Sequence[str]) -> bool:
    """Whether the words differ from worker to worker, or from attempt to attempt."""
    return any(f"{{{name}}}" in word for word in words for name in _PLACEHOLDERS)


def filled_in(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """The words with their placeholders replaced; not `str.format`, since a command may hold other braces."""
    filled = list(words)
    for name, value in values.items():
        filled = [word.replace(f"{{{name}}}", value) for word in filled]
    return tuple(filled)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` ('': of any address) that was free a moment ago.

    Should another program take it, the attempt fails and the next one has a new port.
    """
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
