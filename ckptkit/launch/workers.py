"""The arguments of an agent: the workers of its host, and its caller's hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ckptkit.launch.logs import OncePrinter, say_on_stderr
from ckptkit.launch.policy import WarmStart


def _ignore(*_: Any) -> None:
    """A hook that nobody has set."""


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
