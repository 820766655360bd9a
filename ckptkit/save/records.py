"""A save that was taken, and its tiers: the records that the threads of the pipeline hand to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

from ckptkit.durable.lifecycle.epochs import EpochRecords
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CheckpointError
from ckptkit.model.manifest import Manifest, SaveId, Writer
from ckptkit.peers.client import PeerClient
from ckptkit.peers.receiver import CopyReceiver
from ckptkit.save.disk_copy import DiskCopy
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot
from ckptkit.snapshot import describe, staging
from ckptkit.snapshot.items import SaveItems
from ckptkit.snapshot.replicas import LocalReplica
from ckptkit.util.clock import Deadline
from ckptkit.util.notice import Notice, Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a save does not continue. `skip`: it came too early; `report`: a process raised an error for earlier losses;
    `wait`: it waited for its turn in vain; `veto`: a process could not do its part."""

    policy: Literal["skip", "report", "wait", "veto"]
    reason: str


@final
class Loan:
    """The arguments of `save`, lent for the copy until `save` returns or raises. One thread reads, one withdraws."""

    def __init__(self) -> None:
        self.received = False  # the pipeline will vote on the save
        self.withdrawn = False
        self._is_read = False
        self._notice = Notice()

    def withdraw(self) -> None:
        """The caller raises: no reading begins any more. Waits for one that has begun; what it read is dropped, also
        where a second signal ends this wait."""
        self.withdrawn = True
        self._notice.wait_for(lambda: not self._is_read)

    def raise_if_withdrawn(self) -> None:
        """Raises `CheckpointError` after `withdraw`."""
        if self.withdrawn:
            raise CheckpointError("save raised before its copy was complete, so the save is dropped")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While the caller's values are read. Raises `CheckpointError` if they were withdrawn before or meanwhile."""
        self._is_read = True
        try:
            self.raise_if_withdrawn()  # after `_is_read`: a thread that withdraws is seen here, or waits
            yield
            self.raise_if_withdrawn()
        finally:
            self._is_read = False
            self._notice.give()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One call of `save`: the name of its barriers, which is the same on every process, and the identity of the save as
    this process assumes it. Process 0's identity holds (`Branch`)."""

    name: str
    save_id: SaveId
    loan: Loan = field(default_factory=Loan, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save that passes through the tiers. `snapshot` is None where this process had no room for it."""

    ticket: Ticket
    items: SaveItems
    description: describe.Description
    due: frozenset[str]
    forced: bool  # tried in the durable tier also while that is paused; the same on every process
    metrics: Any
    snapshot: Snapshot | None
    staged_s: float  # monotonic, when `save` returned to the step loop

    @property
    def name(self) -> str:
        """The name of its barriers."""
        return self.ticket.name

    @property
    def save_id(self) -> SaveId:
        """Its identity."""
        return self.ticket.save_id

    def identified(self, save_id: SaveId) -> Save:
        """The same save, with the identity that process 0 gave it."""
        return replace(self, ticket=replace(self.ticket, save_id=save_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one save in a leased slot, or being copied there."""

    slot: Slot
    staging: staging.Staging
    disk: DiskFlush | None  # None where the disk was busy when the save began, or the tier is not due
    local_replicas: tuple[LocalReplica, ...]  # the local copies that were digested in addition to the stored one


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How a save waited for earlier ones, before it was taken. `in_time`: they were done, or it does not wait."""

    waits: bool  # a local decision: a process that knows of a failure does not wait for the durable tier
    forced: bool  # the same on every process
    was_busy: bool
    in_time: bool
    waited_s: float
    deadline: Deadline  # past, for one that does not wait


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFlush:
    """A copy to the disk tier that began with the save, and what was decided of the save: None to leave it out."""

    copy: DiskCopy
    decided: Promise[tuple[Save, SealedSave] | None] = field(default_factory=Promise)

    def leave_out(self) -> None:
        """Ends the copy without a save, unless the decision was made before."""
        if not self.decided.done():
            self.copy.abandon()
            self.decided.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSave:
    """The common content of one process's manifests of a staged save, for any slot."""

    save_id: SaveId
    writer: Writer
    description: describe.Description
    digests: Mapping[int, describe.Digests]
    inline: Mapping[str, Mapping[str, Any]]
    custom: str | None

    def text_for(self, slot: Slot) -> bytes:
        """The manifest that makes `slot` a committed one."""
        return self.text_for_name(slot.name)

    def text_for_name(self, slot: str) -> bytes:
        """The same for a slot of that name, on any host."""
        digests = (self.digests[number] for number in range(len(self.description.extents)))
        return self.description.text.to_bytes(self.save_id, self.writer, slot, digests, self.inline, custom=self.custom)

    def cell_digests(self) -> dict[tuple[int, int], str]:
        """The digest of each cell, by its byte range in a slot."""
        numbered = ((extent.cells, self.digests[extent.number]) for extent in self.description.extents)
        return {cell: digest for cells, digests in numbered for cell, digest in zip(cells, digests, strict=True)}

    def manifest(self, slot: Slot) -> Manifest:
        """The same content as a `Manifest`, for a tier that has another layout."""
        arrays = describe.with_digests(self.description, self.digests)
        return Manifest(
            save_id=self.save_id,
            writer=self.writer,
            slot=slot.name,
            arrays=arrays,
            inline=self.inline,
            custom=self.custom,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCopies:
    """Which processes keep copies of this one's slots, and the arenas in which it keeps others'."""

    keepers: tuple[int, ...]
    peer_arenas: tuple[Arena, ...]
    receiver: CopyReceiver
    client: PeerClient
    timeout_s: float  # the longest wait for other processes


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTargets:
    """The tiers of saves: the staging arena (a fast tier's, or anonymous memory), other hosts, a slower arena, the
    durable root."""

    staging: Arena
    staging_name: str
    disk: Arena | None
    durable: DurableSteps
    epochs: EpochRecords
    peer_copies: PeerCopies | None = None
