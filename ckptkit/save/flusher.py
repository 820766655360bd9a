"""From a committed snapshot to the slower tiers: SSD and durable, each in a thread of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckptkit.durable.orbax.host_shards import host_tree
from ckptkit.errors import CheckpointError
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.save.circuit_breaker import DurableRetry
from ckptkit.save.disk_copy import DiskCopy
from ckptkit.save.fence import EpochFence
from ckptkit.save.ledger import Ledger
from ckptkit.save.outcomes import Outcomes, Refusal
from ckptkit.save.peer_copy import PeerCopier
from ckptkit.save.records import DiskFlush, Save, SaveTargets, SealedSave
from ckptkit.save.worker import Worker
from ckptkit.slots.arena import Arena, Slot
from ckptkit.snapshot.describe import SlotExtent, box_array
from ckptkit.store import side_by_side
from ckptkit.util import clock
from ckptkit.util.clock import Deadline
from ckptkit.util.gc_pause import collection_paused

_LOOK_S = 0.2  # how often a save that waits for the durable tier looks whether that is failing


class Flusher:
    """Owner of the threads that fill the slower tiers. They read the snapshot's slot under a lease."""

    def __init__(
        self,
        tiers: SaveTargets,
        ledger: Ledger,
        outcomes: Outcomes,
        claim: EpochFence,
        durable_retry: DurableRetry,
        timeout_s: float,
    ):
        self._tiers = tiers
        self._ledger = ledger
        self._outcomes = outcomes
        self._claim = claim
        self._durable_retry = durable_retry
        self._disk = Worker("ckptkit-disk", waiting_max=1)
        self._durable = Worker("ckptkit-durable", waiting_max=1)
        peer_copies = tiers.peer_copies
        self._copies = None if peer_copies is None else PeerCopier(peer_copies, tiers, outcomes, timeout_s)
        copying = [] if self._copies is None else [self._copies.worker]
        self._workers = (self._disk, *copying, self._durable)

    @property
    def idle(self) -> bool:
        """Whether no tier is being filled."""
        return all(worker.idle for worker in self._workers)

    def wait_durable(self, deadline: Deadline, *, patient: bool = True) -> bool:
        """Waits for the durable save on its way; False where time ran out first, or, unless `patient`, where the
        durable tier turns out to be failing."""
        while not self._durable.wait_idle(deadline.left_s if patient else min(_LOOK_S, deadline.left_s)):
            if deadline.passed or (not patient and self._durable_retry.failing):
                return False
        return True

    def wait_disk(self, deadline: Deadline) -> bool:
        """Waits for the disk save on its way; False where time ran out first."""
        return self._disk.wait_idle(deadline.left_s)

    def wait_copies(self, deadline: Deadline) -> bool:
        """Waits for the copies on their way to other hosts; False where time ran out first."""
        return self._copies is None or self._copies.worker.wait_idle(deadline.left_s)

    def settle(self, deadline: Deadline) -> bool:
        """Waits for every tier until `deadline`; False where some are not done."""
        return self.wait_copies(deadline) and self.wait_disk(deadline) and self.wait_durable(deadline)

    def drain(self) -> None:
        """Waits for every tier; raises what escaped a thread."""
        for worker in self._workers:
            worker.drain()
        self._tiers.durable.wait_until_pruned()

    def close(self) -> None:
        """Finishes what is under way and joins the threads."""
        for worker in self._workers:
            worker.close()

    def begin_disk(
        self, save_id: SaveId, slot: Slot, extents: Sequence[SlotExtent], size_bytes: int
    ) -> DiskFlush | None:
        """Begins to copy `slot` to the disk tier while boxes are still copied into it: as they come when `extents` are
        to be filled, at once without. None where the disk is still busy with an older step.
        """
        if self._tiers.disk is None or not self._disk.idle:
            return None
        begun = DiskFlush(copy=DiskCopy(slot, extents, size_bytes, self._tiers.disk))
        self._tiers.staging.lease(slot)
        disk = self._tiers.disk
        self._disk.submit(lambda: self._flush_to_disk(save_id, slot, begun, disk))
        return begun

    def flush(self, save: Save, slot: Slot, sealed: SealedSave) -> None:
        """Sends a save that all processes have committed on to the slower tiers it is due in; for the writer thread.

        Whether a slower tier is still busy with an older step is a local matter, so it is voted on: a tier that is
        busy anywhere leaves the step out everywhere.
        """
        begun = save.snapshot.disk if save.snapshot is not None else None
        if begun is None and SSD in save.due:
            begun = self.begin_disk(save.save_id, slot, (), save.description.slot_bytes)
        try:
            accepted, refused = self._voted(save, begun is not None)
            for tier, refusal in refused.items():
                self._outcomes.skipped(save.save_id, tier, refusal, gone=not accepted)
            save = replace(save, due=accepted)
            if begun is not None and SSD in accepted:
                begun.decided.set_result((save, sealed))
            if PEER in accepted and self._copies is not None:
                self._copies.submit(save, slot, sealed)
            if DURABLE in accepted:
                self._tiers.staging.lease(slot)
                self._durable.submit(lambda: self._flush_to_durable(save, slot, sealed))
        finally:
            if begun is not None and not begun.decided.done():
                begun.leave_out()

    def follow(self, save_id: SaveId) -> None:
        """Waits in the durable thread for a save that Orbax has begun on the caller's thread, and reports its end.

        Orbax's objects are the caller's: what failed is not tried again.
        """
        began_s = clock.monotonic_s()

        def finish() -> None:
            durable = self._tiers.durable
            try:
                self._claim.claim(save_id)
                self._durable_retry.attempt(
                    save_id.step,
                    durable.finish_by_orbax,
                    lambda: durable.holds(save_id),
                    repeatable=False,
                    about=str(save_id),
                )
                self._outcomes.committed_by_orbax(save_id, began_s)
            except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
                self._outcomes.failed(save_id, DURABLE, error)

        self._durable.submit(finish)

    def _voted(self, save: Save, begun: bool) -> tuple[frozenset[str], dict[str, Refusal]]:
        """The tiers that take the save on all processes, and why others leave it out. Where a vote fails the next one
        is held all the same: the others come to it."""
        accepted, refused = set[str](), dict[str, Refusal]()
        for tier in (PEER, SSD, DURABLE):
            if tier not in save.due:
                continue
            try:
                refusal = self._refused(save, tier, begun)
            except CheckpointError as error:
                self._outcomes.failed(save.save_id, tier, error)
                continue
            if refusal is None:
                accepted.add(tier)
            else:
                refused[tier] = refusal
        return frozenset(accepted), refused

    def _refused(self, save: Save, tier: str, begun: bool) -> Refusal | None:
        too_early = Refusal(policy="skip", reason="still writing an older step")
        if tier == DURABLE:
            idle = self._durable.idle or save.forced
            return self._outcomes.vote(DURABLE, save.save_id, None if idle else too_early)
        if tier == PEER:
            idle = self._copies is not None and self._copies.worker.idle
            return self._outcomes.vote(PEER, save.save_id, None if idle else too_early)
        return self._outcomes.vote("disk", save.save_id, None if begun else too_early)

    # In the disk thread.

    def _flush_to_disk(self, save_id: SaveId, slot: Slot, begun: DiskFlush, disk: Arena) -> None:
        """Copies, waits for the save's fate, commits, votes: a copy for nothing was never a committed slot."""
        self._outcomes.phase(save_id, "begun", SSD)
        try:
            copied, refusal = self._outcomes.tried(save_id, SSD, begun.copy.run)
            if refusal is None:
                self._outcomes.phase(save_id, "copied", SSD)
        finally:
            self._tiers.staging.release(slot)
        try:
            if (decided := begun.decided.result()) is not None:
                self._commit_to_disk(*decided, copied, refusal, disk)
        finally:
            if copied is not None:
                disk.release(copied)

    def _commit_to_disk(
        self, save: Save, sealed: SealedSave, copied: Slot | None, refusal: Refusal | None, disk: Arena
    ) -> None:
        def commit(copied: Slot) -> None:
            disk.commit(copied, save.save_id, sealed.text_for(copied))
            self._outcomes.phase(save.save_id, "committed_here", SSD)

        def left_out() -> None:
            if copied is not None:
                disk.discard(copied)

        if copied is not None:
            _, refusal = self._outcomes.tried(save.save_id, SSD, lambda: commit(copied), degrading=())
        self._outcomes.conclude(
            "disk-commit",
            save.save_id,
            SSD,
            refusal,
            taken=lambda: self._outcomes.committed(save, SSD, disk),
            left_out=left_out,
            gone=DURABLE not in save.due,
        )

    # In the durable thread.

    def _flush_to_durable(self, save: Save, slot: Slot, sealed: SealedSave) -> None:
        self._outcomes.phase(save.save_id, "begun", DURABLE)
        tries = itertools.count()  # the same on every process
        try:

            def write() -> None:
                about = f"{save.save_id}.{next(tries)}"
                # The fence waits for the root's answer, and the items for nobody.
                _, arrays = side_by_side(
                    [lambda: self._claim.fence(save.save_id), lambda: self._array_items(save, slot, sealed)]
                )
                self._tiers.durable.save(
                    save.save_id,
                    {**arrays, **save.items.durable},
                    metrics=save.metrics,
                    default_item=save.items.default_item,
                    ancestry=self._ledger.ancestry,
                    custom_metadata=save.items.custom_metadata,
                    check_epoch=lambda: self._claim.check(save.save_id),
                    about=about,
                )

            self._durable_retry.attempt(
                save.save_id.step,
                write,
                lambda: self._tiers.durable.holds(save.save_id),
                forced=save.forced,
                about=str(save.save_id),
            )
            self._outcomes.phase(save.save_id, "committed_here", DURABLE)
            self._outcomes.committed(save, DURABLE, None)
        except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
            self._outcomes.failed(save.save_id, DURABLE, error)
        finally:
            self._tiers.staging.release(slot)

    @collection_paused()  # records of every leaf, all of which stay until the save is over
    def _array_items(self, save: Save, slot: Slot, sealed: SealedSave) -> dict[str, Any]:
        manifest, items = sealed.manifest(slot), {}
        for item, sources in save.description.items.items():
            leaves = [
                (leaf, source.holders, {r.box: box_array(r, leaf, slot.memory) for r in leaf.boxes})
                for leaf, source in zip(manifest.arrays[item], sources, strict=True)
            ]
            items[item] = host_tree(
                leaves,
                save.description.treedefs[item],
                manifest,
                item,
                lambda: self._outcomes.phase(save.save_id, "written", DURABLE),
                **save.items.durable_tree_words(item),
            )
        return items
