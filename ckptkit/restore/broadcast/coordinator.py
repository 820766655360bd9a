"""Data replicas read the durable tier for each other: the exchanges, and the rounds of reading and sending.

Every process joins every exchange, even after an error. A collective begins only when all have reported that their part
of it is read, verified and on their devices. After an error before that, all continue to read for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import jax
import numpy as np

from ckptkit.errors import PeerUnreachableError
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.job.vote import REJECTING, RejectedError, voted
from ckptkit.model.policies import BroadcastOptions
from ckptkit.restore.assembly import Assembly
from ckptkit.restore.broadcast.collective import AllGather, links_of
from ckptkit.restore.broadcast.offer import NothingToShareError, Offer, first_problem, judge, needs_of, offer_of
from ckptkit.restore.broadcast.schedule import Common, Groups, Stream, by_groups, share_out
from ckptkit.restore.broadcast.stream import DIGEST_BYTES, Sending, StreamReader
from ckptkit.restore.caller_thread import CallerThread, all_come
from ckptkit.restore.execute import LocalRead, Shared
from ckptkit.restore.plan import Key
from ckptkit.restore.prepare import Prepared

REPLICA = "replica"  # where bytes came from that another process has read
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastChoice:
    """Whether replicas share what they read, and why, for events and logs."""

    broadcast: bool
    why: str


@final
class Broadcaster:
    """Shares the boxes that several replicas want; called by all processes together.

    On the thread that launches collectives; or on another one, with a `CallerThread` that lends that thread.
    `is_remote`: whether the durable tier is read over a network (`Properties.round_trips`).
    """

    def __init__(self, options: BroadcastOptions, reading: LocalRead, job: Job, *, is_remote: bool):
        self._options = options
        self._is_remote = is_remote
        self._reading = reading
        self._coordinator, self._events = job.coordinator, job.events

    def share(
        self, prepared: Prepared | None, caller: CallerThread | None = None
    ) -> tuple[Shared | None, BroadcastChoice]:
        """The parts of a planned save that the replicas have read for each other, and the reason for sharing or not.

        If it is None, or less than everything, the caller reads the rest for itself. An error that is fatal on one
        process is raised on every process.
        """
        coordinator, mode = self._coordinator, self._options.mode
        if coordinator.count == 1 or mode == "never":
            why = "one process" if coordinator.count == 1 else "mode 'never'"
            return None, BroadcastChoice(broadcast=False, why=why)
        offer = _attempt(lambda: self._offer(prepared, caller))
        said = offer if isinstance(offer, str) else offer.to_json()
        verdict = self._agree("broadcast-offer", said, lambda values: judge(values, mode))
        if not verdict["go"]:
            return None, BroadcastChoice(broadcast=False, why=verdict["why"])
        assert isinstance(offer, Offer)
        assert prepared is not None
        shared, needs = _begin(prepared, offer, verdict["needs"])
        for groups, leaves in by_groups([leaf for leaf in offer.leaves if leaf.key in shared.assembly]).items():
            if (problem := self._share_group(groups, leaves, needs, shared, caller, prepared)) is not None:
                return shared, BroadcastChoice(broadcast=False, why=problem)
        return shared, BroadcastChoice(broadcast=True, why=verdict["why"])

    def _offer(self, prepared: Prepared | None, caller: CallerThread | None) -> Offer:
        """The offer of this process. With `auto` it has none in the background: a reader that waits for `result` would
        read no more than `host_bytes` meanwhile, and one that reads for itself everything."""
        if self._options.mode == "auto" and caller is not None:
            raise NothingToShareError("mode 'auto' shares nothing in the background")
        if self._options.mode == "auto" and not self._is_remote:
            raise NothingToShareError("mode 'auto' shares only what is read over a network")
        return offer_of(prepared, self._coordinator.count)

    def _share_group(
        self,
        groups: Groups,
        leaves: Sequence[Common],
        needs: Mapping[Key, Sequence[bool]],
        shared: Shared,
        caller: CallerThread | None,
        prepared: Prepared,
    ) -> str | None:
        """Runs the rounds of one set of groups, until one fails; then returns the reason."""
        coordinator = self._coordinator
        group = next(group for group in groups if coordinator.process in group)
        streams = _attempt(lambda: share_out(leaves, group, lambda key, process: needs[key][process]))
        said = [streams, 0]
        if not isinstance(streams, str):
            said = [None, max(sum(piece.nbytes for piece in pieces) for pieces in streams.values())]
        problem, longest = self._agree("broadcast-longest", said, _longest)
        if isinstance(streams, str) or problem is not None:
            return problem
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
        reader = StreamReader(sending, prepared, rejected, shared.assembly, ahead)
        try:
            return self._run(groups, width, links, sending, reader, shared, caller)
        finally:
            if caller is not None:
                caller.release()
            reader.close()
            shared.read_bytes.update(reader.read_bytes)
            shared.announced |= reader.announced

    def _run(
        self,
        groups: Groups,
        width: int,
        links: Sequence[Sequence[Any]],
        sending: Sending,
        reader: StreamReader,
        shared: Shared,
        caller: CallerThread | None,
    ) -> str | None:
        gather: AllGather | None = None
        sent: jax.Array | None = None
        windows = [np.zeros(width, np.uint8) for _ in range(2)]

        for number in range(sending.rounds):
            # A process that reads alone can use more sources.
            rejecting = (*REJECTING, PeerUnreachableError)
            try:
                with voted(self._coordinator, "broadcast-read", rejecting=rejecting):
                    if shared.failure is not None:
                        raise shared.failure
                    reader.fill(number, windows[number % 2])
                    sent = gather.put(windows[number % 2]) if gather is not None else None
            except RejectedError as rejected:
                return f"gave way to reading alone: {rejected}"
            if gather is None:
                if (problem := self._missing(caller)) is not None:
                    return problem
                made = self._connected(groups, width, links, windows[0], caller)
                if isinstance(made, str):
                    return made
                gather, sent = made
            assert sent is not None
            with self._events.span("broadcast"):
                self._receive(number, partial(gather, sent), sending, shared, caller)
        return None

    def _receive(
        self, number: int, gather: Callable[[], Any], sending: Sending, shared: Shared, caller: CallerThread | None
    ) -> None:
        """One round. An error on this process alone is reported in the next vote, which the others join too."""
        try:
            came_bytes = sending.unpack(number, _launch(caller, gather), shared.assembly, self._damaged)
        except Exception as error:  # noqa: BLE001  raised in the next vote
            shared.failure = error
        else:
            shared.read_bytes[REPLICA] += came_bytes

    def _missing(self, caller: CallerThread | None) -> str | None:
        """Why the thread that launches collectives is missing on some process; None if it is available on all."""
        if caller is None:
            return None
        caller.is_all_that_is_missing = True
        problem = all_come(caller, self._coordinator)
        caller.is_all_that_is_missing = False
        return problem

    def _connected(
        self,
        groups: Groups,
        width: int,
        links: Sequence[Sequence[Any]],
        window: np.ndarray,
        caller: CallerThread | None,
    ) -> tuple[AllGather, jax.Array] | str:
        """The compiled collective and what is to be sent first, once all processes have both; else why not."""

        def connect() -> tuple[AllGather, jax.Array]:
            gather = AllGather(groups, width, links, self._coordinator.process)
            return gather, gather.put(window).block_until_ready()

        made = _attempt(lambda: _launch(caller, connect))
        problem = self._agree("broadcast-connected", made if isinstance(made, str) else None, first_problem)
        if problem is None and not isinstance(made, str):
            return made
        return f"no collective: {problem}"

    def _damaged(self, process: int) -> None:
        reason = f"what process {process} sent has another digest here: this part is read from its source"
        self._events.emit(Kind.REJECTED, tier=REPLICA, reason=reason)

    def _agree(self, channel: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        return self._coordinator.agree(channel, value, decide)


def _begin(prepared: Prepared, offer: Offer, said: Sequence[bool | str]) -> tuple[Shared, Mapping[Key, Sequence[bool]]]:
    """An empty assembly of the leaves that any process needs from the durable tier, and which process needs which."""
    by_process = [needs_of(each, len(offer.leaves)) for each in said]
    needs = {leaf.key: [bits[index] for bits in by_process] for index, leaf in enumerate(offer.leaves)}
    kept = {leaf.key for leaves in by_groups(offer.leaves).values() for leaf in leaves if any(needs[leaf.key])}
    targets = {target.key: target for target in prepared.targets if target.key in kept}
    cells = {leaf.key: leaf.cell for leaf in offer.leaves}
    return Shared(assembly=Assembly(targets, cells)), needs


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
