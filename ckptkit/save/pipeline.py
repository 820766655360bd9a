"""The life of a save: stage on the step loop, copying and digesting; then, in the background, commit, vote, flush.

A save is taken by a decision that is the same on every process. Whether it succeeds is voted in the background:
one process that could not stage it, or was too busy to, drops it everywhere. The step loop waits for nothing but its
own copy, and, when a durable save is due (`durable_busy="wait"`), for the previous durable save.

The copy runs on a thread of the pipeline while the caller waits for it. An exception that a signal raises in the caller
(Ctrl-C) can interrupt the wait, and never the thread that holds a slot. The caller then takes its values back
(`take_back`): a copy that has not begun never begins, the caller waits for one that has, and the save is dropped by
vote.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.errors import CheckpointError, SaveFailedError, StoreFullError, heard_from
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import SaveId, Writer
from ckptkit.model.policies import SaveOptions
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.save.circuit_breaker import DurableRetry
from ckptkit.save.commit_log import CommitLog
from ckptkit.save.fence import EpochFence
from ckptkit.save.first_tier import FirstWork, Sealer
from ckptkit.save.flusher import Flusher
from ckptkit.save.ledger import OVERTAKEN, Branch
from ckptkit.save.outcomes import Outcomes, describe
from ckptkit.save.protocol import Ask, Do, Idle, Machinery, SaveProtocol, Veto, Wait, drive
from ckptkit.save.records import Admission, Refusal, Save, SaveTargets, Snapshot, Ticket
from ckptkit.save.replica_check import ReplicaComparison
from ckptkit.save.retention import Retention
from ckptkit.save.slot_maker import SlotMaker
from ckptkit.save.under_way import SavesUnderWay, StallWatch, described
from ckptkit.save.voting import Voting
from ckptkit.slots.files import Slot
from ckptkit.snapshot.describe import Describer, Description
from ckptkit.snapshot.items import SaveItems
from ckptkit.util import clock, heartbeat
from ckptkit.util.clock import Deadline
from ckptkit.util.notice import Notice, Promise

VOTES_WAITING_MAX = 1024  # of saves that came too early: a few hundred bytes each
_SAID_EVERY_S = 10.0  # of a wait for the copy: new slots are touched for the first time
_SAID_AFTER_S = 1.0  # of waiting for earlier saves, as Orbax logs it

_log = logging.getLogger("ckptkit")


class SavePipeline:
    """Owner of the threads of a save. Every method but `submit` may be called on one process alone.

    `describe` describes a save of some trees, and raises for leaves that cannot be saved. `slots` makes the slots of
    future saves. `outcomes` records failures. `flusher` fills the slower tiers.
    """

    def __init__(
        self,
        tiers: SaveTargets,
        job: Job,
        writer: Writer,
        branch: Branch,
        retention: Retention,
        options: SaveOptions,
        machinery: Machinery,
    ):
        self._tiers = tiers
        self._pace = tiers.durable.pace  # the durable tier lets a save pass until its first commit
        self._coordinator = job.coordinator
        self._events = job.events
        self._branch, self._ledger = branch, branch.ledger
        self._options = options
        self._counting = threading.Lock()  # not taken by the step loop
        self._notice = Notice()
        self._staged = 0.0  # the order of the newest save in the staging thread
        self._unstaged = 0  # saves that still refer to the caller's arrays
        self._in_flight = 0  # snapshots that are taken and not yet committed, or dropped, by all
        self._closed = False
        self._machinery = machinery
        self.describe = Describer()
        self.under_way = SavesUnderWay(lambda: tiers.durable.pace.taken_bytes)
        self.outcomes = Outcomes(tiers, job, branch.ledger, retention, options.on_failure, self.under_way)
        log = CommitLog(branch.ledger, self.outcomes.booked)
        self.voting = Voting(log, self.outcomes, job.coordinator.process, self._held, branch.order)
        self.slots = SlotMaker(tiers, retention, self.outcomes, self._machinery)
        self._replicas = ReplicaComparison(options.replicas, job, self.outcomes, writer.host)
        self._claim = EpochFence(tiers, job.coordinator, branch.ledger, self.outcomes)
        self._durable_retry = DurableRetry(options.on_failure, job, self.voting, log)
        self.flusher = Flusher(
            tiers, branch.ledger, self.outcomes, self.voting, self._claim, self._durable_retry, self._machinery
        )
        self._sealer = Sealer(tiers, self._claim, writer, self.outcomes)
        self._report_losses()
        self._stager = self._machinery.make_worker("ckptkit-stage", waiting_max=1)
        self._writer = self._machinery.make_worker("ckptkit-writer", waiting_max=VOTES_WAITING_MAX)

    def _report_losses(self) -> None:
        """An event for each directory of slots whose files go while the run lives."""
        tiers = self._tiers
        peer_arenas = () if tiers.peer_copies is None else tiers.peer_copies.peer_arenas
        disk = () if tiers.disk is None else ((SSD, tiers.disk),)
        for tier, arena in ((tiers.staging_name, tiers.staging), *disk, *((PEER, each) for each in peer_arenas)):
            arena.on_lost = partial(self.outcomes.degraded, None, tier)

    def run(self, protocol: SaveProtocol) -> Any:
        """Runs a protocol on the caller's thread."""
        return drive(protocol, self._coordinator)

    def await_turn(self, due: frozenset[str], *, must_wait: bool, last: Deadline | None = None) -> SaveProtocol:
        """Waits for the saves before one that is due in the durable tier, on the step loop's thread.

        Waits at most as long as for other processes. A save that is due in fast tiers alone does not wait. Nor does a
        save, unless it is a `must_wait`, if early saves are skipped or the durable tier fails. The last save of a run
        has until `last`. It waits for the writer, and a little for peers and disk. It queues behind a durable save, so
        that the faster tiers do not wait. Returns an `Admission`.
        """
        forced = last is not None or must_wait
        patient = self._options.durable_busy == "wait" and not self._durable_retry.failing
        waits = last is not None or (DURABLE in due and (must_wait or patient))
        was_busy, waiting_s = waits and self.busy, clock.monotonic_s()
        deadline = last or Deadline(self._coordinator.timeout_s if waits else 0.0)
        before = described(self.under_way.left())
        wait = partial(self._await_earlier, durable=last is None, patient=must_wait)
        in_time = not waits or (yield from self._say_waiting(wait, deadline))
        if last is not None:
            yield from self.flusher.wait_fast(Deadline(last.left_s / 2))
        elif waits and not in_time and not must_wait and self._durable_retry.failing:
            waits, in_time, deadline = False, True, Deadline(0.0)
        waited_s = clock.monotonic_s() - waiting_s
        if waited_s > _SAID_AFTER_S:
            _log.warning("save waited %.1f s for the previous save: %s", waited_s, before)
        return Admission(
            waits=waits, forced=forced, was_busy=was_busy, in_time=in_time, waited_s=waited_s, deadline=deadline
        )

    def _await_earlier(self, deadline: Deadline, *, durable: bool, patient: bool) -> SaveProtocol:
        in_time = yield from self.wait_decided(deadline)  # a signal handler finds the save it interrupts being staged
        if in_time and durable:
            in_time = yield from self.flusher.wait_durable(deadline, patient=patient)
        return in_time

    def _say_waiting(self, wait: Callable[[Deadline], SaveProtocol], deadline: Deadline) -> SaveProtocol:
        """Waits, and logs for what where that takes longer than a moment."""
        if (yield from wait(Deadline(min(_SAID_AFTER_S, deadline.left_s)))):
            return True
        if deadline.passed:
            return False
        left = described(self.under_way.left())
        _log.warning("save waits for the previous save, %.0f s at most: %s", deadline.left_s, left)
        return (yield from wait(deadline))

    def veto(self, name: str, error: BaseException) -> SaveProtocol:
        """This process raises in the call `name` of `save`: the others drop the save at once. Raises nothing."""
        if self._coordinator.count == 1:
            return
        ballot, judge = self.voting.veto_of(error)

        def no_identity() -> None:
            kind = SaveFailedError if isinstance(error, SaveFailedError) else CheckpointError
            raise kind(f"the save raised: {describe(error)}")

        try:
            if self._replicas.refuses:
                yield self._replicas.veto(name)
            yield Veto("commit", name, ballot, judge)
        except CheckpointError as failure:  # the others time out, and drop it then
            _log.warning("save %s: its error could not be sent to the other processes: %s", name, failure)
        if self._coordinator.process == 0:  # the others ask for it before they vote
            with suppress(CheckpointError):
                yield Ask("identity", name, no_identity)

    def submit(
        self,
        ticket: Ticket,
        items: SaveItems,
        description: Description,
        due: frozenset[str],
        metrics: Any,
        start_s: float,
        turn: Admission,
    ) -> SaveProtocol:
        """Stages the state and hands the save over; returns once the caller may donate the state.

        Blocks for one copy of this process's boxes. A save beyond `in_flight_max` snapshots is not staged, and is
        dropped by vote. A save that waits for its turn (`await_turn`) also waits here for a free slot, for the rest of
        its time, and is then dropped by vote. `start_s` is when the step loop was stopped (monotonic). Raises errors of
        staging (a deleted array), and errors that end all saves (replicas that differ); the save is then dropped by
        vote.
        """
        save = Save(
            ticket=ticket,
            items=replace(items, trees={}, inline={}, durable={}),
            description=description,
            due=due,
            forced=turn.forced,
            metrics=metrics,
            snapshot=None,
            staged_s=clock.monotonic_s(),
        )
        staged: Promise[None] = Promise()
        self._stager.submit(lambda: self._stage(save, items, start_s, turn, staged))
        while True:
            try:
                return (yield Wait(staged, _SAID_EVERY_S))
            except TimeoutError:
                if staged.done():
                    raise
                _log.info("save waits: step %d gets its slot and its copy", save.save_id.step)

    def take_back(self, ticket: Ticket) -> bool:
        """The caller of `submit` raises: nothing of its values is read once this returns, and nothing that was read
        meanwhile is committed. A snapshot that was complete before is committed as usual.

        Returns whether the pipeline votes on the save. Waits for a copy that has begun.
        """
        ticket.loan.withdraw()
        return not self._stager.idle or ticket.loan.received  # in this order: a queued job is one or the other

    # In the staging thread.

    def _stage(
        self, save: Save, items: SaveItems, start_s: float, turn: Admission, staged: Promise[None]
    ) -> SaveProtocol:
        """Stages a save and hands it to the writer; the caller waits for `staged`."""
        try:
            yield from self._stage_and_hand_over(save, items, start_s, turn)
        except BaseException as error:  # noqa: BLE001  raised by the caller, who waits for it
            staged.set_exception(error)
        else:
            staged.set_result(None)

    def _stage_and_hand_over(self, save: Save, items: SaveItems, start_s: float, turn: Admission) -> SaveProtocol:
        description, save_id = save.description, save.save_id
        save.ticket.loan.received = True
        self.under_way.begin(save_id.step, save.due, share_bytes=description.held_bytes)
        self.outcomes.phase(save_id, "begun")
        try:
            self.outcomes.raise_if_stopped()
            self.slots.size(description.slot_bytes, description.share_bytes)
            waiting_s = clock.monotonic_s()
            slot, refusal = yield from self._admit(save, turn)
            waited_s = turn.waited_s + clock.monotonic_s() - waiting_s
            snapshot = None if slot is None else (yield from self._begin_staging(save, items, slot))
        except BaseException as error:  # the caller raises it; the others learn it in the vote
            self._hand_over(save, Refusal(policy="veto", reason=describe(error)))
            raise
        staged_s = clock.monotonic_s()
        self._ledger.begin(save_id)
        if snapshot is not None:
            # A reference to the trees, held in the background, would keep device memory in use.
            save = replace(save, items=replace(items, trees={}), snapshot=snapshot, staged_s=staged_s)
            computing_s = snapshot.staging.computing_s
            stall_s = max(0.0, staged_s - start_s - computing_s)
            heartbeat.staged(max(0.0, stall_s - waited_s), computing_s)
            self._events.emit(
                Kind.STAGED,
                step=save_id.step,
                strategy=snapshot.staging.strategy,
                reason=snapshot.staging.reason,
                bytes=description.held_bytes,
                tiers=sorted(save.due),
                stall_s=round(stall_s, 6),
                waited_s=round(waited_s, 6),
                computing_s=round(computing_s, 6),
                **({"tree_bytes": description.tree_bytes} if DURABLE in save.due else {}),
                **({"policy": "wait"} if turn.was_busy else {}),
            )
        self._hand_over(save, refusal)
        self.slots.reserve(description.slot_bytes)  # the other slots: the next saves find them made

    def _hand_over(self, save: Save, refusal: Refusal | None) -> None:
        with self._counting:
            self._unstaged += 1
            self._in_flight += save.snapshot is not None
        self._writer.submit(lambda: self._commit(save, refusal))

    def _admit(self, save: Save, turn: Admission) -> SaveProtocol:
        """A slot for the next snapshot, or why this process has none; waits for one where it was its turn to wait.

        Which of the two is a local matter of timing, so it decides nothing: the refusal goes into the vote.
        """
        if self._branch.order(save.name) < self._staged:
            return None, Refusal(policy="skip", reason=OVERTAKEN)
        self._staged = self._branch.order(save.name)
        if not turn.in_time:
            timeout_s = self._coordinator.timeout_s
            return None, Refusal(policy="wait", reason=f"earlier saves were not done within {timeout_s:.1f} s")
        in_flight, in_flight_max = self._in_flight, self._options.in_flight_max
        if in_flight >= in_flight_max:
            reason = f"too early: snapshots in flight: {in_flight}, in_flight_max={in_flight_max}"
            return None, Refusal(policy="skip", reason=reason)
        staging, name, size_bytes = self._tiers.staging, self._tiers.staging_name, save.description.slot_bytes
        try:
            slot = yield Do("take a slot", lambda: staging.acquire(size_bytes, timeout_s=turn.deadline.left_s))
        except StoreFullError as error:
            self.outcomes.no_room(save.save_id, name, error, save.due)
            return None, Refusal(policy="veto", reason=describe(error))
        except (CheckpointError, OSError) as error:  # a mount that became read-only, for example: training continues
            self.outcomes.failed(save.save_id, name, error)
            return None, Refusal(policy="veto", reason=describe(error))
        if slot is None:
            reason = "no free slot: slower tiers still read the others, or they are still being made"
            return None, Refusal(policy="wait" if turn.waits else "skip", reason=reason)
        return slot, None

    def _begin_staging(self, save: Save, items: SaveItems, slot: Slot) -> SaveProtocol:
        description = save.description
        self._pace.begin_urgent(save.save_id)
        disk = None
        try:
            if SSD in save.due:
                disk = self.flusher.begin_disk(save, slot, description.extents, description.slot_bytes)
            copied = disk.copy.filled if disk is not None else None
            local_replicas, compared = self._replicas.shards(description, items.trees)
            begin, choice = self._machinery.begin_staging, self._options.staging
            with save.ticket.loan.reading():
                begun = yield Do(
                    "stage", lambda: begin(choice, description, items.trees, slot.memory, copied, compared)
                )
                if save.ticket.loan.withdrawn:
                    begun.finish()  # gives back the memory of its transfers
            return Snapshot(slot=slot, staging=begun, disk=disk, local_replicas=local_replicas)
        except BaseException:  # a deleted array, for example: the caller raises it, the slot is free again
            self._pace.end_urgent(save.save_id)
            if disk is not None:
                disk.leave_out()
            self._tiers.staging.release(slot)
            raise

    def wait_until_staged(self) -> None:
        """Waits until no save refers to the arrays that it was given."""
        self._stager.drain()
        self._notice.wait_for(lambda: self._unstaged == 0)

    def wait(self) -> None:
        """Waits until every save that was taken is in all the tiers it was due in, or has failed."""
        self._stager.drain()
        self._writer.drain()
        self.flusher.drain()

    def wait_or_stall(self, limit_s: float) -> SaveProtocol:
        """Waits as `wait` does, for as long as saves advance; False where nothing did for `limit_s`."""
        watch = StallWatch(self.under_way, limit_s)
        while not (yield from self.settle(watch.look())):
            if watch.stalled:
                return False
        return True

    def wait_decided(self, deadline: Deadline) -> SaveProtocol:
        """Waits until all processes have taken every save so far, or dropped it; False where time ran out first."""
        return (yield Idle(self._stager, deadline.left_s)) and (yield Idle(self._writer, deadline.left_s))

    def settle(self, deadline: Deadline) -> SaveProtocol:
        """Waits for every tier as `wait` does, but until `deadline`; False where some are not done. Raises nothing."""
        return (
            (yield from self.wait_decided(deadline))
            and (yield from self.flusher.wait_fast(deadline))
            and (yield from self.flusher.wait_durable(deadline))
        )

    def synchronise(self, about: str) -> SaveProtocol:
        """Before a restore: every process learns what it missed of process 0's decisions, and counts on as it does.

        No save may be in flight. Raises `CoordinationError` if the exchange fails, and the error that another process
        raised instead (`withdraw`).
        """

        def decide(values: list[Any]) -> Any:
            raised = [(process, value["error"]) for process, value in enumerate(values) if value and value["error"]]
            if raised:
                raise heard_from(raised[0][0], *raised[0][1])
            return values[0]["state"]

        value = {"state": self._branch.state(), "error": None}
        state = yield from self.voting.agree(
            "synchronise", about, value, decide, lambda each: each["error"] is not None
        )
        self._branch.synchronise(state)

    def withdraw(self, about: str, error: BaseException) -> SaveProtocol:
        """This process raises in the call `about` before `synchronise`: the others raise at once. Raises nothing."""
        if self._coordinator.count == 1:
            return
        said = [type(error).__name__, str(error)]

        def fail(_: list[Any]) -> None:
            raise heard_from(self._coordinator.process, *said)

        value = {"value": {"state": None, "error": said}, "known": self.voting.known()}
        try:
            yield Veto("synchronise", about, value, fail)
        except CheckpointError as failure:  # the others time out
            _log.warning("%s: its error could not be sent to the other processes: %s", about, failure)

    @property
    def busy(self) -> bool:
        """Whether a save is still in flight."""
        return not (self._stager.idle and self._writer.idle and self.flusher.idle)

    @property
    def directory(self) -> Path | None:
        """A directory of this process alone in the first tier that has one: it is cleaned at the next start."""
        disk = self._tiers.disk
        return self._tiers.staging.directory or (None if disk is None else disk.directory)

    def raise_if_closed(self) -> None:
        """Raises `CheckpointError` after `close`: the slots may be another run's by now."""
        if self._closed:
            raise CheckpointError("the manager was closed and saves nothing any more; make another one")

    def close(self, deadline: Deadline) -> bool:
        """Finishes what is under way and joins the threads; False where some still run at the deadline."""
        self._closed = True
        ended = self._stager.close(deadline.left_s)
        ended = self._writer.close(deadline.left_s) and ended
        ended = self.flusher.close(deadline) and ended
        return self.slots.close(deadline.left_s) and ended

    def _held(self, tier: str) -> list[SaveId] | None:
        """The saves that this process has committed in a fast tier."""
        if tier == PEER:
            return None  # the copies of others are not what this process holds
        arena = self._tiers.disk if tier == SSD else self._tiers.staging
        return [] if arena is None else arena.held()

    # In the writer thread.

    def _commit(self, save: Save, refusal: Refusal | None) -> SaveProtocol:
        work = FirstWork(save, self._sealer, self._replicas, self._branch, self.flusher)
        slot = None if save.snapshot is None else save.snapshot.slot
        try:
            if self._coordinator.process == 0:  # also where it refuses: the others wait for it
                try:
                    yield from work.identify()
                except Exception as error:  # noqa: BLE001  voted on
                    refusal = self.outcomes.refused(save, self._tiers.staging_name, error)
            if slot is not None:
                self._tiers.staging.lease(slot)  # until the slower tiers have theirs
            yield from self._finish_staging(work)
            refusal = yield from work.compare(refusal)
            verdict = yield from self.voting.run(work, refusal=refusal)
            self._pace.end_urgent(save.save_id)
            if verdict is not None and verdict.refusal is None and slot is not None and work.sealed is not None:
                self.flusher.flush(work.save, slot, work.sealed, work.refused_later(verdict))
        except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
            self.outcomes.failed(work.save.save_id, self._tiers.staging_name, error)
        finally:
            self.flusher.end(work.save)
            self._end(save)
            if slot is not None:
                self._tiers.staging.release(slot)

    def _finish_staging(self, work: FirstWork) -> SaveProtocol:
        """Moves the rest of the state, and releases the caller's arrays. Errors are raised in the vote."""
        try:
            yield from work.finish_staging()
        finally:
            with self._counting:
                self._unstaged -= 1
            self._notice.give()

    def _end(self, save: Save) -> None:
        self._pace.end_urgent(save.save_id)
        if save.snapshot is not None and save.snapshot.disk is not None:
            save.snapshot.disk.leave_out()
        with self._counting:
            self._in_flight -= save.snapshot is not None
