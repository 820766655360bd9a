"""The life of a save: stage on the step loop, copying and digesting; then, in the background, commit, vote, flush.

A save is taken by a decision that is the same on every process. Whether it succeeds is voted in the background:
one process that could not stage it, or was too busy to, drops it everywhere. The step loop waits for nothing but its
own copy, and, when a durable save is due (`durable_busy="wait"`), for the previous durable save.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, final

from ckptkit.errors import CheckpointError, StoreFullError
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import ManifestText, SaveId, Writer, custom_digest
from ckptkit.model.policies import SaveOptions
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.save.circuit_breaker import DurableRetry
from ckptkit.save.fence import EpochFence
from ckptkit.save.flusher import Flusher
from ckptkit.save.ledger import Ledger
from ckptkit.save.outcomes import Outcomes, Refusal, describe
from ckptkit.save.records import Admission, Save, SaveTargets, SealedSave, Snapshot, with_shardings
from ckptkit.save.replica_check import ReplicaComparison
from ckptkit.save.retention import Retention
from ckptkit.save.worker import Worker
from ckptkit.slots.arena import Arena, Slot
from ckptkit.snapshot import staging
from ckptkit.snapshot.describe import Describer, Description, Digests
from ckptkit.snapshot.items import SaveItems
from ckptkit.util import clock
from ckptkit.util.clock import Deadline

VOTES_WAITING_MAX = 1024  # of saves that came too early: a few hundred bytes each


class SavePipeline:
    """Owner of the writer thread. Every method but `submit` may be called on one process alone.

    `describe` says what a save of some trees will hold, and raises for leaves that cannot be saved; `slots` makes the
    slots of saves to come; `outcomes` knows what has failed; `flusher` fills the slower tiers.
    """

    def __init__(
        self, tiers: SaveTargets, job: Job, writer: Writer, ledger: Ledger, retention: Retention, options: SaveOptions
    ):
        self._tiers = tiers
        self._pace = tiers.durable.pace  # the durable tier lets a save pass until its first commit
        self._coordinator = job.coordinator
        self._events = job.events
        self._writer_record = writer
        self._ledger = ledger
        self._options = options
        self._changed = threading.Condition()
        self._unstaged = 0  # saves that still refer to the caller's arrays
        self._in_flight = 0  # snapshots that are taken and not yet committed, or dropped, by all
        self._undecided: list[Slot] = []
        self._closed = False
        self._text: tuple[Description, ManifestText] | None = None
        self.describe = Describer(with_shardings)
        self.outcomes = Outcomes(tiers, job, ledger, retention)
        self.slots = SlotMaker(tiers, retention, self.outcomes)
        self._replicas = ReplicaComparison(options.replicas, job, self.outcomes, writer.host)
        self._claim = EpochFence(tiers, job.coordinator, ledger, self.outcomes)
        self._durable_retry = DurableRetry(options.on_failure, job)
        timeout_s = job.coordinator.timeout_s
        self.flusher = Flusher(tiers, ledger, self.outcomes, self._claim, self._durable_retry, timeout_s)
        self._writer = Worker("ckptkit-writer", waiting_max=VOTES_WAITING_MAX)

    def await_turn(self, due: frozenset[str], *, must_wait: bool, last: Deadline | None = None) -> Admission:
        """Waits for the saves before one that is due in the durable tier, on the step loop's thread.

        At most for the longest wait for other processes; not at all for a save that is due in fast tiers alone or,
        unless it is a `must_wait`, where one that comes too early is skipped, or the durable tier fails. One that no
        other follows has until `last`; it waits for the writer, a little for peers and disk, and queues behind a
        durable save: none may cost the faster tiers.
        """
        forced = last is not None or must_wait
        patient = self._options.durable_busy == "wait" and not self._durable_retry.failing
        waits = last is not None or (DURABLE in due and (must_wait or patient))
        was_busy, waiting_s = waits and self.busy, clock.monotonic_s()
        deadline = last or Deadline(self._coordinator.timeout_s if waits else 0.0)
        in_time = not waits or self._writer.wait_idle(deadline.left_s)
        if last is not None:
            soon = Deadline(last.left_s / 4)
            self.flusher.wait_copies(soon)
            self.flusher.wait_disk(soon)
        elif waits:
            in_time = in_time and self.flusher.wait_durable(deadline, patient=must_wait)
            if not in_time and not must_wait and self._durable_retry.failing:
                waits, in_time, deadline = False, True, Deadline(0.0)
        waited_s = clock.monotonic_s() - waiting_s
        return Admission(
            waits=waits, forced=forced, was_busy=was_busy, in_time=in_time, waited_s=waited_s, deadline=deadline
        )

    def raise_if_overdue(self, step: int, due: frozenset[str]) -> None:
        """Raises `SaveFailedError` where the durable tier has been failing for too long (`DurableRetry`).

        Waits for no save: what process 0 knows when it asks decides for all. With several processes only saves that
        are due there ask.
        """
        if self._coordinator.count == 1 or DURABLE in due:
            self._durable_retry.raise_if_overdue(step)

    def submit(
        self,
        save_id: SaveId,
        items: SaveItems,
        description: Description,
        due: frozenset[str],
        metrics: Any,
        start_s: float,
        turn: Admission,
    ) -> None:
        """Stages the state and hands the save over; returns once the caller may donate the state.

        Blocks for one copy of this process's boxes. A save that comes while `in_flight_max` snapshots are on their
        way is not staged, and dropped by vote; one that waits for its turn (`await_turn`) waits here for a free
        slot too, for what is left of its time, and is then dropped by vote. `start_s` is when the step loop was stopped
        (monotonic). Raises what staging raises (for an array that was deleted), and what no save is taken after
        (replicas that differ); the save is then dropped by vote.
        """
        self.outcomes.phase(save_id, "begun")
        save = Save(
            save_id=save_id,
            items=replace(items, trees={}, inline={}, durable={}),
            description=description,
            due=due,
            forced=turn.forced,
            metrics=metrics,
            snapshot=None,
            staged_s=clock.monotonic_s(),
        )
        try:
            self.outcomes.raise_if_stopped()
            self.slots.size(description.slot_bytes, description.share_bytes)
            waiting_s = clock.monotonic_s()
            slot, refusal = self._admit(save_id, description.slot_bytes, due, turn)
            waited_s = turn.waited_s + clock.monotonic_s() - waiting_s
            staged = None if slot is None else self._begin_staging(save_id, description, items, slot, due)
        except BaseException as error:  # the caller hears it here, and the others in the vote, to which they come
            self._hand_over(save, Refusal(policy="veto", reason=describe(error)))
            raise
        staged_s = clock.monotonic_s()
        self._ledger.begin(save_id)
        if staged is not None:
            # A reference to the trees, held in the background, would keep device memory in use.
            kept = replace(items, trees={})
            save = replace(save, items=kept, snapshot=staged, staged_s=staged_s)
            self._events.emit(
                Kind.STAGED,
                step=save_id.step,
                strategy=staged.staging.strategy,
                reason=staged.staging.reason,
                bytes=description.held_bytes,
                tiers=sorted(due),
                stall_s=round(staged_s - start_s, 6),
                waited_s=round(waited_s, 6),
                **({"policy": "wait"} if turn.was_busy else {}),
            )
        self.slots.reserve(description.slot_bytes)  # the other slots: the next saves find them made
        self._hand_over(save, refusal)

    def _hand_over(self, save: Save, refusal: Refusal | None) -> None:
        with self._changed:
            self._unstaged += 1
            self._in_flight += save.snapshot is not None
        self._writer.submit(lambda: self._commit(save, refusal))

    def _admit(
        self, save_id: SaveId, size_bytes: int, due: frozenset[str], turn: Admission
    ) -> tuple[Slot | None, Refusal | None]:
        """A slot for the next snapshot, or why this process has none; waits for one where it was its turn to wait.

        Which of the two is a local matter of timing, so it decides nothing: the refusal goes into the vote.
        """
        if not turn.in_time:
            timeout_s = self._coordinator.timeout_s
            return None, Refusal(policy="wait", reason=f"earlier saves were not done within {timeout_s:.1f} s")
        in_flight, in_flight_max = self._in_flight, self._options.in_flight_max
        if in_flight >= in_flight_max:
            reason = f"too early: {in_flight} snapshots are on their way, in_flight_max={in_flight_max}"
            return None, Refusal(policy="skip", reason=reason)
        try:
            slot = self._tiers.staging.acquire(size_bytes, timeout_s=turn.deadline.left_s)
        except StoreFullError as error:
            self.outcomes.no_room(save_id, self._tiers.staging_name, error, due)
            return None, Refusal(policy="veto", reason=describe(error))
        except (CheckpointError, OSError) as error:  # a mount that became read-only, say: training goes on
            self.outcomes.failed(save_id, self._tiers.staging_name, error)
            return None, Refusal(policy="veto", reason=describe(error))
        if slot is None:
            reason = "no free slot: slower tiers still read the others, or they are still being made"
            return None, Refusal(policy="wait" if turn.waits else "skip", reason=reason)
        return slot, None

    def _begin_staging(
        self, save_id: SaveId, description: Description, items: SaveItems, slot: Slot, due: frozenset[str]
    ) -> Snapshot:
        self._pace.begin_urgent(save_id)
        disk = None
        try:
            if SSD in due:
                disk = self.flusher.begin_disk(save_id, slot, description.extents, description.slot_bytes)
            copied = disk.copy.filled if disk is not None else None
            local_replicas, compared = self._replicas.shards(description, items.trees)
            choice = self._options.staging
            begun = staging.begin(choice, description, items.trees, slot.memory, copied, compared)
            return Snapshot(slot=slot, staging=begun, disk=disk, local_replicas=local_replicas)
        except BaseException:  # an array that was deleted, say: the caller hears it, the slot is free again
            self._pace.end_urgent(save_id)
            if disk is not None:
                disk.leave_out()
            self._tiers.staging.release(slot)
            raise

    def wait_until_staged(self) -> None:
        """Waits until no save refers to the arrays that it was given."""
        with self._changed:
            self._changed.wait_for(lambda: self._unstaged == 0)

    def wait(self) -> None:
        """Waits until every save that was taken is in all the tiers it was due in, or has failed."""
        self._writer.drain()
        self.flusher.drain()

    def wait_decided(self, deadline: Deadline) -> bool:
        """Waits until all processes have taken every save so far, or dropped it; False where time ran out first."""
        return self._writer.wait_idle(deadline.left_s)

    def settle(self, deadline: Deadline) -> bool:
        """Waits for every tier as `wait` does, but until `deadline`; False where some are not done. Raises nothing."""
        return self._writer.wait_idle(deadline.left_s) and self.flusher.settle(deadline)

    @property
    def busy(self) -> bool:
        """Whether a save is still on its way."""
        return not (self._writer.idle and self.flusher.idle)

    def raise_if_closed(self) -> None:
        """Raises `CheckpointError` after `close`: the slots may be another run's by now."""
        if self._closed:
            raise CheckpointError("the manager was closed and saves nothing any more; make another one")

    def close(self) -> None:
        """Finishes what is under way and joins the threads."""
        self._closed = True
        self._writer.close()
        self.flusher.close()
        self.slots.close()

    # In the writer thread.

    def _commit(self, save: Save, refusal: Refusal | None) -> None:
        try:
            self._commit_and_vote(save, refusal)
        except Exception as error:  # noqa: BLE001  the top of a thread: whoever asks for errors is to hear of it
            self.outcomes.failed(save.save_id, self._tiers.staging_name, error)
        finally:
            self._pace.end_urgent(save.save_id)
            disk = save.snapshot.disk if save.snapshot is not None else None
            if disk is not None and not disk.decided.done():
                disk.leave_out()
            with self._changed:
                self._in_flight -= save.snapshot is not None
                self._changed.notify_all()

    def _commit_and_vote(self, save: Save, refusal: Refusal | None) -> None:
        """Finish staging, compare replicas, manifest, local commit, vote; then on to the slower tiers."""
        tried = partial(self.outcomes.tried, save.save_id, self._tiers.staging_name, due=save.due)
        staged, local_replicas = save.snapshot, save.snapshot.local_replicas if save.snapshot is not None else ()
        digests, failed = tried(lambda: self._finish_staging(save))
        # Every process comes, also one that has staged nothing.
        differing, failed_too = tried(
            lambda: self._replicas.compare(save.save_id, save.description, local_replicas, digests)
        )
        refusal, sealed = refusal or failed or failed_too or differing, None
        if staged is not None and digests is not None and refusal is None:
            sealed, refusal = tried(lambda: self._commit_here(save, staged.slot, digests))
        try:
            refusals = self.outcomes.vote("commit", save.save_id, refusal)
        except CheckpointError as error:
            self._leave_undecided(save, error)
            return
        if refusals is not None:
            self._drop(save, refusals)
            return
        assert sealed is not None
        assert staged is not None
        try:
            self.outcomes.committed(save, self._tiers.staging_name, self._tiers.staging)
            self._release_undecided()
            self._pace.end_urgent(save.save_id)
            self.flusher.flush(save, staged.slot, sealed)
        finally:
            self._tiers.staging.release(staged.slot)

    def _finish_staging(self, save: Save) -> Mapping[int, Digests] | None:
        try:
            if save.snapshot is None:
                return None
            digests = save.snapshot.staging.finish()
            self.outcomes.phase(save.save_id, "staged", self._tiers.staging_name)
            return digests
        finally:
            with self._changed:
                self._unstaged -= 1
                self._changed.notify_all()

    def _commit_here(self, save: Save, slot: Slot, digests: Mapping[int, Digests]) -> SealedSave:
        self._claim.claim(save.save_id)
        sealed = SealedSave(
            save_id=save.save_id,
            writer=self._writer_record,
            description=save.description,
            digests=digests,
            inline=save.items.inline,
            custom=custom_digest(save.items.custom_metadata),
            text=self._text_of(save.description),
        )
        if self._tiers.staging.directory is not None:
            self._tiers.staging.commit(slot, save.save_id, sealed.text_for(slot))
        self.outcomes.phase(save.save_id, "committed_here", self._tiers.staging_name)
        return sealed

    def _text_of(self, description: Description) -> ManifestText:
        """What manifests of a description have in common; a loop saves the same description again and again."""
        if self._text is None or self._text[0] is not description:
            records = {item: tuple(s.record for s in sources) for item, sources in description.items.items()}
            self._text = (description, ManifestText(records))
        return self._text[1]

    def _leave_undecided(self, save: Save, error: CheckpointError) -> None:
        """Nobody here knows the verdict. What is committed here stays, and its slot stays leased until a newer save is
        committed by all: others may count on it at the restart."""
        self.outcomes.failed(save.save_id, self._tiers.staging_name, error)
        if save.snapshot is not None:
            self._undecided.append(save.snapshot.slot)
            if self._tiers.staging.directory is None:  # nothing of it outlives the process
                self._release_undecided()

    def _release_undecided(self) -> None:
        while self._undecided:
            self._tiers.staging.release(self._undecided.pop())

    def _drop(self, save: Save, refusals: Refusal) -> None:
        if save.snapshot is not None:
            try:
                self._tiers.staging.discard(save.snapshot.slot)
            except (CheckpointError, OSError) as error:  # no save is to keep its slot for ever
                self.outcomes.degraded(save.save_id.step, self._tiers.staging_name, error)
            finally:
                self._tiers.staging.release(save.snapshot.slot)
        self.outcomes.skipped(save.save_id, self._tiers.staging_name, refusals, gone=True)


@final
class SlotMaker:
    """Owner of the thread that makes the slots of every fast tier. Belongs to the step loop's thread."""

    def __init__(self, tiers: SaveTargets, retention: Retention, outcomes: Outcomes):
        self._tiers = tiers
        self._retention = retention
        self._outcomes = outcomes
        self._prepared_bytes = 0
        self._worker = Worker("ckptkit-arena", waiting_max=4)

    def prepare(self, slot_bytes: int, share_bytes: int) -> None:
        """Begins to make the slots of every fast tier in the background, for saves of `slot_bytes` on this process and
        of `share_bytes` at most on any.

        Raises `StoreFullError` where a tier has no room for its slots, with the bytes needed and free.
        """
        self.size(slot_bytes, share_bytes)
        beside_bytes = sum(peer_arena.missing_bytes(slot_bytes) for peer_arena in self._peer_arenas)
        self._tiers.staging.check_room(slot_bytes, beside_bytes=beside_bytes)
        if self._tiers.disk is not None:
            self._tiers.disk.check_room(slot_bytes)
        self.reserve(slot_bytes)

    def size(self, slot_bytes: int, share_bytes: int) -> None:
        """Says how large saves are: how many slots a tier has may follow from it."""
        if self._retention.sized(share_bytes, slot_bytes):
            self._prepared_bytes = 0  # the new slots are to be made

    def reserve(self, slot_bytes: int) -> None:
        """What `prepare` begins, without asking for room first: a tier that has none says so in an event."""
        if self._prepared_bytes >= slot_bytes:
            return
        self._prepared_bytes = slot_bytes

        def reserve(arena: Arena, tier: str) -> None:
            try:
                arena.reserve(slot_bytes)
            except (CheckpointError, OSError) as error:
                self._outcomes.degraded(None, tier, error)

        self._worker.submit(lambda: reserve(self._tiers.staging, self._tiers.staging_name))
        if (disk := self._tiers.disk) is not None:
            self._worker.submit(lambda: reserve(disk, SSD))
        for peer_arena in self._peer_arenas:
            self._worker.submit(lambda peer_arena=peer_arena: reserve(peer_arena, PEER))

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until all slots are made; False when `timeout_s` passed first."""
        return self._worker.wait_idle(timeout_s)

    def close(self) -> None:
        """Finishes what is under way and joins the thread."""
        self._worker.close()

    @property
    def _peer_arenas(self) -> tuple[Arena, ...]:
        return () if self._tiers.peer_copies is None else self._tiers.peer_copies.peer_arenas
