"""From a committed snapshot to the slower tiers: SSD, other hosts and durable, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from ckptkit.durable.orbax.file_items import FilesSave
from ckptkit.durable.orbax.host_shards import HostTreeSave, host_tree
from ckptkit.model.handler_files import with_file_digests
from ckptkit.model.manifest import Manifest
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.save.circuit_breaker import DurableRetry
from ckptkit.save.fence import EpochFence
from ckptkit.save.ledger import Ledger
from ckptkit.save.outcomes import Outcomes
from ckptkit.save.peer_copy import PeerCopyWork
from ckptkit.save.protocol import Do, Idle, Machinery, SaveProtocol, SideBySide, Wait
from ckptkit.save.records import DiskFlush, Refusal, Save, SaveTargets, SealedSave, Ticket
from ckptkit.save.voting import TierWork, Voting
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot
from ckptkit.snapshot.describe import Description, SlotExtent, box_array
from ckptkit.snapshot.items import SaveItems
from ckptkit.util import clock
from ckptkit.util.clock import Deadline
from ckptkit.util.gc_pause import collection_paused

_LOOK_S = 0.2  # how often a save that waits for the durable tier looks whether that is failing
_TOO_EARLY = Refusal(policy="skip", reason="still writing an older step")


class Flusher:
    """Owner of the threads that fill the slower tiers. They read the snapshot's slot under a lease."""

    def __init__(
        self,
        tiers: SaveTargets,
        ledger: Ledger,
        outcomes: Outcomes,
        voting: Voting,
        claim: EpochFence,
        durable_retry: DurableRetry,
        machinery: Machinery,
    ):
        self._tiers = tiers
        self._ledger = ledger
        self._outcomes = outcomes
        self._voting = voting
        self._claim = claim
        self._durable_retry = durable_retry
        self._machinery = machinery
        self._disk = machinery.make_worker("ckptkit-disk", waiting_max=1)
        self._disk_lock = threading.Lock()
        self._disk_promised_to: str | None = None  # the name of a save
        self._durable = machinery.make_worker("ckptkit-durable", waiting_max=1)
        copying = [machinery.make_worker("ckptkit-peer-copy", waiting_max=1)] if tiers.peer_copies is not None else []
        self._copying = copying[0] if copying else None
        self._workers = (self._disk, *copying, self._durable)

    @property
    def idle(self) -> bool:
        """Whether no tier is being filled."""
        return all(worker.idle for worker in self._workers)

    def wait_durable(self, deadline: Deadline, *, patient: bool = True) -> SaveProtocol:
        """Waits for the durable save in flight; False where time ran out first, or, unless `patient`, where the
        durable tier turns out to be failing."""
        while not (yield Idle(self._durable, deadline.left_s if patient else min(_LOOK_S, deadline.left_s))):
            if deadline.passed or (not patient and self._durable_retry.failing):
                return False
        return True

    def wait_fast(self, deadline: Deadline) -> SaveProtocol:
        """Waits for the copies to other hosts and to the disk; False where time ran out first."""
        workers = [self._disk] if self._copying is None else [self._copying, self._disk]
        done = True
        for worker in workers:
            done = (yield Idle(worker, deadline.left_s)) and done
        return done

    def drain(self) -> None:
        """Waits for every tier; raises what escaped a thread."""
        for worker in self._workers:
            worker.drain()
        self._tiers.durable.wait_until_pruned()

    def close(self, deadline: Deadline) -> bool:
        """Finishes what is under way and joins the threads; False where one still runs at the deadline."""
        ended = [worker.close(deadline.left_s) for worker in self._workers]
        return all(ended)

    def begin_disk(
        self, save: Save, slot: Slot, extents: Sequence[SlotExtent], size_bytes: int, sealed: SealedSave | None = None
    ) -> DiskFlush | None:
        """Begins to copy `slot` to the disk tier while boxes are still copied into it: as they come when `extents` are
        to be filled, at once without; `sealed` is the save then. None where the disk is still busy with an older step,
        or promised to it.
        """
        disk = self._tiers.disk
        with self._disk_lock:
            if disk is None or not self._disk.idle or self._disk_promised_to not in {None, save.name}:
                return None
            digests = None if sealed is None else sealed.cell_digests()
            begun = DiskFlush(copy=self._machinery.make_disk_copy(slot, extents, size_bytes, disk, digests))
            self._tiers.staging.lease(slot)
            self._disk.submit(lambda: self._flush_to_disk(save, slot, begun, disk))
        return begun

    def refusals(self, save: Save, *, begun: bool) -> dict[str, Refusal | None]:
        """The slower tiers that the save is due in, each with why this process cannot take it there now.

        Whether a tier is still busy with an older step is a local matter, so it is voted on: a tier that is busy
        anywhere leaves the step out everywhere. A disk that is free is promised to this save until `end`.
        """
        idle = {
            SSD: begun or (SSD in save.due and self._promise_disk(save)),
            PEER: self._copying is not None and self._copying.idle,
            DURABLE: self._durable.idle or save.forced,
        }
        return {tier: None if idle[tier] else _TOO_EARLY for tier in (PEER, SSD, DURABLE) if tier in save.due}

    def flush(self, save: Save, slot: Slot, sealed: SealedSave, refused: dict[str, Refusal]) -> None:
        """Sends a save that all processes have committed on to the slower tiers that no process `refused`."""
        accepted = {tier for tier in save.due if tier not in refused}
        for tier, refusal in refused.items():
            gone = not accepted & {PEER, SSD, DURABLE}
            self._outcomes.skipped(save.save_id, tier, refusal, gone=gone)
        begun = save.snapshot.disk if save.snapshot is not None else None
        try:
            if SSD in accepted:
                begun = begun or self.begin_disk(save, slot, (), save.description.slot_bytes, sealed)
                assert begun is not None, "the disk was promised to this save"
                begun.decided.set_result((save, sealed))
            if PEER in accepted and self._copying is not None and self._tiers.peer_copies is not None:
                self._tiers.staging.lease(slot)
                work = PeerCopyWork(save, slot, sealed, self._tiers.peer_copies, self._tiers.staging, self._outcomes)
                self._copying.submit(lambda: self._voting.run(work, gone=False))
            if DURABLE in accepted:
                self._tiers.staging.lease(slot)
                self._durable.submit(lambda: self._flush_to_durable(save, slot, sealed))
        finally:
            if begun is not None:
                begun.leave_out()

    def end(self, save: Save) -> None:
        """The save was passed on, or dropped: the disk is free for the next one."""
        with self._disk_lock:
            if self._disk_promised_to == save.name:
                self._disk_promised_to = None

    def _promise_disk(self, save: Save) -> bool:
        """Keeps a free disk for `save`: one that is staged meanwhile must not take what all processes vote on."""
        with self._disk_lock:
            free = self._disk.idle
            if free:
                self._disk_promised_to = save.name
            return free

    def follow(self, ticket: Ticket) -> None:
        """Waits in the durable thread for a save that Orbax has begun on the caller's thread, and reports its end.

        Orbax's objects are the caller's: what failed is not tried again.
        """
        began_s, save_id = clock.monotonic_s(), ticket.save_id
        self._outcomes.under_way.begin(save_id.step, frozenset({DURABLE}))

        def finish_by_orbax(_: int) -> SaveProtocol:
            yield Do("finish by Orbax", lambda: self._tiers.durable.finish_by_orbax(save_id))

        def finish() -> SaveProtocol:
            durable = self._tiers.durable
            try:
                yield Do("claim the epoch", lambda: self._claim.claim(save_id))
                yield from self._durable_retry.attempt(
                    save_id,
                    ticket.name,
                    finish_by_orbax,
                    durable,
                    repeatable=False,
                )
                self._outcomes.committed_by_orbax(save_id, began_s)
            except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
                self._outcomes.failed(save_id, DURABLE, error)

        self._durable.submit(finish)

    # In the disk thread.

    def _flush_to_disk(self, save: Save, slot: Slot, begun: DiskFlush, disk: Arena) -> SaveProtocol:
        """Copies, waits for the decision about the save, commits, votes. A dropped copy was never a committed slot."""
        self._outcomes.phase(save.save_id, "begun", SSD)
        copied, failure, refusal = None, None, None
        try:
            refusal = yield from self._voting.settle(_DiskWork.CHANNEL)
            if refusal is None:
                copied = yield Do("copy to the disk", begun.copy.run)
                self._outcomes.phase(save.save_id, "copied", SSD)
        except Exception as error:  # noqa: BLE001  voted on, where the save is taken at all
            failure = error
        finally:
            self._tiers.staging.release(slot)
        decided = None
        try:
            decided = yield Wait(begun.decided)
        finally:
            if decided is None and copied is not None:
                disk.release(copied)
        if decided is None:
            return
        work = _DiskWork(decided[0], decided[1], copied, disk, self._outcomes, begun.copy.kept_bytes)
        if failure is not None:
            refusal = self._outcomes.refused(work.save, SSD, failure)
        yield from self._voting.run(work, refusal=refusal, gone=DURABLE not in work.save.due)

    # In the durable thread.

    def _flush_to_durable(self, save: Save, slot: Slot, sealed: SealedSave) -> SaveProtocol:
        save_id = save.save_id
        self._outcomes.phase(save_id, "begun", DURABLE)
        try:
            yield from self._durable_retry.attempt(
                save_id,
                save.name,
                lambda number: self._write(save, slot, sealed, f"{save.name}.{number}"),
                self._tiers.durable,
                forced=save.forced,
            )
            self._outcomes.phase(save_id, "committed_here", DURABLE)
            self._outcomes.committed(save, DURABLE, None, self._tiers.durable.shared)
        except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
            self._outcomes.failed(save_id, DURABLE, error)
        finally:
            self._tiers.staging.release(slot)

    def _write(self, save: Save, slot: Slot, sealed: SealedSave, about: str) -> SaveProtocol:
        """One try. `about` names its barriers; it is the same on every process."""
        save_id = save.save_id
        # The fence waits for the root's answer; meanwhile the items are written without a wait for other processes.
        arrays = yield SideBySide(self._claim.fence(save_id, about), lambda: self._array_items(save, slot, sealed))
        yield Do(
            "write durably",
            lambda: self._tiers.durable.save(
                save_id,
                {**arrays, **save.items.durable},
                metrics=save.metrics,
                ancestry=self._ledger.ancestry,
                custom_metadata=save.items.custom_metadata,
                check_epoch=lambda: self._claim.check(save_id),
                about=about,
            ),
        )

    @collection_paused()  # records of every leaf, all of which stay until the save is over
    def _array_items(self, save: Save, slot: Slot, sealed: SealedSave) -> dict[str, Any]:
        return array_items(
            save.description,
            sealed.manifest(slot),
            slot.memory,
            save.items,
            lambda: self._outcomes.phase(save.save_id, "written", DURABLE),
        )


def array_items(
    description: Description,
    manifest: Manifest,
    memory: np.ndarray,
    captured: SaveItems,
    on_written: Callable[[], None] = lambda: None,
) -> dict[str, HostTreeSave | FilesSave]:
    """The save arguments of the array items for Orbax's layout. `description` has the place of a box in `memory`."""
    items: dict[str, HostTreeSave | FilesSave] = {}
    manifest = with_file_digests(manifest)
    for item, sources in description.items.items():
        if item in captured.files:
            files = {leaf.path[1]: box_array(leaf.boxes[0], leaf, memory) for leaf in manifest.arrays[item]}
            items[item] = FilesSave(files=files, handler=captured.files[item])
            continue
        leaves = [
            (leaf, source.holders, {r.box: box_array(r, leaf, memory) for r in leaf.boxes})
            for leaf, source in zip(manifest.arrays[item], sources, strict=True)
        ]
        treedef, words = description.treedefs[item], captured.tree_words.get(item, {})
        items[item] = host_tree(leaves, treedef, manifest, item, on_written, **words)
    return items


@final
class _DiskWork(TierWork):
    """A slot on a disk that was filled, and is committed once all processes have filled theirs."""

    CHANNEL = "disk-commit"

    def __init__(
        self, save: Save, sealed: SealedSave, copied: Slot | None, disk: Arena, outcomes: Outcomes, kept_bytes: int
    ):
        super().__init__(SSD, self.CHANNEL, save)
        self._kept = {"kept_bytes": kept_bytes} if kept_bytes else {}
        self._sealed, self._copied, self._disk, self._outcomes = sealed, copied, disk, outcomes

    def act(self) -> SaveProtocol:
        """See `TierWork.act`."""
        copied = self._copied
        assert copied is not None, "a copy that failed is a refusal"
        text = self._sealed.text_for(copied)
        yield Do("commit to the disk", lambda: self._disk.commit(copied, self.save.save_id, text))
        self._outcomes.phase(self.save.save_id, "committed_here", SSD)

    def keep(self) -> None:
        """See `TierWork.keep`."""
        self._outcomes.committed(self.save, SSD, self._disk, self._kept)

    def drop(self) -> None:
        """See `TierWork.drop`."""
        if self._copied is not None:
            self._disk.discard(self._copied)

    def release(self) -> None:
        """See `TierWork.release`."""
        if self._copied is not None:
            self._disk.release(self._copied)
