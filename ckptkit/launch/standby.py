"""The agent's side of templates: starts them, knows whether they are ready, and has them fork workers."""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, final

from ckptkit.launch import worker
from ckptkit.launch.child import Running, spawn
from ckptkit.launch.command import PythonCommand
from ckptkit.launch.policy import Workers, has_placeholders
from ckptkit.util.clock import Deadline

IMPORT_LIMIT_S = 300.0
_FORK_LIMIT_S = 20.0
_HEADER = struct.Struct("<I")
_PR_SET_CHILD_SUBREAPER = 36
_LAST_WORDS_BYTES = 4096
_LOOK_S = 0.1
_LOSSES_MAX = 5
# A device that a template opens is in every worker, in a state that no driver knows. Workers get the values back.
_HIDES_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


class StandbyError(Exception):
    """A template cannot be used; the message gives the reason. `culprit`: the module that made it unusable."""

    def __init__(self, message: str, *, culprit: str | None = None):
        super().__init__(message)
        self.culprit = culprit


class ColdProgramError(StandbyError):
    """A template would hold nothing: the message names the first statement that may change a later import."""


@final
class Standby:
    """A template process. It ends with `close`, and with the thread that made it.

    This process becomes a subreaper: it inherits workers that the template forks, and processes that they leave.
    """

    def __init__(
        self,
        command: PythonCommand,
        modules: Sequence[str],
        env: Mapping[str, str],
        *,
        arguments: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._awaited, self.was_ready = 1, False  # answers of the template; whether it has once imported everything
        self._seen = {name: env.get(name) for name in _HIDES_DEVICES}
        self._socket, theirs = socket.socketpair()
        self._output_fd = os.memfd_create("ckptkit-template", os.MFD_CLOEXEC)  # a pipe without a reader would fill up
        try:
            argv = [*prefix, command.interpreter, *command.options, worker.__file__, "template", str(theirs.fileno())]
            self._running: Running | None = spawn(
                argv, {**env, **_HIDES_DEVICES}, fds=[theirs.fileno()], output=self._output_fd
            )
        except BaseException:
            os.close(self._output_fd)
            raise
        finally:
            theirs.close()
        words = {"command": command.to_json(), "arguments": list(arguments)}
        self._send({"agent": os.getpid(), **words, "modules": list(modules)})

    @property
    def is_importing(self) -> bool:
        """Whether it had not imported everything when it was last asked."""
        return self._awaited > 0

    def is_ready(self) -> bool:
        """Whether it has imported everything. Raises `StandbyError` where it never will, or has ended."""
        while connection.wait([self._socket], 0):
            self._note_ready(self._receive(Deadline(_FORK_LIMIT_S)))
        return not self._awaited

    def wait_until_ready(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Whether it has imported everything: waits for that until `is_over`. Raises `StandbyError` where it never
        will."""
        deadline = Deadline(IMPORT_LIMIT_S)
        while self._awaited and not is_over():
            if connection.wait([self._socket], min(_LOOK_S, deadline.left_s)) or deadline.passed:
                self._note_ready(self._receive(deadline))
        return not self._awaited

    def fork(self, orders: Sequence[Mapping[str, Any]], files: Sequence[Sequence[int]]) -> list[Running]:
        """Starts one worker for each order, with its open `files`; raises `StandbyError` where none was started.

        Cost: 5 to 17 ms for each and one more (274 MB of modules).
        """
        self.wait_until_ready()
        pipes = [os.pipe() for _ in orders]
        try:
            fds = [fd for (_, write_fd), own in zip(pipes, files, strict=True) for fd in (write_fd, *own)]
            full = [{**order, "environment": {**self._seen, **order["environment"]}} for order in orders]
            self._send({"orders": full, "fds": 1 + len(files[0])}, fds)
            answer = self._receive(Deadline(_FORK_LIMIT_S))
            if "pids" not in answer:
                raise StandbyError(str(answer.get("unsafe")))
        except BaseException:
            for read_fd, _ in pipes:
                os.close(read_fd)
            raise
        finally:
            for _, write_fd in pipes:
                os.close(write_fd)
        return [Running(pid=pid, output_fd=read_fd) for pid, (read_fd, _) in zip(answer["pids"], pipes, strict=True)]

    def close(self) -> None:
        """Ends the template; its workers continue."""
        self._socket.close()
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            os.waitpid(self._running.pid, 0)
            os.close(self._output_fd)
            self._running = None

    def _note_ready(self, message: Mapping[str, Any]) -> None:
        if "cold" in message:
            raise ColdProgramError(message["cold"])
        if message.get("unsafe") is not None:
            raise StandbyError(str(message["unsafe"]), culprit=message.get("culprit"))
        self._awaited, self.was_ready = self._awaited - 1, True

    def _send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        body = json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([_HEADER.pack(len(body))], rights)
            self._socket.sendall(body)
        except OSError as error:
            raise StandbyError(self._how_it_ended()) from error

    def _receive(self, deadline: Deadline) -> dict[str, Any]:
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        return json.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: Deadline) -> bytes:
        body = b""
        while len(body) < size:
            self._socket.settimeout(max(0.001, deadline.left_s))
            try:
                chunk = self._socket.recv(size - len(body))
            except TimeoutError as error:
                raise StandbyError("the template does not answer") from error
            except OSError as error:
                raise StandbyError(self._how_it_ended()) from error
            if not chunk:
                raise StandbyError(self._how_it_ended())
            body += chunk
        return body

    def _how_it_ended(self) -> str:
        """The last line that the template printed, where it printed something."""
        size = os.fstat(self._output_fd).st_size
        said = os.pread(self._output_fd, _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        lines = said.decode(errors="replace").split("\n")
        return "the template ended" + next((f": {line}" for line in reversed(lines) if line.strip()), "")


@dataclass(slots=True)
class _Place:
    """The template of the workers with one prefix, what it must not import, and how often one was lost."""

    standby: Standby | None = None
    waits: bool = True  # workers wait for it while it imports
    skipped: set[str] = field(default_factory=set)
    losses: int = 0


@final
class Templates:
    """The templates of a host, one for each prefix of its workers. `is_cold`: no more are made.

    The next template does without the module that made one unusable. Five are tried at most for a prefix. A template
    that cannot start for an unknown reason is the last one of the host. `command` is the program of the newest start
    (None: not one in Python).
    """

    command: PythonCommand | None = None

    def __init__(self, workers: Workers, env: Mapping[str, str], say: Callable[[str], None]):
        self.is_cold = workers.warm is None or workers.warm.is_cold
        self._modules = () if workers.warm is None else workers.warm.preload
        self._words, self._env, self._say = workers.command, env, say
        self._places: dict[tuple[str, ...], _Place] = {}

    @property
    def is_warm(self) -> bool:
        """Whether one has been ready: other hosts can have one too."""
        return any(place.standby is not None and place.standby.was_ready for place in self._places.values())

    def begin(self, workers: Mapping[tuple[str, ...], int]) -> None:
        """Before a start of so many workers with each prefix: makes the templates that they wait for, side by side.

        A template imports once for all of them, each worker would for itself. The first start waits for a single
        worker too: a template imports as fast as it would, and makes all later starts warm.
        """
        is_first = not self._places
        for prefix, count in workers.items():
            place = self._places.setdefault(prefix, _Place())
            place.waits = is_first or count > 1 or bool(self._modules)
            if place.standby is not None or place.waits:
                self._ensure(prefix)

    def ready(self, prefix: tuple[str, ...], is_over: Callable[[], bool]) -> Standby | None:
        """The template from which workers are forked now; None where they start cold. When `is_over`, one that still
        imports is returned."""
        place = self._places[prefix]
        while place.standby is not None and (place.standby.was_ready or place.waits):
            try:
                place.standby.wait_until_ready(is_over)
            except StandbyError as error:
                self._give_up(place, error)
                self._ensure(prefix)
            else:
                return place.standby
        return None

    def drop(self, prefix: tuple[str, ...]) -> None:
        """Ends a template; the next `tick` makes another."""
        _close(self._places[prefix])

    def tick(self, *, is_settled: bool) -> None:
        """Makes a template where there is none, once the job has settled: before, it would slow down the start."""
        for prefix, place in self._places.items():
            if place.standby is not None or place.losses or is_settled:
                self._ensure(prefix)

    def preload(self, command: PythonCommand) -> None:
        """Makes a template before any worker has run here: a spare waits warm."""
        if not self.is_cold:
            self.command = command
            self._places.setdefault((), _Place())
            self._ensure(())

    def close(self) -> None:
        """Ends all of them."""
        for place in self._places.values():
            _close(place)
        self._places.clear()

    def _ensure(self, prefix: tuple[str, ...]) -> None:
        place = self._places[prefix]
        if place.standby is not None:
            try:
                place.standby.is_ready()
            except StandbyError as error:
                self._give_up(place, error)
        if place.standby is None and not self.is_cold and self.command is not None:
            modules = [name for name in self._modules if name not in place.skipped]
            own = self._words[self.command.arguments_at :]
            arguments = () if has_placeholders(own) else own  # for modules that look at them
            try:
                place.standby = Standby(self.command, modules, self._env, arguments=arguments, prefix=prefix)
            except (StandbyError, OSError) as error:
                self._say(f"no template: {error}")
                self.is_cold = True

    def _give_up(self, place: _Place, error: StandbyError) -> None:
        has_hope = (place.standby is not None and place.standby.was_ready) or bool(error.culprit and self._modules)
        _close(place)
        what = "all starts are cold" if isinstance(error, ColdProgramError) else "the template cannot be used"
        if not self.is_cold:  # once for all prefixes
            self._say(f"{what}: {error}")
        place.losses += 1
        if error.culprit is not None:
            place.skipped.add(error.culprit)
        if not has_hope or place.losses >= _LOSSES_MAX:
            self.is_cold = True


def _close(place: _Place) -> None:
    if place.standby is not None:
        place.standby.close()
        place.standby = None
