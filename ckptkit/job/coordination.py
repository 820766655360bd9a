"""Agreement between processes through JAX's coordination service: no device collective is ever launched.

A *channel* is a sequence of exchanges that all processes hold in the same order; one thread uses it at a time. `agree`
is the only primitive: every process puts in a value, process 0 decides, every process receives the verdict.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
from jax._src import distributed  # the client has no public name; tests/job/test_coordination.py probes for it

from ckptkit.errors import CoordinationError, NotJoinedError
from ckptkit.events import EventLog
from ckptkit.job.meeting import Decide, Delete, Exchange, Get, Listing, Meetings, Now, Order, Pause, Put, Request
from ckptkit.util import clock

TIMEOUT_S = 600.0  # the longest wait for another process, unless a job gives its own

_RECALL_S = 1.0  # for a verdict that was missed: it is there, or it will not come
_VETO_S = 5.0  # for the veto of a process that raises: its caller waits
_instances = itertools.count()  # managers are made in the same order on every process


class Coordinator(Protocol):
    """How the processes of one job agree. Values are JSON."""

    @property
    def process(self) -> int:
        """This process's index."""
        ...

    @property
    def count(self) -> int:
        """How many processes there are."""
        ...

    @property
    def timeout_s(self) -> float:
        """The longest wait for another process, in a call that gives no `timeout_s`."""
        ...

    def agree(
        self,
        channel: str,
        value: Any,
        decide: Decide,
        *,
        timeout_s: float | None = None,
        about: str = "",
        is_veto: Callable[[Any], bool] | None = None,
        order: Order | None = None,
    ) -> Any:
        """Gathers every process's `value`, and returns the result of process 0's `decide(values)` to all.

        With `is_veto`, process 0 decides as soon as one value is a veto; it passes None for processes that it did not
        wait for. `order` numbers the operations; with it, a late process does not wait for an exchange that process 0
        has left behind.

        `about` is the key of the exchange, for operations that a process may miss (a save, for example): only processes
        with the same key exchange values. A channel is always used with it, or always without.

        Raises `CoordinationError` naming the processes that did not join within `timeout_s`. If `decide` raises, the
        others get an error of the same class.
        """
        ...

    def ask_process_0(
        self,
        channel: str,
        decide: Callable[[], Any],
        *,
        timeout_s: float | None = None,
        about: str = "",
        order: Order | None = None,
    ) -> Any:
        """Returns to all what process 0's `decide()` returns. Process 0 waits for no process, the others for process 0.
        `about` is as in `agree`; no process may lag by more than 10,000 questions.

        Raises `CoordinationError` if process 0 does not answer within `timeout_s`. If `decide` raises, the others get
        an error of the same class.
        """
        ...

    def recall(self, channel: str, about: str) -> tuple[bool, Any]:
        """The verdict of an earlier exchange with key `about`, if it can still be read: `(True, verdict)`, else
        `(False, None)`. Blocks for 1 s at most. Raises the error of that exchange, if it had one."""
        ...

    def veto(self, channel: str, value: Any, decide: Decide, *, about: str) -> None:
        """Puts a value into an exchange without waiting for the other processes. On process 0 the verdict is `decide`
        of that value alone.

        Raises `CoordinationError` where the service does not take it within 5 s.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process's part in a job: how it agrees with the other processes, and where it records events."""

    coordinator: Coordinator
    events: EventLog


def gather(coordinator: Coordinator, channel: str, value: Any, *, timeout_s: float | None = None) -> list[Any]:
    """Everyone's values, in order of process index, on every process."""
    return coordinator.agree(channel, value, lambda values: values, timeout_s=timeout_s)


def make_coordinator(timeout_s: float = TIMEOUT_S) -> Coordinator:
    """The coordinator of this job: trivial for one process, JAX's coordination service for several."""
    if jax.process_count() == 1:
        return LocalCoordinator(timeout_s)
    return JaxCoordinator(timeout_s)


def refuse_unjoined() -> None:
    """Raises `NotJoinedError` in one of several workers of `ckptkit run` that has not called
    `jax.distributed.initialize()`: each would take itself for the whole job, and save to the same place.

    The variables of the launcher are also seen by what a worker starts. Only the worker itself is a child of the agent.
    """
    of = os.environ.get("CKPTKIT_PROCESSES", "1")
    if of == "1" or os.environ.get("CKPTKIT_AGENT") != str(os.getppid()) or jax.process_count() > 1:
        return
    raise NotJoinedError(
        f"process {os.environ.get('CKPTKIT_PROCESS')} of the {of} that `ckptkit run` has started has not joined their "
        "job, and would save to the same place as the others. Call jax.distributed.initialize() before any other use "
        "of JAX. Start runs that are independent of each other with one `ckptkit run` each"
    )


def coordinator_address() -> str | None:
    """Where this job's coordination service is, as `host:port` and as JAX was initialised with it; None without one."""
    return getattr(distributed.global_state, "coordinator_address", None)


@final
class LocalCoordinator:
    """One process agrees with itself."""

    process = 0
    count = 1

    def __init__(self, timeout_s: float = TIMEOUT_S):
        self.timeout_s = timeout_s

    def agree(self, channel: str, value: Any, decide: Decide, **words: Any) -> Any:
        """See `Coordinator.agree`."""
        del channel, words
        return json.loads(json.dumps(decide([value])))

    def ask_process_0(self, channel: str, decide: Callable[[], Any], **words: Any) -> Any:
        """See `Coordinator.ask_process_0`."""
        del channel, words
        return json.loads(json.dumps(decide()))

    def recall(self, channel: str, about: str) -> tuple[bool, Any]:
        """See `Coordinator.recall`."""
        del channel, about
        return False, None

    def veto(self, channel: str, value: Any, decide: Decide, *, about: str) -> None:
        """See `Coordinator.veto`."""


@final
class JaxCoordinator:
    """Exchanges values in the key-value store of `jax.distributed`; the protocol is in `job/meeting.py`.

    Cost: one write and one blocking read per process; process 0 reads the others' messages, up to 512 at once. It
    reads, parses and ranks the inventories of 10,000 processes (600 bytes each) in about 1 s of one core; a test
    enforces 6 s of CPU (`python -m bench gather`).

    Process 0 deletes the keys of all but the last exchanges of a channel, so that the kept keys do not grow.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S):
        client = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                "several processes but no coordination service: call jax.distributed.initialize() before "
                "making a CheckpointManager"
            )
        self._client: Any = client
        self.process = jax.process_index()
        self.count = jax.process_count()
        self.timeout_s = timeout_s
        self._meetings = Meetings(f"ckptkit/{next(_instances)}", self.process, self.count)

    def agree(self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, **words: Any) -> Any:
        """See `Coordinator.agree`."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return self._run(self._meetings.agree(channel, value, decide, timeout_s=timeout_s, **words))

    def ask_process_0(
        self, channel: str, decide: Callable[[], Any], *, timeout_s: float | None = None, **words: Any
    ) -> Any:
        """See `Coordinator.ask_process_0`."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return self._run(self._meetings.ask(channel, decide, timeout_s=timeout_s, **words))

    def recall(self, channel: str, about: str) -> tuple[bool, Any]:
        """See `Coordinator.recall`."""
        return self._run(self._meetings.recall(channel, about, timeout_s=_RECALL_S))

    def veto(self, channel: str, value: Any, decide: Decide, *, about: str) -> None:
        """See `Coordinator.veto`."""
        self._run(self._meetings.veto(channel, value, decide, about=about, timeout_s=_VETO_S))

    def _run(self, exchange: Exchange) -> Any:
        """Runs an exchange on this thread: sends its requests, and gives it the answers."""
        answer, error = None, None
        try:
            while True:
                try:
                    request = exchange.throw(error) if error is not None else exchange.send(answer)
                except StopIteration as done:
                    return done.value
                answer = error = None
                try:
                    answer = self._answer(request)
                except CoordinationError as caught:
                    error = caught
        finally:
            exchange.close()

    def _answer(self, request: Request) -> Any:
        match request:
            case Put(key, text):
                return self._ask("key_value_set", key, text, True)
            case Get(key, timeout_s):
                return self._ask("blocking_key_value_get", key, max(1, int(timeout_s * 1000)))
            case Listing(prefix):
                return self._ask("key_value_dir_get", prefix) or []
            case Delete(key):
                return self._ask("key_value_delete", key)
            case Now():
                return clock.monotonic_s()
            case Pause(seconds):
                return time.sleep(seconds)

    def _ask(self, method: str, *args: Any) -> Any:
        """One call of the service; None where one that reads or deletes ran out of time."""
        try:
            return getattr(self._client, method)(*args)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error) and method != "key_value_set":
                return None
            raise CoordinationError(f"the coordination service failed: {error}") from error


@final
class ScopedCoordinator:
    """A coordinator whose exchanges all have the key of the current operation: a restore, or a try to save a step.

    A process that misses one of several exchanges rejoins at the next operation. With numbered exchanges it would never
    rejoin: each would get its value for the one before.
    """

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator
        self.about = ""
        self.process = coordinator.process
        self.count = coordinator.count
        self.timeout_s = coordinator.timeout_s

    def begin(self, about: str) -> None:
        """Sets the key of the next exchanges; no two operations have the same key."""
        self.about = about

    def agree(self, channel: str, value: Any, decide: Decide, *, about: str = "", **words: Any) -> Any:
        """See `Coordinator.agree`."""
        return self._coordinator.agree(channel, value, decide, about=about or self.about, **words)

    def ask_process_0(self, channel: str, decide: Callable[[], Any], *, about: str = "", **words: Any) -> Any:
        """See `Coordinator.ask_process_0`."""
        return self._coordinator.ask_process_0(channel, decide, about=about or self.about, **words)

    def recall(self, channel: str, about: str) -> tuple[bool, Any]:
        """See `Coordinator.recall`."""
        return self._coordinator.recall(channel, about)

    def veto(self, channel: str, value: Any, decide: Decide, *, about: str) -> None:
        """See `Coordinator.veto`."""
        self._coordinator.veto(channel, value, decide, about=about)
