"""A save: one object that gains fields as it advances (`save/flow.py`); and where saves go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, final

from ckptkit.durable.lifecycle.epochs import EpochRecords
from ckptkit.durable.orbax.reports import Spans
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CheckpointError
from ckptkit.model.manifest import Manifest, SaveId, Writer, custom_digest
from ckptkit.peers.client import PeerClient
from ckptkit.peers.receiver import CopyReceiver
from ckptkit.save.disk_copy import DiskCopy
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot
from ckptkit.snapshot import describe, staging
from ckptkit.snapshot.items import SaveItems
from ckptkit.snapshot.replicas import LocalReplica
from ckptkit.util import clock
from ckptkit.util.clock import Deadline
from ckptkit.util.notice import Notice, Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a save does not continue. `skip`: it came too early; `report`: a process raised an error for earlier losses;
    `wait`: it waited for its turn in vain; `veto`: a process could not do its part."""

    policy: Literal["skip", "report", "wait", "veto"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTurn:
    """A save that no other follows: it is for these tiers alone, and waits for earlier ones until `deadline`. `again`:
    the step was saved before, to other tiers."""

    tiers: frozenset[str]
    deadline: Deadline
    again: bool = False


class Arguments(Protocol):
    """The arguments of one call of `save`, as the interface of the manager translates them."""

    def check(self) -> None:
        """Raises the errors of arguments of which nothing can be saved."""
        ...

    def collect(self, save: Save) -> None:
        """Sets `items`, `description` and `by_orbax`, from the values as they are now, and takes away the tiers of
        `due` that cannot hold them. Raises the errors of values that cannot be saved."""
        ...

    def taken(self) -> None:
        """The save is taken."""
        ...

    def begin_by_orbax(self, save_id: SaveId) -> None:
        """Has Orbax begin to write the durable step."""
        ...


@final
@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Save:
    """One call of `save`, and the save that it becomes.

    Each field belongs to the thread that sets it; the threads that the save passes later only read it.
    """

    # Of the call.
    name: str  # of its barriers: the same on every process
    step: int
    arguments: Arguments | None  # None once the step loop continues: they hold the caller's arrays
    force: bool
    metrics: Any = None
    last: LastTurn | None = None
    start_s: float = field(default_factory=clock.monotonic_s)  # when the step loop was stopped

    # Decided, and described.
    due: frozenset[str] = frozenset()  # the tiers that take it
    must_wait: bool = False  # the same on every process: it is tried in a durable tier that is paused, too
    by_orbax: bool = False  # Orbax writes the durable step: a handler is not plain, or the options define a commit
    items: SaveItems = field(init=False)  # not set where Orbax alone can hold them; without trees once they are copied
    description: describe.Description = field(init=False)

    # Its turn after the saves before it.
    waits: bool = False  # a local decision: a process that knows of a failure does not wait for the durable tier
    was_busy: bool = False
    in_time: bool = True  # they were done, or it does not wait
    waiting_s: float = 0.0  # when it began to wait (monotonic)
    waited_s: float = 0.0
    turn_s: float = 0.0  # when it had its turn
    deadline: Deadline = field(default_factory=lambda: Deadline(0.0))  # of its waits; past for one that does not wait

    # Named. As this process assumes it: process 0's identity holds (`Branch`).
    save_id: SaveId = field(init=False)
    returned: Promise[None] = field(default_factory=Promise)  # the caller may donate its arrays
    loan: Loan = field(default_factory=lambda: Loan())
    spans: Spans = field(default_factory=Spans)  # for the entry of Orbax's logger
    is_voted: bool = False  # the threads have it: it is voted on, also where the call raises

    # Staged. `slot` is None where this process has no room for the save, or raised.
    refusal: Refusal | None = None
    slot: Slot | None = None
    staging: staging.Staging = field(init=False)
    local_replicas: tuple[LocalReplica, ...] = ()  # the local copies that are digested in addition to the stored one
    staged_s: float = 0.0  # when `save` returned to the step loop (monotonic)
    disk_copy: DiskCopy | None = None  # None where the disk was busy when the save began, or is not due
    disk_takes_it: Promise[bool] = field(default_factory=Promise)  # as the vote in the first tier decided

    # Sealed.
    writer: Writer = field(init=False)
    identified: bool = False  # by process 0
    digests: Mapping[int, describe.Digests] | None = None
    failure: BaseException | None = None  # of the staging, or of the rest of the copy
    replicas_differ: dict[str, Any] | None = None  # where, as compared before the commit

    # In the slower tiers.
    readers: dict[str, Slot] = field(default_factory=dict)  # the tiers that still read the slot
    disk_slot: Slot | None = None
    durable_tries: int = 0

    def lease(self, reader: str, arena: Arena) -> None:
        """The slot, which is one of `arena`, stays as it is until `let_go`."""
        assert self.slot is not None
        arena.lease(self.slot)
        self.readers[reader] = self.slot

    def let_go(self, reader: str, arena: Arena) -> None:
        """The slot is not read any more, as far as it was."""
        if (slot := self.readers.pop(reader, None)) is not None:
            arena.release(slot)

    def forget_arrays(self) -> None:
        """Forgets the caller's arrays. A reference in the background would keep device memory in use."""
        self.arguments = None
        held = {} if self.slot is not None else {"inline": {}, "durable": {}}
        self.items = replace(self.items, trees={}, **held)

    def manifest_text(self, slot: str) -> bytes:
        """The manifest that makes a slot of this name a committed one, in any tier and on any host."""
        assert self.digests is not None
        digests = (self.digests[number] for number in range(len(self.description.extents)))
        custom = custom_digest(self.items.custom_metadata)
        return self.description.text.to_bytes(
            self.save_id, self.writer, slot, digests, self.items.inline, custom=custom
        )

    def manifest(self, slot: Slot) -> Manifest:
        """The same content as a `Manifest`, for a tier that has another layout."""
        assert self.digests is not None
        return Manifest(
            save_id=self.save_id,
            writer=self.writer,
            slot=slot.name,
            arrays=describe.with_digests(self.description, self.digests),
            inline=self.items.inline,
            custom=custom_digest(self.items.custom_metadata),
        )

    def cell_digests(self) -> dict[tuple[int, int], str]:
        """The digest of each cell, by its byte range in a slot."""
        assert self.digests is not None
        numbered = ((extent.cells, self.digests[extent.number]) for extent in self.description.extents)
        return {cell: digest for cells, digests in numbered for cell, digest in zip(cells, digests, strict=True)}


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
    repair: str = ""  # the command that repairs steps of the root
