"""The life of a save: stage on the step loop; then, in the background, digest, commit, vote, flush.

A save is taken by a decision that is the same on every process. Whether it succeeds is voted in the background:
one process that could not stage it drops it everywhere. The step loop waits for nothing but its own copy, and,
when a durable save is due, for the previous durable save.
"""

from __future__ import annotations

import threading
import traceback
from dataclasses import replace
from typing import Any

from ckptkit import clock, snapshot, staging
from ckptkit.arena import Arena, Slot
from ckptkit.coordination import Coordinator
from ckptkit.durable.steps import host_tree
from ckptkit.errors import CheckpointError, SaveFailedError
from ckptkit.events import EventLog, Kind
from ckptkit.flush import Worker, commit_slot, copy_slot
from ckptkit.manager.book import Book
from ckptkit.manager.failing import DurableUpkeep
from ckptkit.manager.items import SaveItems
from ckptkit.manager.taken import DURABLE, MEMORY, Save, Tiers, with_shardings
from ckptkit.manifest import Manifest, SaveId, Writer
from ckptkit.policy import FailurePolicy


class SavePipeline:
    """Owner of the background threads. Every method but `submit` may be called on one process alone."""

    def __init__(
        self,
        tiers: Tiers,
        coordinator: Coordinator,
        writer: Writer,
        book: Book,
        events: EventLog,
        timeout_s: float,
        choice: str,
        on_failure: FailurePolicy = FailurePolicy(),  # noqa: B008  frozen
    ):
        self._tiers = tiers
        self._coordinator = coordinator
        self._writer_record = writer
        self._book = book
        self._events = events
        self._timeout_s = timeout_s
        self._upkeep = DurableUpkeep(on_failure, coordinator, events, timeout_s)
        self._claimed: int | None = None
        self._failures: list[SaveFailedError] = []
        self._choice = staging.checked_choice(choice)
        self._staged = threading.Condition()
        self._unstaged = 0
        self._prepared_bytes = 0
        self._describer = snapshot.Describer(with_shardings)
        self._maker = Worker("ckptkit-arena", waiting_max=4)
        self._writer = Worker("ckptkit-writer", waiting_max=8)
        self._disk = Worker("ckptkit-disk", waiting_max=1)
        self._durable = Worker("ckptkit-durable", waiting_max=1)

    def describe(self, items: SaveItems) -> snapshot.Description:
        """What a save of `items` will hold; raises for leaves that cannot be saved, before anything is taken."""
        return self._describer(items.trees)

    def prepare(self, slot_bytes: int) -> None:
        """Begins to make the slots of every fast tier in the background, for saves of `slot_bytes`.

        Raises `StoreFullError` where a tier has no room for its slots, with the bytes needed and free.
        """
        arenas = [arena for arena in (self._tiers.staging, self._tiers.disk) if arena is not None]
        for arena in arenas:
            arena.check_room(slot_bytes)
        self.reserve(slot_bytes)

    def reserve(self, slot_bytes: int) -> None:
        """What `prepare` begins, without asking for room first: a tier that has none says so in an event."""
        if self._prepared_bytes >= slot_bytes:
            return
        self._prepared_bytes = slot_bytes

        def reserve(arena: Arena, tier: str) -> None:
            try:
                arena.reserve(slot_bytes)
            except CheckpointError as error:
                self._events.emit(Kind.DEGRADED, tier=tier, reason=self._describe(error))

        self._maker.submit(lambda: reserve(self._tiers.staging, self._tiers.staging_name))
        if (disk := self._tiers.disk) is not None:
            self._maker.submit(lambda: reserve(disk, "ssd"))

    def submit(
        self,
        save_id: SaveId,
        items: SaveItems,
        description: snapshot.Description,
        due: frozenset[str],
        metrics: Any,
        start_s: float,
    ) -> None:
        """Stages the state and hands the save over; returns once the caller may donate the state.

        Blocks for one copy of this process's boxes; with a durable save due, also for the previous durable save
        and for a free slot (at most `timeout_s`, then the save is dropped by vote). `start_s` is when the step loop
        was stopped (monotonic).
        """
        self._phase(save_id, "begun")
        waiting_s = clock.monotonic_s()
        waits_s = 0.0
        if DURABLE in due:
            self._writer.wait_idle(self._timeout_s)
            self._durable.wait_idle(self._timeout_s)
            waits_s = self._timeout_s
        slot = self._acquire(description.slot_bytes, waits_s)
        waited_s = clock.monotonic_s() - waiting_s
        staged = self._begin_staging(description, items, slot)
        staged_s = clock.monotonic_s()
        self._book.begin(save_id)
        if staged is not None:
            self._events.emit(
                Kind.STAGED,
                step=save_id.step,
                strategy=staged.strategy,
                reason=staged.reason,
                bytes=sum(source.record.held_bytes for sources in description.items.values() for source in sources),
                stall_s=round(staged_s - start_s, 6),
                waited_s=round(waited_s, 6),
            )
        save = Save(
            save_id=save_id,
            items=replace(items, trees={}),  # a reference held in the background would keep device memory in use
            description=description,
            slot=slot,
            staging=staged,
            due=due,
            metrics=metrics,
            staged_s=staged_s,
        )
        self.reserve(description.slot_bytes)  # the other slots: the next saves find them made
        with self._staged:
            self._unstaged += 1
        self._writer.submit(lambda: self._commit(save))

    def _begin_staging(
        self, description: snapshot.Description, items: SaveItems, slot: Slot | None
    ) -> staging.Staging | None:
        if slot is None:
            return None
        try:
            return staging.begin(self._choice, description, items.trees, slot.memory)
        except BaseException:  # an array that was deleted, say: the caller hears it, the slot is free again
            self._tiers.staging.release(slot)
            raise

    def wait_until_staged(self) -> None:
        """Waits until no save refers to the arrays that it was given."""
        with self._staged:
            self._staged.wait_for(lambda: self._unstaged == 0)

    def wait(self) -> None:
        """Waits until every save that was taken is in all the tiers it was due in, or has failed."""
        self._writer.drain()
        self._disk.drain()
        self._durable.drain()

    @property
    def busy(self) -> bool:
        """Whether a save is still on its way."""
        return not (self._writer.idle and self._disk.idle and self._durable.idle)

    def raise_failure(self) -> None:
        """Raises the first background failure that was not raised yet, once; later ones are in its notes."""
        taken = []
        while self._failures:  # one by one: a thread may add one meanwhile
            taken.append(self._failures.pop(0))
        if taken:
            first, *others = taken
            for other in others:
                first.add_note(f"also: {other}")
            raise first

    def close(self) -> None:
        """Finishes what is under way and joins the threads."""
        for worker in (self._writer, self._disk, self._durable, self._maker):
            worker.close()

    # In the writer thread.

    def _commit(self, save: Save) -> None:
        """Finish staging, digest, manifest, local commit, vote; then on to the slower tiers."""
        manifest = None
        refusal = "no free slot: slower tiers still read the others, or they are still being made"
        try:
            self._finish_staging(save)
            if save.slot is not None:
                self._claim_epoch(save.save_id)
                manifest, refusal = self._digest_and_commit(save, save.slot), None
        except Exception as error:  # noqa: BLE001  the top of a thread: voted on, reported and stored below
            refusal = self._describe(error)
            self._fail(save.save_id, self._tiers.staging_name, error)
        try:
            refusals = self._vote("commit", refusal)
        except CheckpointError as error:
            self._leave_undecided(save, error)
            return
        if refusals:
            self._drop(save, refusals)
            return
        assert manifest is not None
        assert save.slot is not None
        try:
            self._committed(save, self._tiers.staging_name, self._tiers.staging, manifest)
            self._flush(save, save.slot, manifest)
        finally:
            self._tiers.staging.release(save.slot)

    def _finish_staging(self, save: Save) -> None:
        try:
            if save.staging is not None:
                save.staging.finish()
                self._phase(save.save_id, "staged", self._tiers.staging_name)
        finally:
            with self._staged:
                self._unstaged -= 1
                self._staged.notify_all()

    def _digest_and_commit(self, save: Save, slot: Slot) -> Manifest:
        records = snapshot.digest_records(save.description, slot.memory)
        manifest = Manifest(
            save_id=save.save_id,
            writer=self._writer_record,
            slot=slot.name,
            arrays=records,
            inline=save.items.inline,
        )
        self._phase(save.save_id, "digested", self._tiers.staging_name)
        if self._tiers.staging.directory is not None:
            self._tiers.staging.commit(slot, manifest)
        self._phase(save.save_id, "committed_here", self._tiers.staging_name)
        return manifest

    def _claim_epoch(self, save_id: SaveId) -> None:
        """Process 0 records the run's epoch before its first save can be committed anywhere."""
        if self._coordinator.process != 0 or self._claimed == save_id.epoch:
            return
        try:
            self._tiers.epochs.write(self._book.ancestry)
            self._claimed = save_id.epoch
        except FileExistsError as error:
            raise CheckpointError(
                f"another run has begun epoch {save_id.epoch} in {self._tiers.durable.url}; stop one of the two",
                step=save_id.step,
                path=self._tiers.durable.url,
            ) from error
        except CheckpointError as error:  # unreachable: tried again with the next save, training goes on
            self._events.emit(Kind.DEGRADED, step=save_id.step, tier=DURABLE, reason=self._describe(error))

    def _flush(self, save: Save, slot: Slot, manifest: Manifest) -> None:
        disk = self._tiers.disk
        if disk is not None and "ssd" in save.due:
            # Whether the disk is still busy with an older step is a local matter, so it is voted on.
            refusals = self._vote("disk", None if self._disk.idle else "still writing an older step")
            if refusals:
                self._events.emit(Kind.SKIPPED, step=save.save_id.step, tier="ssd", reason=refusals)
                if DURABLE not in save.due:
                    self._book.fail(save.save_id)  # no tier will hold it (one that holds it already stays)
            else:
                self._tiers.staging.lease(slot)
                self._disk.submit(lambda: self._flush_to_disk(save, slot, manifest, disk))
        if DURABLE in save.due:
            self._tiers.staging.lease(slot)
            self._durable.submit(lambda: self._flush_to_durable(save, slot, manifest))

    # In the disk thread.

    def _flush_to_disk(self, save: Save, slot: Slot, manifest: Manifest, disk: Arena) -> None:
        copied, refusal = None, None
        self._phase(save.save_id, "begun", "ssd")
        try:
            copied = copy_slot(slot, manifest, save.description.slot_bytes, disk)
            self._phase(save.save_id, "copied", "ssd")
            commit_slot(copied, manifest, disk)
            self._phase(save.save_id, "committed_here", "ssd")
        except Exception as error:  # noqa: BLE001  the top of a thread: voted on, reported and stored
            refusal = self._describe(error)
            self._fail(save.save_id, "ssd", error)
        finally:
            self._tiers.staging.release(slot)
        try:
            refusals = self._vote("disk-commit", refusal)
            if refusals and copied is not None:
                disk.discard(copied)
            if refusals and DURABLE not in save.due:
                self._book.fail(save.save_id)
            if not refusals:
                self._committed(save, "ssd", disk, manifest)
        except CheckpointError as error:  # nobody knows the verdict: what is committed here stays
            self._fail(save.save_id, "ssd", error)
        if copied is not None:
            disk.release(copied)

    # In the durable thread.

    def _flush_to_durable(self, save: Save, slot: Slot, manifest: Manifest) -> None:
        self._phase(save.save_id, "begun", DURABLE)
        try:
            self._fence(save.save_id)
            self._upkeep.attempt(
                save.save_id.step,
                lambda: self._tiers.durable.save(
                    save.save_id,
                    {**self._array_items(save, slot, manifest), **save.items.durable},
                    metrics=save.metrics,
                    default_item=save.items.default_item,
                    ancestry=self._book.ancestry,
                    custom_metadata=save.items.custom_metadata,
                ),
                lambda: self._tiers.durable.holds(save.save_id),
            )
            self._phase(save.save_id, "committed_here", DURABLE)
            self._committed(save, DURABLE, None, manifest)
        except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
            self._fail(save.save_id, DURABLE, error)
        finally:
            self._tiers.staging.release(slot)

    def _array_items(self, save: Save, slot: Slot, manifest: Manifest) -> dict[str, Any]:
        items = {}
        for item, sources in save.description.items.items():
            leaves = [
                (leaf, source.holders, {r.box: snapshot.box_array(r, leaf, slot.memory) for r in leaf.boxes})
                for leaf, source in zip(manifest.arrays[item], sources, strict=True)
            ]
            items[item] = host_tree(
                leaves,
                save.description.treedefs[item],
                manifest,
                item,
                lambda: self._phase(save.save_id, "written", DURABLE),
                **save.items.durable_tree_words(item),
            )
        return items

    def _fence(self, save_id: SaveId) -> None:
        """Refuses to commit durably once a later run has begun: its branch must not be overtaken by this one."""

        def newest(_: list[Any]) -> int:
            return self._tiers.epochs.read().epoch

        epoch = self._coordinator.agree("fence", None, newest, timeout_s=self._timeout_s)
        if epoch > save_id.epoch:
            raise CheckpointError(
                f"step {save_id.step} is not committed to {self._tiers.durable.url}: this run has epoch "
                f"{save_id.epoch}, and a later run has begun epoch {epoch} there; stop this run",
                step=save_id.step,
                tier=DURABLE,
            )

    def follow(self, save_id: SaveId) -> None:
        """Waits in the durable thread for a save that Orbax has begun on the caller's thread, and reports its end."""
        started_s = clock.monotonic_s()

        def finish() -> None:
            try:
                self._claim_epoch(save_id)
                durable = self._tiers.durable
                landed = lambda: durable.holds(save_id)  # noqa: E731
                self._upkeep.attempt(save_id.step, durable.finish_by_orbax, landed, repeatable=False)
                self._book.commit(save_id, DURABLE)
                self._keep_durable()
                duration_s = round(clock.monotonic_s() - started_s, 6)
                self._events.emit(Kind.COMMITTED, step=save_id.step, tier=DURABLE, bytes=0, duration_s=duration_s)
            except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
                self._fail(save_id, DURABLE, error)

        self._durable.submit(finish)

    def wait_durable_idle(self) -> None:
        """Waits until no save is on its way to the durable tier, for at most the time-out."""
        self._writer.wait_idle(self._timeout_s)
        self._durable.wait_idle(self._timeout_s)

    def raise_if_overdue(self, step: int, due: frozenset[str]) -> None:
        """Raises `SaveFailedError` where the durable tier has been failing for too long (`DurableUpkeep`).

        With several processes it is asked at saves that are due there, when the last one has ended: all know the same.
        """
        if self._coordinator.count > 1 and DURABLE in due:
            self.wait_durable_idle()
        if self._coordinator.count == 1 or DURABLE in due:
            self._upkeep.raise_if_overdue(step)

    # In any of them.

    def _keep_durable(self) -> None:
        kept = set(self._tiers.durable.kept())
        self._book.keep_only(DURABLE, [r.save_id for r in self._book.records() if r.step in kept])

    def _committed(self, save: Save, tier: str, arena: Arena | None, manifest: Manifest) -> None:
        if tier == MEMORY:
            return
        self._book.commit(save.save_id, tier, manifest.held_bytes)
        if arena is not None:
            arena.protect(save.save_id)
            self._book.keep_only(tier, arena.held())
        else:
            self._keep_durable()
        self._events.emit(
            Kind.COMMITTED,
            step=save.save_id.step,
            tier=tier,
            bytes=manifest.held_bytes,
            duration_s=round(clock.monotonic_s() - save.staged_s, 6),
        )

    def _vote(self, channel: str, refusal: str | None) -> str | None:
        """Everybody's refusals as one sentence, None when there are none; raises where the meeting fails."""

        def joined(refusals: list[str | None]) -> str | None:
            said = [f"process {process}: {why}" for process, why in enumerate(refusals) if why is not None]
            return "; ".join(said[:4]) or None

        return self._coordinator.agree(channel, refusal, joined, timeout_s=self._timeout_s)

    def _leave_undecided(self, save: Save, error: CheckpointError) -> None:
        """Nobody here knows the verdict. What is committed here stays, and its slot stays leased: others may count on
        it at the restart."""
        self._fail(save.save_id, self._tiers.staging_name, error)

    def _drop(self, save: Save, refusals: str) -> None:
        if save.slot is not None:
            self._tiers.staging.discard(save.slot)
            self._tiers.staging.release(save.slot)
        self._book.fail(save.save_id)
        self._events.emit(Kind.SKIPPED, step=save.save_id.step, tier=self._tiers.staging_name, reason=refusals)

    def _fail(self, save_id: SaveId, tier: str, error: Exception) -> None:
        self._book.fail(save_id)
        reason = self._describe(error)
        self._events.emit(Kind.FAILED, step=save_id.step, tier=tier, reason=reason)
        failure = SaveFailedError(
            f"step {save_id.step} was not committed to tier {tier}: {reason}", step=save_id.step, tier=tier
        )
        failure.__cause__ = error
        self._failures.append(failure)

    def _acquire(self, size_bytes: int, waits_s: float) -> Slot | None:
        try:
            return self._tiers.staging.acquire(size_bytes, timeout_s=waits_s)
        except CheckpointError as error:  # no room: the tier is degraded, training goes on
            self._events.emit(Kind.DEGRADED, tier=self._tiers.staging_name, reason=self._describe(error))
            return None

    def _phase(self, save_id: SaveId, phase: str, tier: str | None = None) -> None:
        self._events.emit(Kind.PHASE, step=save_id.step, tier=tier, phase=phase)

    def _describe(self, error: BaseException) -> str:
        return "".join(traceback.format_exception_only(error)).strip()
