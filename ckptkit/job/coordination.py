"""Agreement between processes through JAX's coordination service: no device collective is ever launched.

A *channel* is a sequence of meetings that all processes hold in the same order; one thread uses it at a time.
`agree` is the only primitive: everybody puts a value in, process 0 decides, everybody hears the verdict.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
from jax._src import distributed  # the client has no public name; tests/job/test_coordination.py probes for it

from ckptkit.errors import CoordinationError, heard_from
from ckptkit.events import EventLog
from ckptkit.util.clock import Deadline

Decide = Callable[[list[Any]], Any]

TIMEOUT_S = 600.0  # the longest wait for another process, unless a job gives its own

_TOLD_KEPT = 10_000  # words of process 0 that stay readable, about 100 bytes each
_ABOUT_KEPT = 16  # of what process 0 told words about
_LISTED = 512  # words of processes that are read in one answer: 2 MiB of the largest reports of one save
_ONE_BY_ONE = 16  # so few are waited for one after the other
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
        self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """Gathers everyone's `value`, and returns to all what process 0's `decide(values)` says.

        `about` says what a meeting is held for, where a process may miss one (a save, say): it meets none but those who
        come for the same. A channel is always used with it, or always without.

        Raises `CoordinationError` naming the processes that did not come within `timeout_s`. Where `decide` raises,
        the others hear it as an error of the same class.
        """
        ...

    def ask_process_0(
        self, channel: str, decide: Callable[[], Any], *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """Returns to all what process 0's `decide()` says. Process 0 waits for nobody, the others for its word alone.
        `about` is as in `agree`; nobody may lag by more than 16 of them.

        Raises `CoordinationError` where process 0 says nothing within `timeout_s`; what `decide` raises reaches the
        others as an error of the same class.
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


def coordinator_address() -> str | None:
    """Where this job's coordination service is, as `host:port` and as JAX was told; None without one."""
    return getattr(distributed.global_state, "coordinator_address", None)


@final
class LocalCoordinator:
    """One process agrees with itself."""

    process = 0
    count = 1

    def __init__(self, timeout_s: float = TIMEOUT_S):
        self.timeout_s = timeout_s

    def agree(
        self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """See `Coordinator.agree`."""
        del channel, timeout_s, about
        return json.loads(json.dumps(decide([value])))

    def ask_process_0(
        self, channel: str, decide: Callable[[], Any], *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """See `Coordinator.ask_process_0`."""
        del channel, timeout_s, about
        return json.loads(json.dumps(decide()))


@final
class JaxCoordinator:
    """Meets in the key-value store of `jax.distributed`.

    Cost: one write and one blocking read per process; process 0 reads the others' words, up to 512 at once. What
    10,000 processes hold (600 bytes each, `ckptkit.restore.inventory`) it hears, parses and ranks in about 1 s of one
    core; the bound that a test holds is 6 s of CPU (`python -m bench gather`).

    Keys of a meeting are deleted by process 0 at the next meeting of the same channel, when everybody has
    answered it and so has read the last verdict: what is kept does not grow. Meetings are counted, those about the same
    apart from others: who has given one up does not take the next one for it.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S):
        client = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                "several processes but no coordination service: call jax.distributed.initialize() before "
                "making a CheckpointManager"
            )
        self._client: Any = client
        self._prefix = f"ckptkit/{next(_instances)}"
        self._meetings: dict[str, tuple[str, int]] = {}  # by channel, what the last one was about, and its number
        self._told: dict[str, tuple[str, int]] = {}
        self._told_about: dict[str, deque[str]] = {}
        self.process = jax.process_index()
        self.count = jax.process_count()
        self.timeout_s = timeout_s

    def agree(
        self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """See `Coordinator.agree`."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        last, number = self._meetings.get(channel, ("", -1))
        last_meeting = self._place_of(channel, last, number)
        number = number + 1 if last == about else 0
        self._meetings[channel] = (about, number)
        meeting = self._place_of(channel, about, number)
        deadline = Deadline(timeout_s)
        self._ask("key_value_set", _place(meeting, self.process), json.dumps(value))
        if self.process == 0:
            return self._preside(meeting, f"{last_meeting}/", decide, deadline)
        # Process 0 waits timeout_s for the others and then says who is missing: give that verdict time to arrive.
        text = self._get(f"{meeting}/out", deadline.left_s + 5.0)
        if text is None:
            raise CoordinationError(f"{channel}: process 0 said nothing within {timeout_s:g} s")
        verdict = json.loads(text)
        if "missing" in verdict:
            raise _missing(channel, verdict["missing"], timeout_s)
        if "failed" in verdict:
            raise heard_from(0, *verdict["failed"])
        return verdict["verdict"]

    def ask_process_0(
        self, channel: str, decide: Callable[[], Any], *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """See `Coordinator.ask_process_0`."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        last, number = self._told.get(channel, ("", -1))
        number = number + 1 if last == about else 0
        self._told[channel] = (about, number)
        key = self._place_of(channel, about, number)
        if self.process != 0:
            text = self._get(key, timeout_s)
            if text is None:
                raise CoordinationError(f"{channel}: process 0 said nothing within {timeout_s:g} s")
            said = json.loads(text)
            if "failed" in said:
                raise heard_from(0, *said["failed"])
            return said["verdict"]
        if number >= _TOLD_KEPT:  # nobody lags that many steps of training behind process 0
            self._ask("key_value_delete", self._place_of(channel, about, number - _TOLD_KEPT))
        if about != last:
            self._told_about.setdefault(channel, deque()).append(about)
            if len(self._told_about[channel]) > _ABOUT_KEPT:
                self._ask("key_value_delete", f"{self._prefix}/{channel}/{self._told_about[channel].popleft()}/")
        try:
            verdict = json.dumps({"verdict": decide()})
        except Exception as error:
            self._ask("key_value_set", key, json.dumps({"failed": [type(error).__name__, str(error)]}))
            raise
        self._ask("key_value_set", key, verdict)
        return json.loads(verdict)["verdict"]

    def _place_of(self, channel: str, about: str, number: int) -> str:
        return "/".join([self._prefix, channel, *([about] if about else []), str(number)])

    def _preside(self, meeting: str, last_meeting: str, decide: Decide, deadline: Deadline) -> Any:
        heard = self._heard(meeting, deadline)
        missing = [process for process in range(self.count) if process not in heard]
        values = [json.loads(heard[process]) for process in range(self.count) if process in heard]
        self._ask("key_value_delete", last_meeting)
        channel = meeting.removeprefix(self._prefix + "/")
        if missing:
            self._ask("key_value_set", f"{meeting}/out", json.dumps({"missing": missing}))
            raise _missing(channel, missing, None)
        try:
            verdict = json.dumps({"verdict": decide(values)})
        except Exception as error:
            self._ask("key_value_set", f"{meeting}/out", json.dumps({"failed": [type(error).__name__, str(error)]}))
            raise
        self._ask("key_value_set", f"{meeting}/out", verdict)
        return json.loads(verdict)["verdict"]

    def _heard(self, meeting: str, deadline: Deadline) -> dict[int, str]:
        """What each process that came in time has said. Of many that come at the same time, many are read at once."""
        heard: dict[int, str] = {}
        for first in range(0, self.count, _LISTED):
            missing, in_time = list(range(first, min(first + _LISTED, self.count))), True
            while len(missing) > _ONE_BY_ONE:
                listed = self._ask("key_value_dir_get", f"{meeting}/in/{first // _LISTED}/") or []
                heard |= {int(key.rpartition("/")[2]): text for key, text in listed}
                missing = [process for process in missing if process not in heard]
                if not in_time or len(missing) <= _ONE_BY_ONE:
                    break
                in_time = self._get(_place(meeting, missing[0]), deadline.left_s) is not None
            for process in missing if in_time or not deadline.passed else ():
                if (text := self._get(_place(meeting, process), deadline.left_s)) is not None:
                    heard[process] = text
        return heard

    def _get(self, key: str, timeout_s: float) -> str | None:
        return self._ask("blocking_key_value_get", key, max(1, int(timeout_s * 1000)))

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
    """A coordinator all of whose meetings are about what was begun last: a restore, say, or a try to save a step.

    A process that misses one of several meetings is then out of step until the next occasion. Not for good: meetings
    that are counted on would hear from it, each time, its word on the one before.
    """

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator
        self._about = ""
        self.process = coordinator.process
        self.count = coordinator.count
        self.timeout_s = coordinator.timeout_s

    def begin(self, about: str) -> None:
        """The meetings from now on are about this; no two occasions are named alike."""
        self._about = about

    def agree(
        self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """See `Coordinator.agree`."""
        return self._coordinator.agree(channel, value, decide, timeout_s=timeout_s, about=about or self._about)

    def ask_process_0(
        self, channel: str, decide: Callable[[], Any], *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        """See `Coordinator.ask_process_0`."""
        return self._coordinator.ask_process_0(channel, decide, timeout_s=timeout_s, about=about or self._about)


def _place(meeting: str, process: int) -> str:
    """Where a process puts its word."""
    return f"{meeting}/in/{process // _LISTED}/{process}"


def _missing(channel: str, missing: Sequence[int], timeout_s: float | None) -> CoordinationError:
    who = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    within = f" within {timeout_s:g} s" if timeout_s is not None else " in time"
    return CoordinationError(f"{channel}: process {who} did not come{within}; look at why it stopped")
