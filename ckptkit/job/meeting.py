"""How processes agree over a key-value service, without threads, clocks or I/O.

Every function here is a generator: it yields requests to the service and receives their answers. A driver runs it
over JAX's coordination service (`job/coordination.py`); the simulator runs it in virtual time.

Process 0 decides. Every other process puts its value under a key of its own and waits for one key, the verdict. A
request that the service does not answer is sent again until the deadline. So a service that is away for a while, or an
answer that is late or lost, costs time and does not fail the exchange.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ckptkit.errors import CheckpointError, CoordinationError, heard_from
from ckptkit.util.words import first_of

Decide = Callable[[list[Any]], Any]
Order = Callable[[str], float]  # numbers the operations; larger is later

_TOLD_KEPT = 10_000  # answers of process 0 that stay readable, about 100 bytes each
_MEETINGS_KEPT = 16  # of each channel: a process that is late reads the verdict that it missed
_LISTED = 512  # messages that are read in one answer: 2 MiB of the largest reports of one save
_ONE_BY_ONE = 16  # so many that are missing are looked for one by one at the end
_VERDICT_SPARE_S = 5.0  # process 0 waits for all until the deadline, and then its verdict has to arrive
_LOOK_S = 0.5  # how often process 0 looks for a veto while it waits for others
_SLICE_MAX_S = 4.0  # how often a waiting process checks whether process 0 has left the exchange
_SLICES_MIN = 4  # in a short wait it checks as often as this
_RETRY_S = (0.05, 2.0)  # the first pause before a request is sent again, and the longest


@dataclass(slots=True)
class Put:
    """Stores `text`; what is there already is replaced."""

    key: str
    text: str


@dataclass(slots=True)
class Get:
    """Waits for a key; the answer is its text, or None after `timeout_s`."""

    key: str
    timeout_s: float


@dataclass(slots=True)
class Listing:
    """The keys below `prefix`, which ends in a slash, with their texts."""

    prefix: str


@dataclass(slots=True)
class Delete:
    """Deletes a key, or with a slash at the end everything below it."""

    key: str


@dataclass(slots=True)
class Now:
    """Seconds of a monotonic clock."""


@dataclass(slots=True)
class Pause:
    """Waits."""

    seconds: float


Request = Put | Get | Listing | Delete | Now | Pause
Exchange = Generator[Request, Any, Any]


@dataclass(slots=True)
class _Channel:
    """One process's state of a channel: its last exchange, and the keys that it still has to delete."""

    about: str = ""
    number: int = -1
    passed: float = -math.inf  # by `Order`: process 0 was seen beyond these exchanges
    held: deque[str] = field(default_factory=deque)

    def next(self, about: str) -> int:
        """The number of the next exchange with key `about`."""
        self.number = self.number + 1 if self.about == about else 0
        self.about = about
        return self.number


class Meetings:
    """The exchanges of one process, by channel. A channel belongs to one thread at a time."""

    def __init__(self, prefix: str, process: int, count: int):
        self._prefix = prefix
        self._process = process
        self._count = count
        self._channels: dict[str, _Channel] = {}
        self._told: dict[str, _Channel] = {}

    def agree(
        self,
        channel: str,
        value: Any,
        decide: Decide,
        *,
        timeout_s: float,
        about: str = "",
        is_veto: Callable[[Any], bool] | None = None,
        order: Order | None = None,
    ) -> Exchange:
        """See `Coordinator.agree`."""
        state = self._channels.setdefault(channel, _Channel())
        meeting = self._place(channel, about, state.next(about))
        until_s = (yield Now()) + timeout_s
        if self._process == 0:
            if order is not None:
                yield from _quietly(Put(self._head(channel), about), 0.0)
            return (yield from self._preside(state, channel, meeting, value, decide, until_s, timeout_s, is_veto))
        own = _place_of(meeting, self._process)
        until_s += _VERDICT_SPARE_S
        try:
            yield from _patiently(Put(own, json.dumps(value)), until_s)
            text = yield from self._await(channel, about, f"{meeting}/out", until_s, order)
        except CoordinationError as error:
            yield from self._forget_old(state, own)
            raise CoordinationError(f"{channel}: {error}") from error
        if text is None:
            yield from self._forget_old(state, own)  # kept for now: process 0 may still count it
            raise CoordinationError(f"{channel}: process 0 did not answer within {timeout_s:g} s")
        return _verdict(channel, json.loads(text), timeout_s)

    def recall(self, channel: str, about: str, *, timeout_s: float) -> Exchange:
        """See `Coordinator.recall`."""
        until_s = (yield Now()) + timeout_s
        try:
            text = yield from _patient_get(f"{self._place(channel, about, 0)}/out", until_s)
        except CoordinationError:
            text = None
        if text is None:
            return False, None
        return True, _verdict(channel, json.loads(text), None)

    def veto(self, channel: str, value: Any, decide: Decide, *, about: str, timeout_s: float) -> Exchange:
        """See `Coordinator.veto`."""
        meeting = self._place(channel, about, self._channels.setdefault(channel, _Channel()).next(about))
        until_s = (yield Now()) + timeout_s
        if self._process != 0:
            own = _place_of(meeting, self._process)
            yield from _patiently(Put(own, json.dumps(value)), until_s)
            yield from self._forget_old(self._channels[channel], own)
            return
        values = [value] + [None] * (self._count - 1)
        with suppress(CheckpointError):
            yield from _publish(f"{meeting}/out", lambda: decide(values), until_s)
        yield from self._forget_old(self._channels[channel], f"{meeting}/")

    def ask(
        self,
        channel: str,
        decide: Callable[[], Any],
        *,
        timeout_s: float,
        about: str = "",
        order: Order | None = None,
    ) -> Exchange:
        """See `Coordinator.ask_process_0`."""
        state = self._told.setdefault(channel, _Channel())
        key = self._place(f"{channel}/told", about, state.next(about))
        until_s = (yield Now()) + timeout_s
        if self._process != 0:
            text = yield from self._await(channel, about, key, until_s, order)
            if text is None:
                raise CoordinationError(f"{channel}: process 0 did not answer within {timeout_s:g} s")
            return _verdict(channel, json.loads(text), timeout_s)
        if order is not None:
            yield from _quietly(Put(self._head(channel), about), 0.0)
        state.held.append(key)
        if len(state.held) > _TOLD_KEPT:  # no process lags that many steps of training behind process 0
            yield from _quietly(Delete(state.held.popleft()))
        return (yield from _publish(key, decide, until_s))

    def _await(self, channel: str, about: str, key: str, until_s: float, order: Order | None) -> Exchange:
        """Waits for what process 0 publishes about `about`; None after the deadline.

        Raises `CoordinationError` once process 0 is seen at a later exchange of the channel: it will not come back.
        """
        if order is None:
            return (yield from _patient_get(key, until_s))
        state, slice_s, own = self._told.setdefault(channel, _Channel()), _LOOK_S / 2, order(about)
        slice_max_s = min(_SLICE_MAX_S, max(slice_s, (until_s - (yield Now())) / _SLICES_MIN))
        while True:
            passed = state.passed > own
            now_s = yield Now()
            text = yield from _short_get(key, now_s if passed else min(until_s, now_s + slice_s))
            if text is not None:
                return text
            if passed:
                raise CoordinationError(
                    f"{channel}: process 0 has left this exchange; this process was late, or did not make the call"
                )
            if now_s >= until_s:
                return None
            head = yield from _short_get(self._head(channel), now_s)
            if head is not None:  # one that this process does not know is later than this exchange; more is not known
                state.passed = max(state.passed, order(head) if order(head) < math.inf else own + 0.5)
            slice_s = min(2 * slice_s, slice_max_s)

    def _head(self, channel: str) -> str:
        return f"{self._prefix}/{channel}/head"

    def _place(self, channel: str, about: str, number: int) -> str:
        return "/".join([self._prefix, channel, *([about] if about else []), str(number)])

    def _preside(
        self,
        state: _Channel,
        channel: str,
        meeting: str,
        value: Any,
        decide: Decide,
        until_s: float,
        timeout_s: float,
        is_veto: Callable[[Any], bool] | None,
    ) -> Exchange:
        heard: dict[int, Any] = {0: value}
        if is_veto is None or not is_veto(value):
            heard |= yield from self._gathered(meeting, until_s, is_veto)
        if state.held:
            yield from _quietly(Delete(f"{state.held[-1]}in/"))  # the verdict stays for those who are late
        yield from self._forget_old(state, f"{meeting}/")
        missing = [process for process in range(self._count) if process not in heard]
        vetoed = is_veto is not None and any(map(is_veto, heard.values()))
        spare_s = (yield Now()) + _VERDICT_SPARE_S
        if missing and not vetoed:
            error = _missing(channel, missing, timeout_s)
            yield from _quietly(Put(f"{meeting}/out", json.dumps({"missing": missing})), spare_s)
            raise error
        values = [heard.get(process) for process in range(self._count)]
        return (yield from _publish(f"{meeting}/out", lambda: decide(values), max(until_s, spare_s)))

    def _gathered(self, meeting: str, until_s: float, is_veto: Callable[[Any], bool] | None) -> Exchange:
        """The values that came in time; until the first veto. Of many that come at once, many are read at once."""
        heard: dict[int, Any] = {}
        for first in range(0, self._count, _LISTED):
            missing = [each for each in range(first, min(first + _LISTED, self._count)) if each != 0]
            in_time = True
            while missing:
                listing = Listing(f"{meeting}/in/{first // _LISTED}/")
                for key, text in (yield from _patiently(listing, until_s)) or []:
                    heard[int(key.rpartition("/")[2])] = json.loads(text)
                if is_veto is not None and any(map(is_veto, heard.values())):
                    return heard
                missing = [process for process in missing if process not in heard]
                if not missing or not in_time:
                    break
                in_time = yield from self._one_came(meeting, missing, until_s, is_veto is not None)
            for process in missing[:_ONE_BY_ONE]:  # a last look: an answer of the service may be older than the value
                text = yield from _patient_get(_place_of(meeting, process), until_s)
                if text is not None:
                    heard[process] = json.loads(text)
        return heard

    def _one_came(self, meeting: str, missing: Sequence[int], until_s: float, looks: bool) -> Exchange:
        """Waits for the first that is missing, for a while only where a veto may come; False where time is up."""
        now_s = yield Now()
        if now_s >= until_s:
            return False
        wait_s = min(now_s + _LOOK_S, until_s) if looks and len(missing) > 1 else until_s
        text = yield from _patient_get(_place_of(meeting, missing[0]), wait_s)
        return text is not None or wait_s < until_s

    def _forget_old(self, state: _Channel, place: str) -> Exchange:
        """Deletes the keys of exchanges that no process can need any more, `place` later."""
        state.held.append(place)
        while len(state.held) > _MEETINGS_KEPT:
            yield from _quietly(Delete(state.held.popleft()))


def _publish(key: str, decide: Callable[[], Any], until_s: float) -> Exchange:
    """On process 0: decides, and publishes it. The decision holds even if it could not be published."""
    try:
        text = json.dumps({"verdict": decide()})
    except Exception as error:
        yield from _quietly(Put(key, json.dumps({"failed": [type(error).__name__, str(error)]})), until_s)
        raise
    yield from _quietly(Put(key, text), until_s)
    return json.loads(text)["verdict"]


def _verdict(channel: str, told: dict[str, Any], timeout_s: float | None) -> Any:
    if "missing" in told:
        raise _missing(channel, told["missing"], timeout_s)
    if "failed" in told:
        raise heard_from(0, *told["failed"])
    return told["verdict"]


def _patiently(request: Request, until_s: float) -> Exchange:
    """Sends a request again while the service fails, until the deadline, up to which a `Get` waits. Raises the last
    `CoordinationError`."""
    pause_s, longest_s = _RETRY_S
    while True:
        if isinstance(request, Get):
            request = Get(request.key, max(0.0, until_s - (yield Now())))
        try:
            return (yield request)
        except CoordinationError:
            if (yield Now()) + pause_s > until_s:
                raise
            yield Pause(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _patient_get(key: str, until_s: float) -> Exchange:
    """Waits for a key until the deadline, over failures of the service; None where it is not there in time."""
    return _patiently(Get(key, 0.0), until_s)


def _short_get(key: str, until_s: float) -> Exchange:
    """A look at a key in a longer wait: None also where the service fails."""
    try:
        return (yield from _patient_get(key, until_s))
    except CoordinationError:
        yield Pause(_RETRY_S[0])
        return None


def _quietly(request: Request, until_s: float = 0.0) -> Exchange:
    """A request whose failure changes nothing."""
    try:
        yield from _patiently(request, until_s)
    except CoordinationError:
        return


def _place_of(meeting: str, process: int) -> str:
    """Where a process puts its value."""
    return f"{meeting}/in/{process // _LISTED}/{process}"


def _missing(channel: str, missing: Sequence[int], timeout_s: float | None) -> CoordinationError:
    within = f" within {timeout_s:g} s" if timeout_s is not None else " in time"
    return CoordinationError(
        f"{channel}: process {first_of(missing, 20)} did not join{within}; find out why it stopped"
    )
