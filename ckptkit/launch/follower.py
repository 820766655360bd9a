"""The agent of another host than the first: it starts and ends workers when the first agent orders it."""

from __future__ import annotations

import os
import queue
import signal
import socket
from contextlib import suppress
from typing import Any, final

from ckptkit.launch.child import Child, ended_among
from ckptkit.launch.command import python_command
from ckptkit.launch.control import Connection, ControlError, checked_secret, connect
from ckptkit.launch.host import LocalHost
from ckptkit.launch.policy import ExitCode, Hooks, JobPlace, Workers, specs_of
from ckptkit.launch.roster import SILENCE_S, beats_message
from ckptkit.launch.signals import Told, passed_by, signals_mean
from ckptkit.util.clock import Deadline, monotonic_s
from ckptkit.util.heartbeat import Beats

_TICK_S = 0.1
_AGAIN_S = 0.2
_BEATS_S = 1.0


@final
class Follower:
    """Runs `workers` on this host for the first agent, until the first agent ends the job. Never calls `on_lost`
    and `on_status`: the first agent does.

    Without the first agent no worker runs here. When the connection ends, all workers end at once; then the follower
    tries for `join_s` to connect again.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        rank: int,
        first: tuple[str, int],
        secret: str,
        join_s: float,
        silence_s: float = SILENCE_S,
        hooks: Hooks | None = None,
    ):
        self._workers, self._hooks = workers, hooks or Hooks()
        self._rank = rank
        self._first, self._secret = first, secret
        self._join_s, self._silence_s = join_s, silence_s
        self._say = self._hooks.say
        self._errors: list[Exception] = []
        checked_secret(secret)
        self._local = LocalHost(workers, self._hooks, self._errors.append, self._is_to_end)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._inbox: queue.SimpleQueue[dict[str, Any] | ControlError] = queue.SimpleQueue()
        self._attempt: int | None = None
        self._alive: list[Child] = []
        self._grace: Deadline | None = None  # of workers that have the order to end
        self._told, self._has_news = Told(), False
        self._is_ordered = False  # to end the workers; from the thread of the connection
        self._to_pass: list[int] = []
        self._sent_beats: dict[int, Beats | None] = {}
        self._next_beats_s = 0.0

    def run(self) -> int:
        """Blocks until the job is over; returns the exit code of the job."""
        acts = {signal.SIGINT: self._note_stop, signal.SIGHUP: self._note_stop, signal.SIGTERM: self._note_preemption}
        try:
            with signals_mean({**acts, **passed_by(self._pass_on)}):
                while True:
                    code = self._serve(self._connect())
                    if code is not None:
                        return code
        except ControlError as error:
            self._say(str(error))
            return ExitCode.BUDGET_SPENT
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        finally:
            self._end_workers()
            self._local.templates.close()
            os.close(self._wake)

    def _connect(self) -> Connection:
        deadline = Deadline(self._join_s)
        host, port = self._first
        while True:
            try:
                return connect(host, port, self._secret, self._silence_s)
            except OSError as error:
                if deadline.passed:
                    raise ControlError(f"no first agent at {host}:{port} for {self._join_s:.0f} s: {error}") from error
            if self._told != Told():
                raise KeyboardInterrupt
            self._wait(_AGAIN_S)

    def _serve(self, connection: Connection) -> int | None:
        """Obeys until the job is over (its exit code), or the connection (None)."""
        self._inbox = inbox = queue.SimpleQueue()
        self._is_ordered = False
        connection.start(lambda message: self._put(inbox, message), lambda error: self._put(inbox, error))
        name = socket.gethostname()
        connection.send({"is": "here", "name": name, "rank": self._rank, "processes": self._workers.processes})
        try:
            while True:
                ended = self._wait(_TICK_S if self._grace is None else min(_TICK_S, self._grace.left_s))
                if ended:
                    codes = [[child.process, child.reap()] for child in ended]
                    connection.send({"is": "ended", "attempt": self._attempt, "ended": codes})
                if self._has_news:
                    self._has_news = False
                    told = {"preempted": self._told.preempted, "stopped": self._told.stopped}
                    connection.send({"is": "told", **told})
                self._local.tick()
                self._send_beats(connection)
                if self._errors:
                    raise self._errors.pop()
                with suppress(queue.Empty):
                    while True:
                        code = self._obey(inbox.get_nowait())
                        if code is not None:
                            return code
                self._end_stopped(connection)
        except _FirstLostError as error:
            self._say(f"the first agent is lost: {error}; all workers are ended")
            return None
        finally:
            self._end_workers()
            connection.close()

    def _obey(self, message: dict[str, Any] | ControlError) -> int | None:
        if isinstance(message, ControlError):
            raise _FirstLostError(str(message))
        what = message.get("do")
        if what == "start":
            self._start(message)
        elif what == "stop":
            self._stop(float(message["grace_s"]))
        elif what == "dump":
            self._local.dump()
        elif what == "preload":
            self._preload()
        elif what == "refuse":
            raise ControlError(f"the first agent refuses this host: {message['why']}")
        elif what == "finish":
            return int(message["code"])
        return None

    def _send_beats(self, connection: Connection) -> None:
        """Once a second, where a worker has made a step since."""
        if self._attempt is None or monotonic_s() < self._next_beats_s:
            return
        self._next_beats_s = monotonic_s() + _BEATS_S
        beats = self._local.beats()
        if beats != self._sent_beats:
            self._sent_beats = beats
            connection.send({**beats_message(beats), "attempt": self._attempt})

    def _start(self, message: dict[str, Any]) -> None:
        self._attempt = int(message["attempt"])
        place = JobPlace(
            first=int(message["first"]),
            here=self._workers.processes,
            processes=int(message["processes"]),
            coordinator=str(message["coordinator"]),
            attempt=self._attempt,
        )
        self._hooks.on_attempt(self._attempt)
        self._local.start(specs_of(self._workers.command, place, self._workers.prefixes))
        self._to_pass.clear()  # they were for workers that have ended: new ones have no handlers yet
        self._sent_beats = {}
        self._alive = list(self._local.children)
        for child in self._alive:
            child.start_reading()

    def _preload(self) -> None:
        command = python_command(self._workers.command)
        if command is not None:
            self._local.templates.preload(command)

    def _stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after the grace, which a second order may cut."""
        if self._grace is None:
            self._local.signal(signal.SIGTERM)
        self._grace = Deadline(grace_s)

    def _end_stopped(self, connection: Connection) -> None:
        """Once they have ended, or their grace: SIGKILL for the others, and their return codes to the first agent."""
        if self._grace is None or (self._alive and not self._grace.passed):
            return
        self._end_workers()
        codes = [[child.process, child.reap()] for child in self._local.children]
        connection.send({"is": "stopped", "attempt": self._attempt, "ended": codes})
        self._attempt = None

    def _end_workers(self) -> None:
        self._local.kill()
        self._alive, self._grace, self._is_ordered = [], None, False

    def _is_to_end(self) -> bool:
        return self._is_ordered or self._told != Told()

    def _wait(self, timeout_s: float = _TICK_S) -> list[Child]:
        ended = ended_among(self._alive, self._wake, timeout_s)
        self._alive = [child for child in self._alive if child not in ended]
        while self._to_pass:
            self._local.signal(self._to_pass.pop(0))
        return ended

    def _put(self, inbox: queue.SimpleQueue[Any], message: dict[str, Any] | ControlError) -> None:
        inbox.put(message)
        if inbox is self._inbox and (isinstance(message, ControlError) or message.get("do") in ("stop", "finish")):
            self._is_ordered = True
        os.eventfd_write(self._wake, 1)

    def _pass_on(self, signum: int) -> None:
        """In a signal handler: for the workers of this host, if they run."""
        self._to_pass.append(signum)
        os.eventfd_write(self._wake, 1)

    def _note_stop(self) -> None:
        """In a signal handler: the first agent decides for all hosts."""
        self._told.stopped += 1
        self._has_news = True
        os.eventfd_write(self._wake, 1)

    def _note_preemption(self) -> None:
        """In a signal handler, as above."""
        self._told.preempted += 1
        self._has_news = True
        os.eventfd_write(self._wake, 1)


class _FirstLostError(Exception):
    """The connection to the first agent is over."""
