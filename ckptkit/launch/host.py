"""The workers of one host: started warm where that is possible, cold elsewhere; their beats and their logs."""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from ckptkit.launch import worker
from ckptkit.launch.child import Child, Running, child_env, spawn, spawn_command
from ckptkit.launch.command import PythonCommand, python_command
from ckptkit.launch.policy import Hooks, Workers
from ckptkit.launch.specs import WorkerSpec, has_placeholders
from ckptkit.launch.standby import ColdProgramError, Standby, StandbyError
from ckptkit.util import heartbeat
from ckptkit.util.clock import monotonic_s

_SETTLED_S = 15.0  # a job that marks no steps is taken to be started after that
_LOSSES_MAX = 5


@dataclass(slots=True)
class _Place:
    """Where workers of one prefix start: their template, what it must not import, and how often one was lost."""

    prefix: tuple[str, ...]
    standby: Standby | None = None
    skipped: set[str] = field(default_factory=set)
    losses: int = 0


@final
class LocalHost:
    """Starts the workers of this host, attempt after attempt. Called from one thread.

    `is_over`: whether the job is to end. Then no start waits for a template.
    """

    def __init__(
        self, workers: Workers, hooks: Hooks, on_error: Callable[[Exception], None], is_over: Callable[[], bool]
    ):
        self._words, self._is_over = workers.command, is_over
        self._env = child_env(workers.env, workers.devices_per_process)
        self._warm = warm = workers.warm
        self._on_output = hooks.on_output
        self._on_error = on_error
        self._say = hooks.say
        self._places: dict[tuple[str, ...], _Place] = {}
        self._command: PythonCommand | None = None
        self._modules = () if warm is None else warm.preload
        self._started_s = monotonic_s()
        self.children: list[Child] = []
        self._beats: dict[int, mmap.mmap] = {}

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts the workers of an attempt, in `children`: fewer where the job is to end meanwhile. All of the last
        attempt's have been reaped."""
        self.children = []
        self._forget_beats()
        command = python_command(specs[0].argv) if self._warm is not None and specs else None
        self._command = command
        if command is None:
            for spec in specs:
                self._add(spec, spawn_command([*spec.prefix, *spec.argv], {**self._env, **spec.environment}))
            return
        if self._is_cold:
            self._start_cold(command, specs)
            return
        is_first = not self._places  # a template imports as fast as a worker would, and makes all later starts warm
        by_prefix: dict[tuple[str, ...], list[WorkerSpec]] = {}
        for spec in specs:
            by_prefix.setdefault(spec.prefix, []).append(spec)
        for prefix, theirs in by_prefix.items():  # all templates import at once
            place = self._places.setdefault(prefix, _Place(prefix=prefix))
            if place.standby is not None or is_first or self._is_worth_waiting(theirs):
                self._ensure_template(prefix)
        for prefix, theirs in by_prefix.items():
            self._start_at(self._places[prefix], command, theirs, is_first)
        self._started_s = monotonic_s()

    def tick(self) -> None:
        """Called again and again while workers run: starts a template where there is none, once the job is started."""
        if self._is_cold or self._command is None:
            return
        is_settled = any(self.beats().values()) or monotonic_s() - self._started_s > _SETTLED_S
        for place in self._places.values():
            if place.standby is not None or place.losses or is_settled:  # before, it would slow down the start
                self._ensure_template(place.prefix)

    def _is_worth_waiting(self, specs: Sequence[WorkerSpec]) -> bool:
        """Whether workers wait for a template that imports: it does so once for all of them, each would for itself."""
        return len(specs) > 1 or (self._warm is not None and bool(self._warm.preload))

    def preload(self, command: PythonCommand) -> None:
        """Makes a template before any worker has run here: a spare waits warm."""
        if self._warm is None or self._warm.is_cold:
            return
        self._command = command
        self._ensure_template(())

    @property
    def is_warm(self) -> bool:
        """Whether this job has a template here: other hosts can have one too."""
        return any(place.standby is not None and place.standby.was_ready for place in self._places.values())

    def beats(self) -> dict[int, heartbeat.Beats | None]:
        """The newest beat of each worker that can have any."""
        return {process: heartbeat.read(shared) for process, shared in self._beats.items()}

    def dump(self) -> None:
        """Has every Python worker write the stacks of its threads to its log."""
        for child in self.children:
            if child.process in self._beats:
                child.signal(worker.DUMP_SIGNAL)

    def signal(self, signum: int) -> list[Child]:
        """Signals all workers; returns those that had not ended."""
        return [child for child in self.children if child.signal(signum)]

    def kill(self) -> None:
        """Ends all workers at once, and reaps them."""
        self.signal(signal.SIGKILL)
        for child in self.children:
            child.reap()

    def close(self) -> None:
        """Ends the templates. The workers have been reaped."""
        self._forget_beats()
        for place in self._places.values():
            self._drop(place)
        self._places.clear()

    def _add(self, spec: WorkerSpec, running: Running) -> None:
        self.children.append(Child(spec.process, running, self._on_output, self._on_error))

    def _ensure_template(self, prefix: tuple[str, ...]) -> None:
        place = self._places.setdefault(prefix, _Place(prefix=prefix))
        if place.standby is not None:
            try:
                place.standby.is_ready()
            except StandbyError as error:
                self._give_up(place, error)
        if place.standby is None and not self._is_cold and self._command is not None:
            modules = [name for name in self._modules if name not in place.skipped]
            try:
                arguments = self._common_arguments(self._command)
                place.standby = Standby(self._command, modules, self._env, arguments=arguments, prefix=prefix)
            except (StandbyError, OSError) as error:
                self._say(f"no template: {error}")
                self._stay_cold()

    def _give_up(self, place: _Place, error: StandbyError) -> None:
        """The next template does without the module that made this one unusable. Five templates are tried at most.

        A template that cannot start for an unknown reason is the last one.
        """
        has_hope = (place.standby is not None and place.standby.was_ready) or bool(error.culprit and self._modules)
        self._drop(place)
        what = "all starts are cold" if isinstance(error, ColdProgramError) else "the template cannot be used"
        if not self._is_cold:  # once for all prefixes
            self._say(f"{what}: {error}")
        place.losses += 1
        if error.culprit is not None:
            place.skipped.add(error.culprit)
        if not has_hope or place.losses >= _LOSSES_MAX:
            self._stay_cold()

    def _stay_cold(self) -> None:
        assert self._warm is not None
        self._warm = replace(self._warm, is_cold=True)

    @property
    def _is_cold(self) -> bool:
        return self._warm is None or self._warm.is_cold

    def _drop(self, place: _Place) -> None:
        if place.standby is not None:
            place.standby.close()
            place.standby = None

    def _start_at(self, place: _Place, command: PythonCommand, specs: Sequence[WorkerSpec], is_first: bool) -> None:
        waits = is_first or self._is_worth_waiting(specs)
        while place.standby is not None and (place.standby.was_ready or waits):
            try:
                if not place.standby.wait_until_ready(self._is_over):
                    return
            except StandbyError as error:
                self._give_up(place, error)
                self._ensure_template(place.prefix)
                continue
            try:
                self._fork(place.standby, command, specs)
            except StandbyError as error:
                self._say(f"started cold: {error}")
                self._drop(place)  # the next tick makes another
                break
            return
        self._start_cold(command, specs)

    def _fork(self, standby: Standby, command: PythonCommand, specs: Sequence[WorkerSpec]) -> None:
        beats = [self._new_beats(spec) for spec in specs]
        orders = [
            {**self._order(command, spec), "environment": dict(spec.environment), "files": ["beats"]} for spec in specs
        ]
        try:
            files = [[fd] for fd in beats]
            for spec, running in zip(specs, standby.fork(orders, files), strict=True):
                self._add(spec, running)
        finally:
            for fd in beats:
                os.close(fd)

    def _start_cold(self, command: PythonCommand, specs: Sequence[WorkerSpec]) -> None:
        for spec in specs:
            files = {"beats": self._new_beats(spec)}
            paper = os.memfd_create("ckptkit-order", os.MFD_CLOEXEC)
            try:
                os.write(paper, json.dumps({**self._order(command, spec), **files}).encode())
                os.lseek(paper, 0, os.SEEK_SET)
                argv = [*spec.prefix, command.interpreter, *command.options, worker.__file__, "direct", str(paper)]
                self._add(spec, spawn(argv, {**self._env, **spec.environment}, fds=[paper, *files.values()]))
            finally:
                os.close(paper)
                os.close(files["beats"])

    def _order(self, command: PythonCommand, spec: WorkerSpec) -> dict[str, Any]:
        own = python_command(spec.argv)  # placeholders may be in any word
        arguments = list(spec.argv[command.arguments_at :])
        return {
            "agent": os.getpid(),
            "process": spec.process,
            "command": (own or command).to_json(),
            "arguments": arguments,
        }

    def _common_arguments(self, command: PythonCommand) -> Sequence[str]:
        """The arguments of the command, for modules that look at them; none where each worker has its own."""
        arguments = self._words[command.arguments_at :]
        return () if has_placeholders(arguments) else arguments

    def _forget_beats(self) -> None:
        for shared in self._beats.values():
            shared.close()
        self._beats = {}

    def _new_beats(self, spec: WorkerSpec) -> int:
        fd = os.memfd_create("ckptkit-beats", os.MFD_CLOEXEC)
        os.ftruncate(fd, heartbeat.BYTES)
        self._beats[spec.process] = mmap.mmap(fd, heartbeat.BYTES)
        return fd
