"""When a launched job is started again, and how it ended: pure values."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import IntEnum

BACKOFF_LIMIT_S = 60.0


class ExitCode(IntEnum):
    """How a launched job ended; also the exit codes of `python -m tools.launch`."""

    OK = 0
    BUDGET_SPENT = 1
    USAGE = 2
    PREEMPTED = 75  # state saved; sysexits.h has it for "try again later". A process that saved its last step ends so
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
        return min(self.backoff_s * 2**restarts, BACKOFF_LIMIT_S)


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

    @staticmethod
    def is_one(returncode: int) -> bool:
        """Whether a process that ended so was lost: neither done nor, told to stop, gone with its state saved."""
        return returncode not in (ExitCode.OK, ExitCode.PREEMPTED)

    @property
    def is_abort(self) -> bool:
        """Whether it aborted, as a JAX process does that has missed another one's heartbeats."""
        return self.returncode == -signal.SIGABRT

    @property
    def is_usage(self) -> bool:
        """Whether it refused its input, which a restart does not mend."""
        return self.returncode == ExitCode.USAGE
