"""The steps of a running job, one after another, for an evaluator in another process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import Lease
from ckptkit.durable.lifecycle.listing import DurableStep, read_root
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CorruptCheckpointError, TransientStoreError
from ckptkit.events import EventLog, Kind
from ckptkit.job.coordination import make_coordinator
from ckptkit.manager import CheckpointManager
from ckptkit.model.cells import digested_cells
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE
from ckptkit.store import open_store
from ckptkit.store.roots import root_url
from ckptkit.util.clock import Deadline

_STORE_DEADLINE_S = 20.0
_AGREE_S = 24 * 3600.0  # while process 0 verifies a step, the others wait


def follow(
    root: str | os.PathLike[str],
    *,
    after: int | None = None,
    newest_only: bool = False,
    prove: bool = True,
    poll_s: float = 5.0,
    idle_timeout_s: float | None = None,
    lease_s: float = 60.0,
    events: EventLog | None = None,
) -> Iterator[FollowedStep]:
    """Yields each new committed step of the durable root of a running job, oldest first, as it appears.

    It follows the durable root alone, a directory or a bucket: steps that only the job's fast tiers hold are private to
    its hosts, and are reused without asking anybody.

    A yielded step has been read completely and matched its digests (`prove=False`: only its metadata was checked, and
    its `proven` is False; `restore` verifies the bytes). A ckptkit writer does not prune it until the loop asks for the
    next one or ends, or this process dies and its lease expires. Damaged steps and steps of abandoned branches are
    skipped, the former with a `restore_rejected` event. After a rollback of the job the steps of the new branch follow,
    whatever their numbers. Steps of stock Orbax are yielded with `proven=False`; a job that runs stock Orbax ignores
    leases.

    Args:
      root: the durable root; it need not exist yet.
      after: leave out existing steps up to this number at the start (default: none).
      newest_only: if several are new, yield only the newest.
      prove: read every byte before a step is yielded.
      poll_s: seconds between looks at the root. Cost of a look: one listing, small reads for new steps.
      idle_timeout_s: end after this time without a new step (default: never).
      lease_s: how long the writer keeps a step after this process has died.
      events: where to record skipped steps, and restores with the bytes that were read.

    In an evaluator of several processes all iterate together; process 0 looks, and leases.
    Raises `StoreError` for a root that cannot be read (one that cannot be reached is tried again).
    """
    follower = _Follower(root_url(root), after, newest_only, prove, lease_s, events or EventLog())
    return _iterate(follower, poll_s, idle_timeout_s)


@dataclass(slots=True, kw_only=True)
class FollowedStep:
    """A committed step that no writer prunes while it is the current one of its loop."""

    step: int
    save_id: SaveId
    root: str
    proven: bool
    _manager: CheckpointManager = field(repr=False)

    @property
    def manager(self) -> CheckpointManager:
        """Reads the root; closed at the end of the loop."""
        return self._manager

    def restore(self, args: Any = None) -> Any:
        """The result of `CheckpointManager.restore` for `args`, with every byte verified. All processes call it
        together.

        Raises what that raises, and `CorruptCheckpointError` where the job has saved the step anew meanwhile.
        """
        found = self.manager.restore(self.step, args=args)
        if self.manager.restored_save_id != self.save_id:
            raise CorruptCheckpointError(
                f"step {self.step} in {self.root} was save {self.save_id} when it was found, and is save "
                f"{self.manager.restored_save_id} now: the job went back and saved it anew; go on to the next",
                step=self.step,
                path=self.root,
            )
        return found


def _iterate(follower: _Follower, poll_s: float, idle_timeout_s: float | None) -> Iterator[FollowedStep]:
    coordinator, manager = make_coordinator(), None
    idle = Deadline(idle_timeout_s if idle_timeout_s is not None else float("inf"))

    def look(_: list[Any]) -> list[Any]:
        found = follower.next()
        return [found, found is None and idle.passed]

    try:
        while True:
            found, ended = coordinator.agree("follow", None, look, timeout_s=_AGREE_S)
            if found is not None:
                manager = manager or _reader(follower)
                identity, proven = found
                save_id = SaveId.from_list(identity)
                yield FollowedStep(
                    step=save_id.step, save_id=save_id, root=follower.url, proven=proven, _manager=manager
                )
                idle.begin_again()
            elif ended:
                return
            else:
                time.sleep(poll_s)
    finally:
        follower.release()
        if manager is not None:
            manager.close()


def _reader(follower: _Follower) -> CheckpointManager:
    options = ocp.CheckpointManagerOptions(read_only=True, create=False)
    return CheckpointManager(follower.url, options=options, events=follower.events)


class _Follower:
    """The steps yielded so far, and the lease on the current one. Used on process 0 alone."""

    def __init__(self, url: str, after: int | None, newest_only: bool, prove: bool, lease_s: float, events: EventLog):
        self.url = url
        self.events = events
        self._after = after
        self._newest_only = newest_only
        self._prove = prove
        self._lease_s = lease_s
        self._store = open_store(url, deadline_s=_STORE_DEADLINE_S)
        self._known: dict[str, DurableStep] = {}  # by directory; of each branch, until another run begins
        self._rejected: set[str] = set()  # directories whose damage was reported
        self._ancestry = Ancestry()
        self._last: SaveId | None = None
        self._lease: Lease | None = None

    def next(self) -> list[Any] | None:
        """The next step, leased: its number, identity and whether it is proven. None where there is nothing new."""
        self.release()
        try:
            new = self._new()
            for name, save_id in reversed(new) if self._newest_only else new:
                proven = self._take(name, save_id)
                if proven is not None:
                    self._last = save_id
                    return [save_id.to_list(), proven]
        except TransientStoreError as error:  # looked at again at the next poll
            self.events.emit(Kind.DEGRADED, tier=DURABLE, reason=str(error))
        return None

    def release(self) -> None:
        """Releases the lease on the current step."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _new(self) -> list[tuple[str, SaveId]]:
        """The committed steps of the job's own branch that were not yielded, oldest first."""
        place = Place.open(self.url, timeout_s=_STORE_DEADLINE_S)
        place.names()  # before the records: a run that begins in between is seen at the next look
        ancestry = EpochRecords(self._store).read()
        if ancestry != self._ancestry:  # the job was restarted or went back: numbers may be saved again
            self._ancestry = ancestry
            self._known.clear()
            self._rejected.clear()
        steps = read_root(place, ancestry, known=self._known).steps
        self._known = {each.place.name: each for each in steps if each.state in ("committed", "damaged")}
        for each in steps:
            if each.state == "damaged" and each.place.name not in self._rejected:
                self._reject(each.place.name, each.step, str(each.problem))
        found = [
            (name, each.identity)
            for name, each in self._known.items()
            if each.state == "committed" and name not in self._rejected
        ]
        if steps and self._after is not None:
            self._last = max((save_id for _, save_id in found if save_id.step <= self._after), default=None)
            self._after = None
        return sorted((pair for pair in found if self._last is None or pair[1] > self._last), key=lambda pair: pair[1])

    def _take(self, name: str, save_id: SaveId) -> bool | None:
        """Leases a step and verifies it; whether it is proven, or None where it cannot be had."""
        lease = Lease(self._store, save_id.step, lease_s=self._lease_s)
        proven = None
        try:
            reader = self._reader(name, save_id.step)
            found = self._ancestry.identity(save_id.step, reader.save_id())
            if lease.granted() and found == save_id and reader.item_names():
                proven = self._proven(reader, save_id)
                if lease.lost:  # while it was read: the writer may prune it; looked at again at the next poll
                    proven = None
        except CorruptCheckpointError as error:
            self._reject(name, save_id.step, str(error))
        except FileNotFoundError:  # pruned before it was leased
            self._known.pop(name, None)
        finally:
            if proven is None:
                lease.release()
        if proven is not None:
            self._lease = lease
        return proven

    def _proven(self, reader: DurableReader, save_id: SaveId) -> bool:
        """Reads every cell of our steps. False for one of stock Orbax, which has no digests, and without `prove`."""
        manifests = reader.manifests()
        if not manifests:
            return save_id.ours
        for manifest in manifests if self._prove else ():
            for item, leaf, record, cell, *_ in digested_cells(manifest):
                reader.read(item, leaf, record, cell, np.empty(cell.shape, np.dtype(leaf.dtype)))
        return self._prove

    def _reject(self, name: str, step: int, reason: str) -> None:
        self._rejected.add(name)
        self.events.emit(Kind.REJECTED, step=step, tier=DURABLE, reason=reason)

    def _reader(self, name: str, step: int) -> DurableReader:
        return DurableReader(f"{self.url}/{name}", step=step)
