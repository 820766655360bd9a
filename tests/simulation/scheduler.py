"""Tasks in virtual time on one thread: they yield what they wait for, and a seeded scheduler interleaves them."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from typing import Any, Final, final

Steps = Generator[Any, Any, Any]

PENDING: Final = object()  # of a request: something else resumes the task


class Violation(Exception):
    """A rule of the oracle is broken: the run ends."""


@final
class Task:
    """One thread of a simulated process: a stack of generators, the innermost last."""

    __slots__ = ("done", "name", "process", "stack", "ticket", "until")

    def __init__(self, name: str, process: Any, steps: Steps):
        self.name, self.process = name, process
        self.stack: list[Steps] = [steps]
        self.done = False
        self.until: Callable[[], Any] | None = None  # what the task waits for
        self.ticket = 0  # of the wake-up that counts; older ones are void

    def kill(self) -> None:
        """Ends the task at once, as SIGKILL does: nothing of it runs any more."""
        self.done, self.until, self.stack = True, None, []
        self.ticket += 1


@final
class Scheduler:
    """The virtual clock and the tasks.

    `perform(task, request)` answers what a task asks for: it returns the answer, pushes onto the task's stack a
    generator that gives it, or returns PENDING where something resumes the task later.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.now_s = 0.0
        self.current: Any = None  # the process that runs
        self.events = 0
        self.stopped = False
        self._heap: list[tuple[float, float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._waiting: dict[Any, list[Task]] = {}  # by process
        self._touched: list[Any] = []  # processes of which a task has run
        self.perform: Callable[[Task, Any], Any] = lambda task, request: PENDING

    def at(self, delay_s: float, act: Callable[[], object]) -> None:
        """Runs `act` in `delay_s`; what happens at the same time happens in a random order."""
        heapq.heappush(self._heap, (self.now_s + delay_s, self.rng.random(), next(self._numbers), act))

    def start(self, name: str, process: Any, steps: Steps) -> Task:
        """A new task."""
        task = Task(name, process, steps)
        self.resume(task)
        return task

    def resume(self, task: Task, value: Any = None, error: BaseException | None = None, delay_s: float = 0.0) -> None:
        """Goes on with a task in `delay_s`, unless something else does so before."""
        task.ticket += 1
        ticket = task.ticket

        def go_on() -> None:
            if not task.done and task.ticket == ticket:
                self._step(task, value, error)

        self.at(delay_s, go_on)

    def hold(self, task: Task) -> int:
        """Nothing but the holder of the ticket resumes the task from now on (`current`)."""
        task.ticket += 1
        return task.ticket

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raises `error` in the task now, wherever it waits."""
        task.until = None
        self.resume(task, error=error)

    def wait(self, task: Task, until: Callable[[], Any], timeout_s: float | None) -> Any:
        """The answer to a wait: True once `until()` holds, which follows from the task's own process; False after
        `timeout_s`."""
        if until():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        task.until = until
        ticket = self.hold(task)
        self._waiting.setdefault(task.process, []).append(task)
        if timeout_s is not None:

            def give_up() -> None:
                if not task.done and task.ticket == ticket and task.until is not None:
                    task.until = None
                    self._step(task, False, None)

            self.at(timeout_s, give_up)
        return PENDING

    def run(self, most: int) -> bool:
        """Runs events until `stopped`; False where there were more than `most`, or nothing is left to do."""
        heap, touched, waiting, pop = self._heap, self._touched, self._waiting, heapq.heappop
        while not self.stopped:
            if not heap or self.events >= most:
                return False
            self.events += 1
            self.now_s, _, _, act = pop(heap)
            act()
            while touched:
                process = touched.pop()
                if waiting.get(process):
                    self._wake(process)
        return True

    def _wake(self, process: Any) -> None:
        still = []
        for task in self._waiting[process]:
            if task.done or task.until is None:
                continue
            if task.until():
                task.until = None
                self.resume(task, True)
            else:
                still.append(task)
        self._waiting[process] = still

    def step(self, task: Task, value: Any = None, error: BaseException | None = None) -> None:
        """Goes on with a task at once."""
        self._step(task, value, error)

    def _step(self, task: Task, value: Any, error: BaseException | None) -> None:
        self._touched.append(task.process)
        self.current = task.process
        stack = task.stack
        while stack:
            innermost = stack[-1]
            try:
                request = innermost.throw(error) if error is not None else innermost.send(value)
            except StopIteration as done:
                stack.pop()
                value, error = done.value, None
                continue
            except Violation:
                raise
            except (Exception, KeyboardInterrupt) as caught:  # noqa: BLE001  raised in the generator that called it
                stack.pop()
                value, error = None, caught
                continue
            value = error = None
            answer = self.perform(task, request)
            if task.done:  # killed by what it asked for
                return
            if stack[-1] is not innermost:
                continue
            if answer is PENDING:
                return
            value = answer
        task.done = True
        if error is not None:
            raise Violation(f"{task.name} ended with {type(error).__name__}: {error}") from error
