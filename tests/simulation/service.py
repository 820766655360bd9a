"""JAX's coordination service in virtual time: a key-value store that is late, away, or loses its answers."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, final

from ckptkit.errors import CoordinationError
from ckptkit.job.meeting import Delete, Get, Listing, Pause, Put, Request
from tests.simulation.scheduler import PENDING, Scheduler, Task

_TRIP_S = 0.002  # the longest way to the service and back, without faults


@dataclass(slots=True)
class Link:
    """How one process reaches the service: away until then, how often an answer is lost, and how slow it is."""

    away_until_s: float = 0.0
    lost: float = 0.0
    slow_s: float = 0.0


@final
class Service:
    """The store of one attempt. It lives in process 0, and ends with it."""

    def __init__(self, scheduler: Scheduler, rng: random.Random):
        self._scheduler, self._rng = scheduler, rng
        self.values: dict[str, str] = {}
        self.most = 0
        self._folders: dict[str, set[str]] = {}
        self._links: defaultdict[int, Link] = defaultdict(Link)
        self._waiting: dict[str, list[tuple[Task, int, int]]] = {}  # by key: task, its ticket, its process
        self._alive = True

    def link(self, process: int) -> Link:
        """The link of a process."""
        return self._links[process]

    def cut(self, process: int, seconds: float) -> None:
        """The service is away from one process for a while: what waits for an answer fails now."""
        self.link(process).away_until_s = self._scheduler.now_s + seconds
        self._fail(lambda waiting: waiting == process)

    def end(self) -> None:
        """Process 0 died, and the service with it."""
        self._alive = False
        self._fail(lambda _: True)

    def answer(self, task: Task, process: int, request: Request) -> Any:
        """The answer to a request of a task, or PENDING: it comes later."""
        if isinstance(request, Pause):
            self._scheduler.resume(task, delay_s=request.seconds)
            return PENDING
        delay_s = self._rng.random() * (_TRIP_S + self._links[process].slow_s)
        ticket = self._scheduler.hold(task)  # only the answer resumes it
        self._scheduler.at(delay_s, lambda: self._arrived(task, ticket, process, request))
        return PENDING

    def _arrived(self, task: Task, ticket: int, process: int, request: Any) -> None:
        link, current = self.link(process), not task.done and task.ticket == ticket
        away = not self._alive or self._scheduler.now_s < link.away_until_s
        result = None if away or isinstance(request, Get) else self._apply(request)
        if not current:
            return
        if away or (link.lost and self._rng.random() < link.lost):
            self._scheduler.resume(task, error=_failure(), delay_s=self._rng.random() * 0.01)
        elif not isinstance(request, Get):
            self._scheduler.step(task, result)
        elif request.key in self.values or request.timeout_s <= 0:
            self._scheduler.step(task, self.values.get(request.key))
        else:
            self._waiting.setdefault(request.key, []).append((task, ticket, process))

            def time_out() -> None:
                if not task.done and task.ticket == ticket:
                    self._scheduler.resume(task, None)

            self._scheduler.at(request.timeout_s, time_out)

    def _apply(self, request: Request) -> Any:
        match request:
            case Put(key, text):
                self.values[key] = text
                self._folders.setdefault(key.rpartition("/")[0], set()).add(key)
                self.most = max(self.most, len(self.values))
                for task, ticket, _ in self._waiting.pop(key, ()):
                    if not task.done and task.ticket == ticket:
                        self._scheduler.resume(task, text)
            case Listing(prefix):
                return [(key, self.values[key]) for key in sorted(self._folders.get(prefix[:-1], ()))]
            case Delete(key):
                if key in self.values:
                    self._folders[key.rpartition("/")[0]].discard(key)
                    del self.values[key]
                elif key.endswith("/"):
                    for folder in [each for each in self._folders if f"{each}/".startswith(key)]:
                        for below in self._folders.pop(folder):
                            del self.values[below]
        return None

    def _fail(self, concerns: Any) -> None:
        for key, waiting in list(self._waiting.items()):
            kept = []
            for task, ticket, process in waiting:
                if task.done or task.ticket != ticket:
                    continue
                if concerns(process):
                    self._scheduler.resume(task, error=_failure())
                else:
                    kept.append((task, ticket, process))
            self._waiting[key] = kept


def _failure() -> CoordinationError:
    return CoordinationError("the coordination service failed: UNAVAILABLE (simulated)")
