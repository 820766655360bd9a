"""The agent's side of a template: starts it, knows whether it is ready, and has it fork workers."""

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
from multiprocessing import connection
from typing import Any, final

from ckptkit.launch import worker
from ckptkit.launch.child import Running, spawn
from ckptkit.launch.command import PythonCommand
from ckptkit.util.clock import Deadline

IMPORT_LIMIT_S = 300.0
_FORK_LIMIT_S = 20.0
_HEADER = struct.Struct("<I")
_PR_SET_CHILD_SUBREAPER = 36
_LAST_WORDS_BYTES = 4096
_LOOK_S = 0.1
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
