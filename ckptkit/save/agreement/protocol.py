"""The protocol of saves as generators: no threads, no clocks, no I/O.

A protocol yields *effects* and receives their results. `drive` performs them on a thread, over the job's coordinator;
the simulator (`tests/simulation`) performs them in virtual time and injects faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from ckptkit.job.coordination import Coordinator
from ckptkit.job.meeting import Decide, Order
from ckptkit.store import side_by_side
from ckptkit.util.notice import Promise


@dataclass(slots=True)
class Do:
    """An act of this process, which may take time or raise. `what` names it in events and simulations."""

    what: str
    act: Callable[[], Any]


@dataclass(slots=True)
class Agree:
    """An exchange of all processes (`Coordinator.agree`)."""

    channel: str
    about: str
    value: Any
    decide: Decide
    is_veto: Callable[[Any], bool] | None = None
    order: Order | None = None


@dataclass(slots=True)
class Ask:
    """A question to process 0, which waits for nobody (`Coordinator.ask_process_0`)."""

    channel: str
    about: str
    decide: Callable[[], Any]
    order: Order | None = None


@dataclass(slots=True)
class Recall:
    """An earlier verdict, if it can still be read (`Coordinator.recall`)."""

    channel: str
    about: str


@dataclass(slots=True)
class Veto:
    """A value for an exchange, put without waiting for the others (`Coordinator.veto`)."""

    channel: str
    about: str
    value: Any
    decide: Decide


@dataclass(slots=True)
class SideBySide:
    """A protocol, and an act at the same time on another thread; the result is that of the act. Raises what the
    protocol raises, or else the act."""

    protocol: SaveProtocol
    act: Callable[[], Any]


@dataclass(slots=True)
class Wait:
    """Waits for what was promised; raises `TimeoutError` after `timeout_s`."""

    promise: Promise[Any]
    timeout_s: float | None = None


@dataclass(slots=True)
class Idle:
    """Waits until a worker has nothing to do; the result is False where it still has after `timeout_s`."""

    worker: Worker
    timeout_s: float


@dataclass(slots=True)
class Onto:
    """The protocol goes on in the thread of a worker, after the jobs that this one has already. For who drives it, it
    ends here, without a result."""

    worker: Worker


@dataclass(slots=True)
class Sleep:
    """A pause."""

    seconds: float


Here = Do | Agree | Ask | Recall | Veto | SideBySide | Wait | Idle | Sleep
Effect = Here | Onto
SaveProtocol = Generator[Effect, Any, Any]


def drive(protocol: SaveProtocol, coordinator: Coordinator, *, raised_within: type[BaseException] = Exception) -> Any:
    """Runs a protocol on this thread; returns or raises what it does, or None once it goes on in another thread.

    Errors of an effect are raised in the protocol, as far as they are `raised_within`. Others, as that of Ctrl-C, come
    from outside and close it: its `finally` clauses run, and yield nothing.
    """
    result, error, is_here = None, None, True
    try:
        while True:
            try:
                effect = protocol.throw(error) if error is not None else protocol.send(result)
            except StopIteration as done:
                return done.value
            result = error = None
            try:
                if isinstance(effect, Onto):
                    is_here = False  # before it is queued: from then on it is the other thread's
                    effect.worker.submit(lambda: protocol)
                    return None
                result = perform(effect, coordinator)
            except raised_within as caught:
                if not is_here:  # by a signal's handler perhaps, and the other thread has it already
                    raise
                error = caught
    finally:
        if is_here:
            protocol.close()


def perform(effect: Here, coordinator: Coordinator) -> Any:
    """The result of one effect."""
    match effect:
        case Do(_, act):
            return act()
        case Agree(channel, about, value, decide, is_veto, order):
            return coordinator.agree(channel, value, decide, about=about, is_veto=is_veto, order=order)
        case Ask(channel, about, decide, order):
            return coordinator.ask_process_0(channel, decide, about=about, order=order)
        case Recall(channel, about):
            return coordinator.recall(channel, about)
        case Veto(channel, about, value, decide):
            return coordinator.veto(channel, value, decide, about=about)
        case SideBySide(protocol, act):
            return side_by_side([lambda: drive(protocol, coordinator), act])[1]
        case Wait(promise, timeout_s):
            return promise.result(timeout_s)
        case Idle(worker, timeout_s):
            return worker.wait_idle(timeout_s)
        case Sleep(seconds):
            return time.sleep(seconds)


class Workers(Interface):
    """Makes the threads of a pipeline, or their replacements in a simulation."""

    def __call__(self, name: str, *, waiting_max: int) -> Worker:
        """A worker that runs jobs in order, with room for `waiting_max` that wait."""
        ...


class Worker(Interface):
    """Runs jobs one after the other. A job returns a protocol to be driven, or None when it is done."""

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        ...

    def submit(self, job: Callable[[], SaveProtocol | None]) -> None:
        """Queues a job; waits while the queue is full."""
        ...

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing runs or waits; False when `timeout_s` passed first."""
        ...

    def drain(self) -> None:
        """Waits for every job, then raises the error that escaped one, once."""
        ...

    def close(self, timeout_s: float | None = None) -> bool:
        """Runs what is queued, then ends the thread; False where it did not end in time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """The means that drive a pipeline: threads and copies, or their replacements in a simulation."""

    make_worker: Workers
    make_disk_copy: Callable[..., Any]  # `DiskCopy`
    begin_staging: Callable[..., Any]  # `snapshot.staging.Stager.begin`
