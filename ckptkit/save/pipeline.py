"""The life of a save: stage on the step loop, copying and digesting; then, in the background, commit, vote, flush.

A save is taken by a decision that is the same on every process. Whether it succeeds is voted in the background:
one process that could not stage it, or was too busy to, drops it everywhere. The step loop waits for nothing but its
own copy, and, when a durable save is due (`durable_busy="wait"`), for the previous durable save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ckptkit.errors import CheckpointError, StoreFullError
from ckptkit.events import EventLog, Kind
from ckptkit.job.coordination import Coordinator
from ckptkit.model.manifest import ManifestText, SaveId, Writer
from ckptkit.model.policies import Backpressure, FailurePolicy, ReplicaPolicy
from ckptkit.model.tiers import DURABLE, SSD
from ckptkit.save.backpressure import await_admission
from ckptkit.save.circuit_breaker import DurableRetry
from ckptkit.save.fence import EpochFence
from ckptkit.save.flusher import Flusher
from ckptkit.save.ledger import Ledger
from ckptkit.save.outcomes import Outcomes, Refusal, describe
from ckptkit.save.preallocate import SlotMaker
from ckptkit.save.records import Admission, DiskFlush, Save, SaveTargets, SealedSave, with_shardings
from ckptkit.save.replica_check import ReplicaComparison
from ckptkit.save.retention import Retention
from ckptkit.save.worker import Worker
from ckptkit.slots.arena import Slot
from ckptkit.snapshot import describe as snapshot
from ckptkit.snapshot import staging
from ckptkit.snapshot.items import SaveItems
from ckptkit.snapshot.replicas import LocalReplica
from ckptkit.util import clock
from ckptkit.util.clock import Deadline

_T = TypeVar("_T")
VOTES_WAITING_MAX = 1024  # of saves that came too early: a few hundred bytes each


class SavePipeline:
    """Owner of the writer thread. Every method but `submit` may be called on one process alone."""

    def __init__(
        self,
        tiers: SaveTargets,
        coordinator: Coordinator,
        writer: Writer,
        ledger: Ledger,
        retention: Retention,
        events: EventLog,
        timeout_s: float,
        choice: str,
        backpressure: Backpressure,
        on_failure: FailurePolicy,
        replicas: ReplicaPolicy | None,
    ):
        self._tiers = tiers
        self._pace = tiers.durable.pace  # the durable tier lets a save pass until its first commit
        self._coordinator = coordinator
        self._writer_record = writer
        self._ledger = ledger
        self._events = events
        self._timeout_s = timeout_s
        self._backpressure = backpressure
        self._choice = staging.checked_choice(choice)
        self._changed = threading.Condition()
        self._unstaged = 0  # saves that still refer to the caller's arrays
        self._in_flight = 0  # snapshots that are taken and not yet committed, or dropped, by all
        self._undecided: list[Slot] = []
        self._closed = False
        self._describer = snapshot.Describer(with_shardings)
        self._text: tuple[snapshot.Description, ManifestText] | None = None
        self._outcomes = Outcomes(tiers, coordinator, ledger, retention, events, timeout_s)
        self._replicas = ReplicaComparison(replicas, coordinator, self._outcomes, events, writer.host, timeout_s)
        self._claim = EpochFence(tiers, coordinator, ledger, self._outcomes, timeout_s)
        self._durable_retry = DurableRetry(on_failure, coordinator, events, timeout_s)
        self._flusher = Flusher(tiers, ledger, self._outcomes, self._claim, self._durable_retry, timeout_s)
        self._maker = SlotMaker(tiers, retention, self._outcomes)
        self._writer = Worker("ckptkit-writer", waiting_max=VOTES_WAITING_MAX)

    def describe(self, items: SaveItems) -> snapshot.Description:
        """What a save of `items` will hold; raises for leaves that cannot be saved, before anything is taken."""
        return self._describer(items.trees)

    def prepare(self, slot_bytes: int, share_bytes: int) -> None:
        """See `SlotMaker.prepare`."""
        self._maker.prepare(slot_bytes, share_bytes)

    def reserve(self, slot_bytes: int) -> None:
        """See `SlotMaker.reserve`."""
        self._maker.reserve(slot_bytes)

    def await_turn(self, due: frozenset[str], *, must_wait: bool, last: Deadline | None = None) -> Admission:
        """Waits for the saves before one that is due in the durable tier (`turns.await_turn`)."""
        busy, timeout_s = self._backpressure.durable_busy, self._timeout_s
        return await_admission(self._writer, self._flusher, due, busy, timeout_s, must_wait=must_wait, last=last)

    def raise_if_overdue(self, step: int, due: frozenset[str]) -> None:
        """Raises `SaveFailedError` where the durable tier has been failing for too long (`DurableRetry`).

        Waits for no save: what process 0 knows when it asks decides for all. With several processes only saves that
        are due there ask.
        """
        if self._coordinator.count == 1 or DURABLE in due:
            self._durable_retry.raise_if_overdue(step)

    def follow(self, save_id: SaveId) -> None:
        """Waits in the durable thread for a save that Orbax has begun on the caller's thread, and reports its end."""
        self._flusher.follow(save_id)

    def submit(
        self,
        save_id: SaveId,
        items: SaveItems,
        description: snapshot.Description,
        due: frozenset[str],
        metrics: Any,
        start_s: float,
        turn: Admission,
    ) -> None:
        """Stages the state and hands the save over; returns once the caller may donate the state.

        Blocks for one copy of this process's boxes. A save that comes while `in_flight_max` snapshots are on their
        way is not staged, and dropped by vote; one that waits for admission (`await_admission`) waits here for a free
        slot too, for what is left of its time, and is then dropped by vote. `start_s` is when the step loop was stopped
        (monotonic). Raises what staging raises (for an array that was deleted), and what no save is taken after
        (replicas that differ); the save is then dropped by vote.
        """
        self._outcomes.phase(save_id, "begun")
        save = Save(
            save_id=save_id,
            items=replace(items, trees={}, inline={}, durable={}),
            description=description,
            slot=None,
            staging=None,
            disk=None,
            due=due,
            forced=turn.forced,
            metrics=metrics,
            local_replicas=(),
            staged_s=clock.monotonic_s(),
        )
        try:
            self._outcomes.raise_if_stopped()
            self._maker.size(description.slot_bytes, description.share_bytes)
            waiting_s = clock.monotonic_s()
            slot, refusal = self._admit(save_id, description.slot_bytes, due, turn)
            waited_s = turn.waited_s + clock.monotonic_s() - waiting_s
            disk, staged, local_replicas = self._begin_staging(save_id, description, items, slot, due)
        except BaseException as error:  # the caller hears it here, and the others in the vote, to which they come
            self._hand_over(save, Refusal(policy="veto", reason=describe(error)))
            raise
        staged_s = clock.monotonic_s()
        self._ledger.begin(save_id)
        if staged is not None:
            # A reference to the trees, held in the background, would keep device memory in use.
            kept = replace(items, trees={})
            save = replace(
                save, items=kept, slot=slot, staging=staged, disk=disk, local_replicas=local_replicas, staged_s=staged_s
            )
            self._events.emit(
                Kind.STAGED,
                step=save_id.step,
                strategy=staged.strategy,
                reason=staged.reason,
                bytes=description.held_bytes,
                tiers=sorted(due),
                stall_s=round(staged_s - start_s, 6),
                waited_s=round(waited_s, 6),
                **({"policy": "wait"} if turn.was_busy else {}),
            )
        self.reserve(description.slot_bytes)  # the other slots: the next saves find them made
        self._hand_over(save, refusal)

    def _hand_over(self, save: Save, refusal: Refusal | None) -> None:
        with self._changed:
            self._unstaged += 1
            self._in_flight += save.slot is not None
        self._writer.submit(lambda: self._commit(save, refusal))

    def _admit(
        self, save_id: SaveId, size_bytes: int, due: frozenset[str], turn: Admission
    ) -> tuple[Slot | None, Refusal | None]:
        """A slot for the next snapshot, or why this process has none; waits for one where it was its turn to wait.

        Which of the two is a local matter of timing, so it decides nothing: the refusal goes into the vote.
        """
        if not turn.in_time:
            return None, Refusal(policy="wait", reason=f"earlier saves were not done within {self._timeout_s:.1f} s")
        in_flight, in_flight_max = self._in_flight, self._backpressure.in_flight_max
        if in_flight >= in_flight_max:
            reason = f"too early: {in_flight} snapshots are on their way, in_flight_max={in_flight_max}"
            return None, Refusal(policy="skip", reason=reason)
        try:
            slot = self._tiers.staging.acquire(size_bytes, timeout_s=turn.deadline.left_s)
        except StoreFullError as error:
            self._outcomes.no_room(save_id, self._tiers.staging_name, error, due)
            return None, Refusal(policy="veto", reason=describe(error))
        except (CheckpointError, OSError) as error:  # a mount that became read-only, say: training goes on
            self._outcomes.failed(save_id, self._tiers.staging_name, error)
            return None, Refusal(policy="veto", reason=describe(error))
        if slot is None:
            reason = "no free slot: slower tiers still read the others, or they are still being made"
            return None, Refusal(policy="wait" if turn.waits else "skip", reason=reason)
        return slot, None

    def _begin_staging(
        self,
        save_id: SaveId,
        description: snapshot.Description,
        items: SaveItems,
        slot: Slot | None,
        due: frozenset[str],
    ) -> tuple[DiskFlush | None, staging.Staging | None, tuple[LocalReplica, ...]]:
        if slot is None:
            return None, None, ()
        self._pace.begin_urgent(save_id)
        disk = None
        try:
            if SSD in due:
                disk = self._flusher.begin_disk(save_id, slot, description.extents, description.slot_bytes)
            copied = disk.copy.filled if disk is not None else None
            local_replicas, compared = self._replicas.shards(description, items.trees)
            return (
                disk,
                staging.begin(self._choice, description, items.trees, slot.memory, copied, compared),
                local_replicas,
            )
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
        self._flusher.drain()

    def wait_decided(self, deadline: Deadline) -> bool:
        """Waits until all processes have taken every save so far, or dropped it; False where time ran out first."""
        return self._writer.wait_idle(deadline.left_s)

    def settle(self, deadline: Deadline) -> bool:
        """Waits for every tier as `wait` does, but until `deadline`; False where some are not done. Raises nothing."""
        return self._writer.wait_idle(deadline.left_s) and self._flusher.settle(deadline)

    @property
    def busy(self) -> bool:
        """Whether a save is still on its way."""
        return not (self._writer.idle and self._flusher.idle)

    def raise_failure(self) -> None:
        """Raises the first background failure that was not raised yet, once; later ones are in its notes."""
        self._outcomes.raise_failure()

    def raise_if_stopped(self) -> None:
        """Raises what no save is to be taken after: replicas that differ (`ReplicaPolicy`)."""
        self._outcomes.raise_if_stopped()

    def go_on(self) -> None:
        """The run continues from a step that was restored."""
        self._outcomes.go_on()

    def raise_if_closed(self) -> None:
        """Raises `CheckpointError` after `close`: the slots may be another run's by now."""
        if self._closed:
            raise CheckpointError("the manager was closed and saves nothing any more; make another one")

    def close(self) -> None:
        """Finishes what is under way and joins the threads."""
        self._closed = True
        self._writer.close()
        self._flusher.close()
        self._maker.close()

    # In the writer thread.

    def _commit(self, save: Save, refusal: Refusal | None) -> None:
        try:
            self._commit_and_vote(save, refusal)
        except Exception as error:  # noqa: BLE001  the top of a thread: whoever asks for errors is to hear of it
            self._outcomes.failed(save.save_id, self._tiers.staging_name, error)
        finally:
            self._pace.end_urgent(save.save_id)
            if save.disk is not None and not save.disk.decided.done():
                save.disk.leave_out()
            with self._changed:
                self._in_flight -= save.slot is not None
                self._changed.notify_all()

    def _commit_and_vote(self, save: Save, refusal: Refusal | None) -> None:
        """Finish staging, compare replicas, manifest, local commit, vote; then on to the slower tiers."""
        digests, failed = self._tried(save, lambda: self._finish_staging(save))
        staged = digests if save.staging is not None else None
        # Every process comes, also one that has staged nothing.
        differing, failed_too = self._tried(
            save, lambda: self._replicas.compare(save.save_id, save.description, save.local_replicas, staged)
        )
        refusal, sealed = refusal or failed or failed_too or differing, None
        if save.slot is not None and digests is not None and refusal is None:
            slot, found = save.slot, digests
            sealed, refusal = self._tried(save, lambda: self._commit_here(save, slot, found))
        try:
            refusals = self._outcomes.vote("commit", save.save_id, refusal)
        except CheckpointError as error:
            self._leave_undecided(save, error)
            return
        if refusals is not None:
            self._drop(save, refusals)
            return
        assert sealed is not None
        assert save.slot is not None
        try:
            self._outcomes.committed(save, self._tiers.staging_name, self._tiers.staging)
            self._release_undecided()
            self._pace.end_urgent(save.save_id)
            self._flusher.flush(save, save.slot, sealed)
        finally:
            self._tiers.staging.release(save.slot)

    def _tried(self, save: Save, act: Callable[[], _T]) -> tuple[_T | None, Refusal | None]:
        """What `act` gives; or why not, for the vote, reported here and stored."""
        try:
            return act(), None
        except StoreFullError as error:
            self._outcomes.no_room(save.save_id, self._tiers.staging_name, error, save.due)
            return None, Refusal(policy="veto", reason=describe(error))
        except Exception as error:  # noqa: BLE001  the top of a thread
            self._outcomes.failed(save.save_id, self._tiers.staging_name, error)
            return None, Refusal(policy="veto", reason=describe(error))

    def _finish_staging(self, save: Save) -> Mapping[int, snapshot.Digests]:
        try:
            if save.staging is None:
                return {}
            digests = save.staging.finish()
            self._outcomes.phase(save.save_id, "staged", self._tiers.staging_name)
            return digests
        finally:
            with self._changed:
                self._unstaged -= 1
                self._changed.notify_all()

    def _commit_here(self, save: Save, slot: Slot, digests: Mapping[int, snapshot.Digests]) -> SealedSave:
        self._claim.claim(save.save_id)
        sealed = SealedSave(
            save_id=save.save_id,
            writer=self._writer_record,
            description=save.description,
            digests=digests,
            inline=save.items.inline,
            text=self._text_of(save.description),
        )
        if self._tiers.staging.directory is not None:
            self._tiers.staging.commit(slot, save.save_id, sealed.text_for(slot))
        self._outcomes.phase(save.save_id, "committed_here", self._tiers.staging_name)
        return sealed

    def _text_of(self, description: snapshot.Description) -> ManifestText:
        """What manifests of a description have in common; a loop saves the same description again and again."""
        if self._text is None or self._text[0] is not description:
            records = {item: tuple(s.record for s in sources) for item, sources in description.items.items()}
            self._text = (description, ManifestText(records))
        return self._text[1]

    def _leave_undecided(self, save: Save, error: CheckpointError) -> None:
        """Nobody here knows the verdict. What is committed here stays, and its slot stays leased until a newer save is
        committed by all: others may count on it at the restart."""
        self._outcomes.failed(save.save_id, self._tiers.staging_name, error)
        if save.slot is not None:
            self._undecided.append(save.slot)
            if self._tiers.staging.directory is None:  # nothing of it outlives the process
                self._release_undecided()

    def _release_undecided(self) -> None:
        while self._undecided:
            self._tiers.staging.release(self._undecided.pop())

    def _drop(self, save: Save, refusals: Refusal) -> None:
        if save.slot is not None:
            try:
                self._tiers.staging.discard(save.slot)
            except (CheckpointError, OSError) as error:  # no save is to keep its slot for ever
                self._outcomes.degraded(save.save_id.step, self._tiers.staging_name, error)
            finally:
                self._tiers.staging.release(save.slot)
        self._outcomes.skipped(save.save_id, self._tiers.staging_name, refusals, gone=True)
