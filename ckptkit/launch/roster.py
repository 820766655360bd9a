"""The other hosts of a job, as the first agent sees them: which are there, which take part, what they report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from ckptkit.launch.control import Connection, ControlError, Listener
from ckptkit.launch.policy import ExitCode, Loss
from ckptkit.launch.signals import Told
from ckptkit.util.clock import Deadline, monotonic_s
from ckptkit.util.heartbeat import Beats, Saves

SILENCE_S = 5.0  # after which a host is lost: five pings
_LOOK_S = 0.1
_STOP_EXTRA_S = 10.0  # for a host to end its workers, beyond their grace


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """From `min` to `max` hosts run the job, the first one included; more of them wait as spares.

    The first start waits `join_s` for `max` hosts, a restart `rejoin_s` for a host in the place of a lost one; then
    `min` are enough. A host that is silent for `silence_s` is lost.
    """

    min: int
    max: int
    join_s: float = 300.0
    rejoin_s: float = 30.0
    silence_s: float = SILENCE_S

    def __post_init__(self):
        if not 1 <= self.min <= self.max:
            raise ValueError(f"{self.min}:{self.max} hosts, expected 1 <= MIN <= MAX")


@dataclass(eq=False, slots=True)
class RemoteHost:
    """An agent that has connected. `attempt`: the one that its workers belong to, None while they do not run.
    `is_told`: that a template of this job works. `beats`: the newest of its workers, as it sent them."""

    name: str
    rank: int
    connection: Connection
    attempt: int | None = None
    is_told: bool = False
    beats: dict[int, Beats | None] = field(default_factory=dict)


@final
class Roster:
    """Owns the connections to the other agents. `wake` is called from their threads when `take` may have news.

    `told`: the requests that the agents of the job got by signals. A spare that gets one leaves, and the job continues.
    """

    def __init__(
        self, address: tuple[str, int], secret: str, limits: HostLimits, processes: int, wake: Callable[[], None]
    ):
        self.limits = limits
        self.told = Told()
        self._processes = processes
        self._wake = wake
        self._lock = threading.Condition()
        self._hosts: list[RemoteHost] = []
        self._places: list[RemoteHost] = []  # of the attempt: hosts 1, 2, ...
        self._codes: dict[int, int] = {}
        self._losses: list[Loss] = []
        self._not_before_s = 0.0
        self._has_started = False
        self._listener = Listener(*address, secret, limits.silence_s, self._join)

    @property
    def port(self) -> int:
        """Where agents connect."""
        return self._listener.port

    def assemble(self, is_over: Callable[[], bool]) -> int | None:
        """Chooses the hosts of the next attempt, and returns how many there are; None where too few came, or `is_over`.

        A host keeps its place. A spare takes the place of a lost host.
        """
        join = Deadline(self.limits.rejoin_s if self._has_started else self.limits.join_s)
        last = Deadline(self.limits.join_s)
        while not is_over():
            with self._lock:
                count = 1 + len(self._hosts)
                left_s = max(self._not_before_s - monotonic_s(), 0.0)
                if not left_s and (count >= self.limits.max or (join.passed and count >= self.limits.min)):
                    self._places = self._placed(min(count, self.limits.max) - 1)
                    self._has_started = True
                    return 1 + len(self._places)
                if last.passed:
                    return None
                self._lock.wait(min(0.2, left_s or 0.2))
        return None

    def start(self, attempt: int, coordinator: str) -> None:
        """Starts the workers of the other hosts."""
        total = self._processes * (1 + len(self._places))
        for place, host in enumerate(self._places, start=1):
            host.attempt, host.beats = attempt, {}
            host.connection.send(
                {
                    "do": "start",
                    "attempt": attempt,
                    "coordinator": coordinator,
                    "first": place * self._processes,
                    "processes": total,
                }
            )

    def take(self) -> tuple[dict[int, int], list[Loss]]:
        """The return codes of workers that have ended, and the losses: those that no earlier call returned."""
        with self._lock:
            taken = self._codes, self._losses
            self._codes, self._losses = {}, []
            return taken

    def beats(self) -> dict[int, Beats | None]:
        """The newest beats of the workers of the other hosts."""
        with self._lock:
            hosts = [host.beats for host in self._places if host.attempt is not None]
            return {process: each for beats in hosts for process, each in beats.items()}

    def tell(self, what: str, **fields: Any) -> None:
        """Sends an order to the hosts of the attempt."""
        with self._lock:
            hosts = [host for host in self._hosts if host.attempt is not None]
        for host in hosts:
            host.connection.send({"do": what, **fields})

    def wait_until_stopped(self, grace_s: float, is_cut: Callable[[], bool]) -> None:
        """Returns once no worker of another host runs; `is_cut` ends the grace.

        A host that does not report that in time is lost: the codes of its workers are missing.
        """
        deadline = Deadline(grace_s + _STOP_EXTRA_S)
        has_cut = False
        with self._lock:
            while (left := [host for host in self._hosts if host.attempt is not None]) and not deadline.passed:
                if not has_cut and is_cut():
                    has_cut, deadline = True, Deadline(_STOP_EXTRA_S)
                    for host in left:
                        host.connection.send({"do": "stop", "grace_s": 0.0})
                self._lock.wait(min(_LOOK_S, deadline.left_s))
        for host in left:
            self._lost(host, ControlError("its workers did not end", silent=True))
            host.connection.close()

    def warm_spares(self) -> None:
        """Has hosts that run no worker make a template, each once."""
        with self._lock:
            behind = [host for host in self._hosts if not host.is_told]
            for host in behind:
                host.is_told = True
        for host in behind:
            host.connection.send({"do": "preload"})

    def close(self, code: int) -> None:
        """Sends every agent the exit code of the job, and closes the connections."""
        self._listener.close()
        with self._lock:
            hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.connection.send({"do": "finish", "code": code})
        for host in hosts:
            host.connection.finish()

    def _placed(self, count: int) -> list[RemoteHost]:
        kept: list[RemoteHost | None] = [host if host in self._hosts else None for host in self._places]
        kept = (kept + [None] * count)[: max(count, len(kept))]
        free = sorted((host for host in self._hosts if host not in kept), key=lambda host: host.rank)
        filled = [host if host is not None or not free else free.pop(0) for host in kept]
        return [host for host in filled if host is not None][:count]

    def _join(self, connection: Connection, address: str) -> None:
        """Adds an agent that has proved its secret. Its first message has its name."""
        host = RemoteHost(name=address, rank=0, connection=connection)
        connection.start(lambda message: self._hear(host, message), lambda error: self._lost(host, error))

    def _hear(self, host: RemoteHost, message: dict[str, Any]) -> None:
        if message.get("is") == "beats":
            first = self._first_process(host)
            with self._lock:
                if host.attempt == message.get("attempt"):
                    host.beats = beats_of(message, range(first, first + self._processes))
            return
        with self._lock:
            if message.get("is") == "here":
                host.name, host.rank = str(message.get("name"))[:200], int(message.get("rank", 0))
                if message.get("processes") == self._processes:
                    self._hosts.append(host)
                else:
                    host.connection.send({"do": "refuse", "why": f"expected --processes {self._processes}"})
            elif message.get("is") in ("ended", "stopped"):
                if host.attempt == message.get("attempt"):
                    codes = {int(process): int(code) for process, code in message["ended"]}
                    self._codes |= codes
                    self._losses += [
                        Loss(process=each, returncode=code) for each, code in codes.items() if Loss.is_one(code)
                    ]
                if message["is"] == "stopped":
                    host.attempt = None
            elif message.get("is") == "told":
                self._hear_told(host, Told(int(message["preempted"]), int(message["stopped"])))
            self._lock.notify_all()
        self._wake()

    def _hear_told(self, host: RemoteHost, told: Told) -> None:
        if host in self._places:
            self.told.note(told)
        elif host in self._hosts:
            self._hosts.remove(host)
            host.connection.send({"do": "finish", "code": int(ExitCode.INTERRUPTED)})

    def _lost(self, host: RemoteHost, error: ControlError) -> None:
        with self._lock:
            if host in self._hosts:
                self._hosts.remove(host)
            if error.silent:  # its agent ends its workers after the same silence, and may have begun to count later
                self._not_before_s = monotonic_s() + self.limits.silence_s + 1.0
            if host.attempt is not None:
                host.attempt = None
                why = f"host {host.name} is lost: {error}"
                self._losses.append(Loss(process=self._first_process(host), returncode=-signal.SIGKILL, why=why))
            self._lock.notify_all()
        self._wake()

    def _first_process(self, host: RemoteHost) -> int:
        """The first process of a host in the attempt; of one that is in none, 0."""
        return self._processes * (1 + self._places.index(host)) if host in self._places else 0


def beats_message(beats: Mapping[int, Beats | None]) -> dict[str, Any]:
    """The fields of the message: one row for each process, its beats or null. Their times count from this moment."""
    now_s = monotonic_s()
    rows = [[process, None if each is None else asdict(each.moved(-now_s))] for process, each in beats.items()]
    return {"is": "beats", "beats": rows}


def beats_of(message: Mapping[str, Any], processes: range) -> dict[int, Beats | None]:
    """The beats in a message that was just received, of `processes` alone."""
    now_s = monotonic_s()
    rows = {int(process): row for process, row in message["beats"]}
    return {each: row and _beats(row).moved(now_s) for each, row in rows.items() if each in processes}


def _beats(row: dict[str, Any]) -> Beats:
    # `behind` is of process 0, whose agent is the one that reads it.
    return Beats(**{**row, "saves": Saves(**row["saves"]), "behind": None})
