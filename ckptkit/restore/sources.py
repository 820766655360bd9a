"""How far a restore has to reach for the boxes of one save: this host, then other processes, then the durable tier."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, final

from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError, TreeMismatchError
from ckptkit.events import EventLog, Kind
from ckptkit.model.manifest import Manifest, described_items
from ckptkit.model.tiers import DURABLE, PEER
from ckptkit.peers.client import PeerClient
from ckptkit.restore.inventory import ShareHolders, in_batches, in_order_of_use
from ckptkit.restore.local_tiers import Holdings, together
from ckptkit.restore.plan import Candidate, Source

_T = TypeVar("_T")
_TRIED_MAX = 3  # holders of one share

Why = Literal["uncovered", "damaged"]  # a wanted box has no source yet; or it is damaged in all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerShares:
    """The shares of one save that the processes hold, as this process reads them from the others.

    `alike` returns, from manifests, the processes that want most of what this one wants: their shares are read first.
    """

    client: PeerClient
    process: tuple[int, int]  # this one's index, of how many
    count: int  # processes that wrote the save
    holders: ShareHolders
    alike: Callable[[Sequence[Manifest]], Sequence[int]]


@final
class SourceSearch:
    """Finds the sources of one candidate, and further ones each time that those so far are not enough.

    `own` are this host's; `peers` None where other processes' tiers are not read. `open_durable` returns a reader of
    the durable step.
    """

    def __init__(
        self,
        candidate: Candidate,
        own: Holdings,
        peers: PeerShares | None,
        open_durable: Callable[[], DurableReader],
        events: EventLog,
    ):
        self.candidate = candidate
        self._own = own
        self._peers = peers
        self._open_durable = open_durable
        self._events = events
        # Not of `self`: a generator that keeps it makes a cycle, and slots stay open until the collector runs.
        self._widening = SourceSearch._widen(weakref.proxy(self))
        self._damaged = False  # from then on, sources of what is damaged come first
        self._unreachable: PeerUnreachableError | None = None

    def planned(self, plan: Callable[[Holdings], _T], why: Why = "uncovered") -> _T | None:
        """The result of `plan` for the next sufficient sources; None if stock Orbax restores the step.

        The earlier ones were not enough because of `why`. Reads nothing but manifests. `plan` raises
        `CorruptCheckpointError` or ValueError if the sources are not enough. `TreeMismatchError` is raised at once, and
        so is a `CorruptCheckpointError` or `StoreError` of the durable step's manifests. The durable tier is read only
        for the parts that the fast ones do not cover, or hold damaged. Unreachable is not absent:
        `PeerUnreachableError` is raised if the unreachable process may hold a missing part.
        """
        self._damaged |= why == "damaged"
        failed: Exception | None = None
        try:
            for found in self._widening:
                if found is None:
                    return None
                try:
                    return plan(found)
                except TreeMismatchError:
                    raise
                except (CorruptCheckpointError, ValueError) as error:
                    failed = error
            save_id = self.candidate.save_id
            raise (
                self._unreachable
                or failed
                or CorruptCheckpointError(f"the slots of save {save_id} are missing or damaged", step=save_id.step)
            )
        finally:
            failed = None  # its traceback holds this frame, and those below it what they have restored

    def require_all_items(self) -> None:
        """Raises `CorruptCheckpointError` where a durable step has lost an item that was saved."""
        if self.candidate.durable:
            self._open_durable().require_all_items()

    def _widen(self) -> Iterator[Holdings | None]:
        """Sources that cover more each time; None for a step of stock Orbax, of which nothing else is known."""
        fast = self._own
        if fast.manifests:
            yield fast
        for fast in self._with_peers(self._peers) if self._peers is not None else ():
            yield fast
            if self._damaged and self.candidate.durable:
                break
        if self.candidate.durable:
            yield self._with_durable(fast)

    def _with_peers(self, peers: PeerShares) -> Iterator[Holdings]:
        given: dict[int, tuple[Manifest, list[tuple[Source, Any]]]] = {}
        asked: set[int] = set()
        alike: Sequence[int] = ()
        for batch_size in map(len, list(in_batches(self._in_order(peers, ())))):
            if given and not alike:
                alike = peers.alike([manifest for manifest, _ in given.values()])
            batch = [share for share in self._in_order(peers, alike) if share not in asked][:batch_size]
            asked.update(batch)
            given |= {share: found for share in batch if (found := self._ask(peers, share)) is not None}
            if given:
                yield self._joined([pair for _, pairs in given.values() for pair in pairs])

    def _in_order(self, peers: PeerShares, alike: Sequence[int]) -> list[int]:
        """The shares that others hold: what this host lacks, then copies of what it has; what is damaged here first."""
        held, holders = {manifest.writer.process for manifest in self._own.manifests}, peers.holders
        index, of = peers.process
        missing = [share for share in holders if share not in held]
        copies = [share for share in holders if share in held and set(holders[share]) - {index}]
        halves = (copies, missing) if self._damaged else (missing, copies)
        return [
            share
            for half in halves
            for share in in_order_of_use(half, mine=index, of=of, count=peers.count, alike=alike)
        ]

    def _ask(self, peers: PeerShares, share: int) -> tuple[Manifest, list[tuple[Source, Any]]] | None:
        """The share from each holder that answers, up to a few: a box that is damaged at one is read from the next."""
        found: list[tuple[Source, Any]] = []
        manifest = None
        client, save_id = peers.client, self.candidate.save_id
        others = [each for each in peers.holders[share] if each != peers.process[0] and client.serves(each)]
        for holder in others[:_TRIED_MAX]:
            try:
                manifest, tag = client.manifest(holder, save_id, share)
            except (PeerUnreachableError, CorruptCheckpointError) as error:
                if isinstance(error, PeerUnreachableError):
                    self._unreachable = error
                self._events.emit(Kind.REJECTED, step=save_id.step, tier=PEER, reason=str(error))
                continue
            reader = client.reader(holder, save_id, share, tag)
            found.append((Source(tier=PEER, manifests=(manifest,), remote=True), reader))
        return None if manifest is None else (manifest, found)

    def _joined(self, peers: Sequence[tuple[Source, Any]]) -> Holdings:
        """This host's sources, then peers and this host together: a box may lie in parts of several."""
        own = list(zip(self._own.sources, self._own.readers, strict=True))
        both = together([*peers, *own], PEER, remote=True)
        return Holdings(sources=(*self._own.sources, both[0]), readers=(*self._own.readers, both[1]))

    def _with_durable(self, fast: Holdings) -> Holdings | None:
        save_id = self.candidate.save_id
        reader = self._open_durable()
        durable = tuple(reader.manifests(to_read=True))
        if save_id.ours and {manifest.save_id for manifest in durable} - {save_id}:
            raise CorruptCheckpointError(f"{reader.url} is no longer save {save_id}", step=save_id.step)
        if not save_id.ours:  # of another root: what it is called there counts for nothing here
            durable = tuple(replace(manifest, save_id=save_id) for manifest in durable)
        if not durable and not fast.manifests:
            return None
        return Holdings(
            sources=(*fast.sources, Source(tier=DURABLE, manifests=durable, remote=reader.round_trips)),
            readers=(*fast.readers, reader.read),
            expect=reader.expect,
            unproven=_unproven(reader.without_sidecars, (*fast.manifests, *durable)),
        )


def _unproven(without_sidecars: Sequence[str], manifests: Sequence[Manifest]) -> tuple[str, ...]:
    """The items of a step that no manifest has: trees without jax arrays of an earlier version, and items that Orbax
    wrote."""
    described = described_items(manifests)
    return tuple(name for name in without_sidecars if name not in described)
