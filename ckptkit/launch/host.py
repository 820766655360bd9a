"""The workers of one host: forked from a template where that is possible, started cold elsewhere."""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, final

from ckptkit.launch import worker
from ckptkit.launch.child import Child, Running, child_env, spawn, spawn_command
from ckptkit.launch.command import PythonCommand, python_command
from ckptkit.launch.policy import Hooks, Workers, WorkerSpec
from ckptkit.launch.standby import Standby, StandbyError, Templates
from ckptkit.util import heartbeat
from ckptkit.util.clock import monotonic_s

_SETTLED_S = 15.0  # a job that marks no steps is taken to be started after that


@final
class LocalHost:
    """Starts the workers of this host, attempt after attempt. Called from one thread.

    `is_over`: whether the job is to end. Then no start waits for a template.
    """

    def __init__(
        self, workers: Workers, hooks: Hooks, on_error: Callable[[Exception], None], is_over: Callable[[], bool]
    ):
        self._env = child_env(workers.env, workers.devices_per_process)
        self._is_over = is_over
        self._knows_python = workers.warm is not None
        self._on_output, self._on_error, self._say = hooks.on_output, on_error, hooks.say
        self.templates = Templates(workers, self._env, hooks.say)
        self._started_s = monotonic_s()
        self.children: list[Child] = []

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts the workers of an attempt, in `children`: fewer where the job is to end meanwhile. All of the last
        attempt's have been reaped."""
        self.children = []
        command = python_command(specs[0].argv) if self._knows_python and specs else None
        self.templates.command = command
        if command is None:
            for spec in specs:
                self._add(spec, spawn_command([*spec.prefix, *spec.argv], {**self._env, **spec.environment}), None)
        elif self.templates.is_cold:
            self._start_cold(command, specs)
        else:
            self._start_warm(command, specs)

    def tick(self) -> None:
        """Called again and again while workers run: starts a template where there is none, once the job is started."""
        if not self.templates.is_cold and self.templates.command is not None:
            is_settled = any(self.beats().values()) or monotonic_s() - self._started_s > _SETTLED_S
            self.templates.tick(is_settled=is_settled)

    def beats(self) -> dict[int, heartbeat.Beats | None]:
        """The newest beat of each worker that can have any."""
        return {child.process: heartbeat.read(child.beats) for child in self.children if child.beats is not None}

    def dump(self) -> None:
        """Has every Python worker write the stacks of its threads to its log."""
        for child in self.children:
            if child.beats is not None:
                child.signal(worker.DUMP_SIGNAL)

    def signal(self, signum: int) -> None:
        """Signals all workers that have not ended."""
        for child in self.children:
            child.signal(signum)

    def kill(self) -> None:
        """Ends all workers at once, and reaps them."""
        self.signal(signal.SIGKILL)
        for child in self.children:
            child.reap()

    def _start_warm(self, command: PythonCommand, specs: Sequence[WorkerSpec]) -> None:
        by_prefix: dict[tuple[str, ...], list[WorkerSpec]] = {}
        for spec in specs:
            by_prefix.setdefault(spec.prefix, []).append(spec)
        self.templates.begin({prefix: len(theirs) for prefix, theirs in by_prefix.items()})
        for prefix, theirs in by_prefix.items():
            standby = self.templates.ready(prefix, self._is_over)
            if standby is None:
                self._start_cold(command, theirs)
            elif not standby.is_importing:
                try:
                    self._fork(standby, command, theirs)
                except StandbyError as error:
                    self._say(f"started cold: {error}")
                    self.templates.drop(prefix)
                    self._start_cold(command, theirs)
        self._started_s = monotonic_s()

    def _fork(self, standby: Standby, command: PythonCommand, specs: Sequence[WorkerSpec]) -> None:
        beats = [_new_beats() for _ in specs]
        orders = [
            {**_order(command, spec), "environment": dict(spec.environment), "files": ["beats"]} for spec in specs
        ]
        try:
            started = standby.fork(orders, [[fd] for fd, _ in beats])
            for spec, running, (_, shared) in zip(specs, started, beats, strict=True):
                self._add(spec, running, shared)
        finally:
            for fd, _ in beats:
                os.close(fd)

    def _start_cold(self, command: PythonCommand, specs: Sequence[WorkerSpec]) -> None:
        for spec in specs:
            beats_fd, shared = _new_beats()
            order_fd = os.memfd_create("ckptkit-order", os.MFD_CLOEXEC)
            try:
                os.write(order_fd, json.dumps({**_order(command, spec), "beats": beats_fd}).encode())
                os.lseek(order_fd, 0, os.SEEK_SET)
                words = [command.interpreter, *command.options, worker.__file__, "direct", str(order_fd)]
                running = spawn([*spec.prefix, *words], {**self._env, **spec.environment}, fds=[order_fd, beats_fd])
            finally:
                os.close(order_fd)
                os.close(beats_fd)
            self._add(spec, running, shared)

    def _add(self, spec: WorkerSpec, running: Running, beats: mmap.mmap | None) -> None:
        self.children.append(Child(spec.process, running, self._on_output, self._on_error, beats))


def _order(command: PythonCommand, spec: WorkerSpec) -> dict[str, Any]:
    own = python_command(spec.argv)  # placeholders may be in any word
    return {
        "agent": os.getpid(),
        "process": spec.process,
        "command": (own or command).to_json(),
        "arguments": list(spec.argv[command.arguments_at :]),
    }


def _new_beats() -> tuple[int, mmap.mmap]:
    """The file in which a worker marks its steps, open and mapped here."""
    fd = os.memfd_create("ckptkit-beats", os.MFD_CLOEXEC)
    os.ftruncate(fd, heartbeat.BYTES)
    return fd, mmap.mmap(fd, heartbeat.BYTES)
