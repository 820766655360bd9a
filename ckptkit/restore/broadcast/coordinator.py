"""Data replicas read the durable tier for each other: the exchanges, and the rounds of reading and sending.

Every process joins every exchange, even after an error. A collective begins only when all have reported that their part
of it is read, verified and on their devices. After an error before that, all continue to read for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, final

import jax
import numpy as np

from ckptkit.errors import PeerUnreachableError
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.job.vote import REJECTING, act_together
from ckptkit.model.policies import BroadcastOptions
from ckptkit.restore.assembly import Assembly
from ckptkit.restore.broadcast.collective import AllGather, links_of
from ckptkit.restore.broadcast.cost_model import BroadcastChoice, BroadcastRates, Remaining, choose
from ckptkit.restore.broadcast.offer import NothingToShareError, Offer, first_problem, judge, needs_of, offer_of
from ckptkit.restore.broadcast.schedule import Common, Groups, Stream, by_groups, share_out
from ckptkit.restore.broadcast.stream import DIGEST_BYTES, Sending, StreamReader
from ckptkit.restore.caller_thread import CallerThread, all_come
from ckptkit.restore.execute import LocalRead, Shared
from ckptkit.restore.plan import Key
from ckptkit.restore.prepare import Prepared
from ckptkit.util import clock

REPLICA = "replica"  # where bytes came from that another process has read
_JUDGED_AT = (0, 3)  # the rounds before which rates are judged; the first connects, so the interconnect's by two others
_T = TypeVar("_T")


@dataclass(slots=True)
class _State:
    """The state of one restore."""

    shared: Shared
    choice: BroadcastChoice
    caller: CallerThread | None = None
    rates: BroadcastRates = field(default_factory=BroadcastRates)
    round_s: float = math.inf  # of its rounds of this width, the shortest
    meeting_s: float = 0.0  # the time of an exchange if all join at once


@final
class Broadcaster:
    """Shares what replicas want alike; called by all processes together.

    On the thread that launches collectives; or on another one, with a `CallerThread` that lends that thread.
    """

    def __init__(self, options: BroadcastOptions, reading: LocalRead, job: Job):
        self._options = options
        self._reading = reading
        self._coordinator, self._events = job.coordinator, job.events
        self._interconnect: float | None = None  # as the last restore measured it

    def share(
        self, prepared: Prepared | None, caller: CallerThread | None = None
    ) -> tuple[Shared | None, BroadcastChoice]:
        """The parts of a planned save that the replicas have read for each other, and the reason for sharing or not.

        None, or less than everything: the caller reads the rest for itself. Raises what is fatal anywhere, on every
        process alike.
        """
        coordinator, mode = self._coordinator, self._options.mode
        if coordinator.count == 1 or mode == "never":
            why = "one process" if coordinator.count == 1 else "mode 'never'"
            return None, BroadcastChoice(broadcast=False, why=why)
        offer = _attempt(lambda: offer_of(prepared, coordinator.count))
        said = offer if isinstance(offer, str) else offer.to_json()
        verdict = self._agree("broadcast-offer", said, lambda values: judge(values, self._options))
        if not verdict["go"]:
            return None, BroadcastChoice(broadcast=False, why=verdict["why"])
        assert isinstance(offer, Offer)
        assert prepared is not None
        state, needs = self._begin(prepared, offer, verdict["needs"])
        state.caller = caller
        state.choice = BroadcastChoice(broadcast=True, why=verdict["why"])
        for groups, leaves in by_groups([leaf for leaf in offer.leaves if leaf.key in state.shared.assembly]).items():
            self._share_group(groups, leaves, needs, state, prepared)
            if not state.choice.broadcast:
                break
        return state.shared, state.choice

    def _begin(
        self, prepared: Prepared, offer: Offer, said: Sequence[bool | str]
    ) -> tuple[_State, Mapping[Key, Sequence[bool]]]:
        """An empty assembly of the leaves that anybody needs from the durable tier, and who needs which."""
        by_process = [needs_of(each, len(offer.leaves)) for each in said]
        needs = {leaf.key: [bits[index] for bits in by_process] for index, leaf in enumerate(offer.leaves)}
        kept = {leaf.key for leaves in by_groups(offer.leaves).values() for leaf in leaves if any(needs[leaf.key])}
        targets = {target.key: target for target in prepared.targets if target.key in kept}
        cells = {leaf.key: leaf.cell for leaf in offer.leaves}
        shared = Shared(assembly=Assembly(targets, cells), read_bytes={}, announced=frozenset())
        choice = BroadcastChoice(broadcast=True, why="")
        return _State(shared=shared, choice=choice, rates=BroadcastRates(interconnect=self._interconnect)), needs

    def _share_group(
        self,
        groups: Groups,
        leaves: Sequence[Common],
        needs: Mapping[Key, Sequence[bool]],
        state: _State,
        prepared: Prepared,
    ) -> None:
        """All rounds of one set of groups, or as many as are worth it and go well."""
        state.round_s = math.inf
        coordinator = self._coordinator
        group = next(group for group in groups if coordinator.process in group)
        streams = _attempt(lambda: share_out(leaves, group, lambda key, process: needs[key][process]))
        said = [streams, 0]
        if not isinstance(streams, str):
            said = [None, max(sum(piece.nbytes for piece in pieces) for pieces in streams.values())]
        problem, longest = self._agree("broadcast-longest", said, _longest)
        if isinstance(streams, str) or problem is not None:
            state.choice = BroadcastChoice(broadcast=False, why=problem)
            return
        links = links_of(coordinator.count)
        width = self._options.width(longest, len(group), len(links[0]))
        payload = width - DIGEST_BYTES
        sending = Sending(
            group=group,
            streams={process: Stream(pieces, payload) for process, pieces in streams.items()},
            rounds=-(-longest // payload),
            process=coordinator.process,
        )
        rejected = self._reading.rejected(prepared.plan.save_id)
        ahead = self._options.ahead(width, len(group))
        reader = StreamReader(sending, prepared, rejected, state.shared.assembly, ahead)
        try:
            self._run(groups, width, links, sending, reader, state)
        finally:
            if state.caller is not None:
                state.caller.release()
            reader.close()
            read_bytes = dict(state.shared.read_bytes)
            for tier, size in reader.read_bytes.items():
                read_bytes[tier] = read_bytes.get(tier, 0) + size
            announced = state.shared.announced | reader.announced
            state.shared = replace(state.shared, read_bytes=read_bytes, announced=announced)

    def _run(
        self,
        groups: Groups,
        width: int,
        links: Sequence[Sequence[Any]],
        sending: Sending,
        reader: StreamReader,
        state: _State,
    ) -> None:
        gather: AllGather | None = None
        windows = [np.zeros(width, np.uint8) for _ in range(2)]

        def ready(number: int) -> jax.Array | None:
            if state.shared.failure is not None:
                raise state.shared.failure
            window = windows[number % 2]
            reader.fill(number, window)
            return gather.put(window) if gather is not None else None

        number = -1
        while (number := number + 1) < sending.rounds:  # fewer, once all have read on
            rejection, sent = act_together(
                self._coordinator,
                "broadcast-read",
                lambda at=number: ready(at),
                rejecting=(*REJECTING, PeerUnreachableError),  # who reads alone reaches further than another process
            )
            if rejection is not None:
                state.choice = BroadcastChoice(broadcast=False, why=f"gave way to reading alone: {rejection.text}")
                return
            if number in _JUDGED_AT and not self._goes_on(number, sending, reader, state, width):
                return
            if gather is None:
                if not self._all_here(sending, reader, state, width):
                    return
                gather, sent = self._connected(groups, width, links, windows[0], state)
                if gather is None:
                    return
            began_s = clock.monotonic_s()
            with self._events.span("broadcast"):
                self._receive(number, gather, sent, sending, state)
            if number:
                spent_s = state.meeting_s + clock.monotonic_s() - began_s
                # The best of these rounds: a delayed one tells nothing about the others.
                state.round_s = min(state.round_s, max(spent_s, 1e-9))
                self._interconnect = len(sending.group) * width / state.round_s
                state.rates = replace(state.rates, interconnect=self._interconnect)

    def _receive(self, number: int, gather: AllGather, sent: jax.Array | None, sending: Sending, state: _State) -> None:
        """One round. An error on this process alone is reported in the next vote, which the others join too."""
        shared = state.shared
        assert sent is not None
        try:
            came_bytes = sending.unpack(
                number, _launch(state.caller, partial(gather, sent)), shared.assembly, self._damaged
            )
        except Exception as error:  # noqa: BLE001  raised in the next vote
            state.shared = replace(shared, failure=error)
            return
        counted = {**shared.read_bytes, REPLICA: shared.read_bytes.get(REPLICA, 0) + came_bytes}
        state.shared = replace(shared, read_bytes=counted)

    def _all_here(self, sending: Sending, reader: StreamReader, state: _State, width: int) -> bool:
        """Whether all are there who launch collectives. Until they are, with `auto`, every process goes on to read
        what it wants: a caller that comes late finds it read, as if nothing were shared."""
        if state.caller is None:
            return True
        missing = partial(sending.missing, state.shared.assembly)
        if self._options.mode == "auto":
            reader.read_on()
        else:
            state.caller.is_all_that_is_missing = True
        problem = all_come(state.caller, lambda: bool(missing()), self._coordinator)
        reader.stop()
        state.caller.is_all_that_is_missing = False
        if problem is not None:
            state.choice = BroadcastChoice(broadcast=False, why=problem)
            return False
        sending.rounds = self._agree("broadcast-rounds", sending.leave_out_all_but(missing()), max)
        return self._goes_on(0, sending, reader, state, width)

    def _goes_on(self, number: int, sending: Sending, reader: StreamReader, state: _State, width: int) -> bool:
        """Process 0's decision before round `number`, from the slowest process's rates and the largest remaining
        work."""
        if self._options.mode != "auto":
            return True
        replicas = len(sending.group)
        to_send_bytes = (sending.rounds - number) * replicas * width
        rate = reader.storage_rate

        def slowest(values: list[Any]) -> list[Any]:
            storage = [value[2] for value in values if value[2] is not None]
            interconnect = [value[3] for value in values if value[3] is not None]
            rates = BroadcastRates(
                storage=min(storage, default=None),
                interconnect=min(interconnect) if len(interconnect) == len(values) else None,
            )
            wanted_bytes, unread_bytes = (max(value[index] for value in values) for index in range(2))
            left = Remaining(wanted=wanted_bytes, unread=unread_bytes, sent=to_send_bytes)
            choice = choose("auto", left, replicas, rates)
            return [choice.broadcast, choice.why]

        said = [state.shared.assembly.missing_bytes(), reader.unread_bytes(), rate, state.rates.interconnect]
        began_s = clock.monotonic_s()
        broadcast, why = self._agree("broadcast-rates", said, slowest)
        state.meeting_s = clock.monotonic_s() - began_s
        state.choice = BroadcastChoice(broadcast=broadcast, why=why)
        return broadcast

    def _connected(
        self, groups: Groups, width: int, links: Sequence[Sequence[Any]], window: np.ndarray, state: _State
    ) -> tuple[AllGather | None, jax.Array | None]:
        """The compiled collective and what is to be sent first, once all processes have both; else None."""

        def connect() -> tuple[AllGather, jax.Array]:
            gather = AllGather(groups, width, links, self._coordinator.process)
            return gather, gather.put(window).block_until_ready()

        made = _attempt(lambda: _launch(state.caller, connect))
        problem = self._agree("broadcast-connected", made if isinstance(made, str) else None, first_problem)
        if problem is None and not isinstance(made, str):
            return made
        state.choice = BroadcastChoice(broadcast=False, why=f"no collective: {problem}")
        return None, None

    def _damaged(self, process: int) -> None:
        reason = f"what process {process} sent has another digest here: this part is read from its source"
        self._events.emit(Kind.REJECTED, tier=REPLICA, reason=reason)

    def _agree(self, channel: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        return self._coordinator.agree(channel, value, decide)


def _launch(caller: CallerThread | None, act: Callable[[], _T]) -> _T:
    return act() if caller is None else caller.run(act)


def _longest(values: list[list[Any]]) -> list[Any]:
    return [first_problem([problem for problem, _ in values]), max(size for _, size in values)]


def _attempt(act: Callable[[], _T]) -> _T | str:
    """The result of `act`, or a description of its error: a process that misses the exchange leaves the others
    waiting."""
    try:
        return act()
    except NothingToShareError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  reported in the exchange
        return f"{type(error).__name__}: {error}"
