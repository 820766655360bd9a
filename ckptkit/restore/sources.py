"""How far a restore has to reach for the boxes of one save: this host, then other processes, then the durable tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError
from ckptkit.events import EventLog, Kind
from ckptkit.model.manifest import Manifest
from ckptkit.model.tiers import DURABLE, PEER
from ckptkit.model.verify_mode import VerifySelection
from ckptkit.peers.client import PeerClient
from ckptkit.restore.inventory import ShareHolders, in_batches, in_order_of_use
from ckptkit.restore.local_tiers import Holdings, together
from ckptkit.restore.plan import Candidate, Source

_TRIED_MAX = 3  # holders of one share


@final
class SourceSearch:
    """The sources of one candidate, more of them each time that those so far were not enough.

    `holders`: how many processes wrote the save, and who can give each share (none where there is no `client`).
    `ahead` reads the durable step, and has looked into it. `alike` says from manifests which processes want most of
    what this one wants: their shares are looked into first.
    """

    def __init__(
        self,
        candidate: Candidate,
        own: Holdings,
        holders: tuple[int, ShareHolders],
        client: PeerClient | None,
        durable: DurableSteps,
        events: EventLog,
        *,
        proves: VerifySelection,
        ahead: DurableReader | None = None,
        process: tuple[int, int],  # this one's index, of how many
        alike: Callable[[Sequence[Manifest]], Sequence[int]],
    ):
        self._candidate = candidate
        self._own = own
        self._count, self._holders = holders
        self._client = client
        self._durable = durable
        self._events = events
        self._proves = proves
        self._ahead = ahead
        self._process = process
        self._alike = alike
        self.holdings = self._widening()  # that cover more and more; raises where the durable tier cannot be read
        self.stock = False  # the step is stock Orbax's, and nothing else is known of it
        self.unreachable: PeerUnreachableError | None = None
        self.damaged = False  # what was covered did not prove whole

    def proving_all(self, own: Holdings) -> SourceSearch:
        """The same from the start, with a proof of every cell; `own` are this host's sources, read so."""
        return SourceSearch(
            self._candidate,
            own,
            (self._count, self._holders),
            self._client,
            self._durable,
            self._events,
            proves=VerifySelection(),
            process=self._process,
            alike=self._alike,
        )

    def _widening(self) -> Iterator[Holdings]:
        fast = self._own
        if fast.manifests:
            yield fast
        for fast in self._with_peers():
            yield fast
            if self.damaged and self._candidate.durable:
                break
        if self._candidate.durable:
            yield from self._with_durable(fast)

    def _with_peers(self) -> Iterator[Holdings]:
        given: dict[int, tuple[Manifest, list[tuple[Source, Any]]]] = {}
        asked: set[int] = set()
        alike: Sequence[int] = ()
        for batch_size in map(len, list(in_batches(self._in_order(())))):
            if given and not alike:
                alike = self._alike([manifest for manifest, _ in given.values()])
            batch = [share for share in self._in_order(alike) if share not in asked][:batch_size]
            asked.update(batch)
            given |= {share: found for share in batch if (found := self._ask(share)) is not None}
            if given:
                yield self._joined([pair for _, pairs in given.values() for pair in pairs])

    def _in_order(self, alike: Sequence[int]) -> list[int]:
        """The shares that others hold: what this host lacks, then copies of what it has; what is damaged here first."""
        held, (index, of) = {manifest.writer.process for manifest in self._own.manifests}, self._process
        missing = [share for share in self._holders if share not in held]
        copies = [share for share in self._holders if share in held and set(self._holders[share]) - {index}]
        halves = (copies, missing) if self.damaged else (missing, copies)
        return [
            share
            for half in halves
            for share in in_order_of_use(half, mine=index, of=of, count=self._count, alike=alike)
        ]

    def _ask(self, share: int) -> tuple[Manifest, list[tuple[Source, Any]]] | None:
        """The share of as many holders as answer, up to a few: the next one is asked for what one has damaged."""
        assert self._client is not None
        found: list[tuple[Source, Any]] = []
        manifest = None
        index = self._process[0]
        others = [holder for holder in self._holders[share] if holder != index and self._client.serves(holder)]
        for holder in others[:_TRIED_MAX]:
            try:
                manifest, tag = self._client.manifest(holder, self._candidate.save_id, share)
            except PeerUnreachableError as error:
                self.unreachable = error
                self._reject(error)
                continue
            except CorruptCheckpointError as error:
                self._reject(error)
                continue
            reader = self._client.reader(holder, self._candidate.save_id, share, tag, self._proves)
            found.append((Source(tier=PEER, manifests=(manifest,), remote=True), reader))
        return None if manifest is None else (manifest, found)

    def _joined(self, peers: Sequence[tuple[Source, Any]]) -> Holdings:
        """This host's sources, then peers and this host together: a box may lie in parts of several."""
        own = list(zip(self._own.sources, self._own.readers, strict=True))
        both = together([*peers, *own], PEER, self._proves, remote=True)
        return Holdings(sources=(*self._own.sources, both[0]), readers=(*self._own.readers, both[1]))

    def _with_durable(self, fast: Holdings) -> Iterator[Holdings]:
        save_id = self._candidate.save_id
        reader = self._ahead or self._durable.reader(save_id.step, self._proves)
        durable = tuple(reader.manifests(to_read=True))
        if save_id.ours and {manifest.save_id for manifest in durable} - {save_id}:
            raise CorruptCheckpointError(
                f"step {save_id.step} in {self._durable.url} is no longer save {save_id}", step=save_id.step
            )
        self.stock = not durable and not fast.manifests
        if not self.stock:
            yield Holdings(
                sources=(*fast.sources, Source(tier=DURABLE, manifests=durable, remote=reader.round_trips)),
                readers=(*fast.readers, reader.read),
                expect=reader.expect,
            )

    def _reject(self, error: Exception) -> None:
        self._events.emit(Kind.REJECTED, step=self._candidate.save_id.step, tier=PEER, reason=str(error))
