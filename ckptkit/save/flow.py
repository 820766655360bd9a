"""The whole of a save: `SaveFlow.save`, from the decision that it is due to its last tier.

An error in the step loop's thread is raised by the call, and the pipeline vetoes the save in this process's name. In
the later threads a process that cannot do its part votes with `save.refusal`. Each slower tier has a vote of its own,
and a refusal there leaves the save out of that tier alone.

After a kill there is, on this host and in the root:

| killed in | fast tiers | durable root |
|---|---|---|
| the lines before `take_slot` | nothing | nothing |
| `stage`, `finish_staging` | a slot without a manifest, which is free | nothing |
| `run` | that, or a committed slot: a restart takes it if all processes have theirs | nothing |
| `begin`, and later | the save in the tiers that kept it | a step once it has its marker, before that none |

The next save or start removes what has no manifest or marker. A step that Orbax writes itself is begun in the step
loop's thread, and is in the root as Orbax leaves it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from ckptkit.errors import CheckpointError, SaveFailedError
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import Writer
from ckptkit.model.policies import SaveOptions
from ckptkit.model.tiers import DURABLE
from ckptkit.save.agreement.protocol import Ask, Onto, SaveProtocol, Veto
from ckptkit.save.agreement.replica_check import ReplicaComparison
from ckptkit.save.agreement.voting import Verdict, Voting
from ckptkit.save.book.ledger import OVERTAKEN, Branch, StepRecord
from ckptkit.save.book.outcomes import Outcomes, describe
from ckptkit.save.book.under_way import described
from ckptkit.save.decider import Decider
from ckptkit.save.records import Refusal, Save, SaveTargets
from ckptkit.save.slot_maker import SlotMaker
from ckptkit.save.threads import SaveThreads
from ckptkit.save.tiers import DurableTier, SlotTier, SlowerTier
from ckptkit.util import clock, heartbeat, unproven
from ckptkit.util.clock import Deadline
from ckptkit.util.gc_pause import collection_paused

_SAID_AFTER_S = 1.0  # of waiting for earlier saves, as Orbax logs it

_log = logging.getLogger("ckptkit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that a flow calls."""

    slots: SlotTier
    slower: Sequence[SlowerTier]
    durable: DurableTier  # one of them
    threads: SaveThreads
    maker: SlotMaker
    voting: Voting
    outcomes: Outcomes
    replicas: ReplicaComparison


@final
class SaveFlow:
    """Saves, one after the other: all processes of the job call `save` together."""

    def __init__(
        self,
        targets: SaveTargets,
        job: Job,
        writer: Writer,
        branch: Branch,
        decider: Decider,
        options: SaveOptions,
        parts: Parts,
    ):
        self._durable_steps, self._repair = targets.durable, targets.repair
        self._coordinator, self._events = job.coordinator, job.events
        self._writer = writer
        self._branch, self._ledger, self._decider = branch, branch.ledger, decider
        self._options = options
        self._slots, self._slower, self._durable = parts.slots, parts.slower, parts.durable
        self._threads, self._maker = parts.threads, parts.maker
        self._voting, self._outcomes, self._replicas = parts.voting, parts.outcomes, parts.replicas

    def save(self, save: Save) -> SaveProtocol:
        """A save, until its last tier has begun; `Onto` ends it in one thread and continues it in another.

        The caller (`SavePipeline.save`) gets False for a save that is not taken and True for one that Orbax alone
        writes. Else it waits for `save.returned`, and the step loop may donate the arrays from then on. Every process
        takes the same saves. A tier keeps a save on all processes or on none.
        """
        # The step loop's thread. An error is raised by the call, and drops the save on the other processes.
        if not (yield from self._decide(save)):
            return False
        if not self._collect(save):
            return False
        yield from self._wait_for_turn(save)
        if not (yield from self._name(save)):
            return False
        if save.by_orbax:
            self._begin_by_orbax(save)
        if not save.due:
            return True
        save.is_voted = True

        yield Onto(self._threads.stager)  # while the caller waits: Ctrl-C ends its wait, and never a copy
        try:
            self._receive(save)
            with self._maker.held_by(save.name):
                yield from self._slots.take_slot(save, in_flight=self._threads.in_flight)
                yield from self._slots.stage(save)
            self._report_staged(save)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001  raised by the call, and voted on
            save.failure, save.refusal = error, Refusal(policy="veto", reason=describe(error))
        self._hand_over(save)  # the call returns

        yield Onto(self._threads.writer)  # while the step loop trains
        try:  # seal: each of these three catches what fails in it, and the vote refuses the save
            yield from self._slots.identify_first(save)
            yield from self._slots.finish_staging(save)  # from our copy on the device, where that was made
            yield from self._slots.compare(save)
            verdict = yield from self._voting.run(self._slots, save, refusal=save.refusal)  # copy, vote, keep or drop
            for tier in self._taken_by(save, verdict):
                tier.begin(save)  # copy, vote, keep or drop, in the tier's own thread
        except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
            self._outcomes.failed(save.save_id, self._slots.name, error)
        finally:
            self._end(save)

    # The step loop's thread.

    def _decide(self, save: Save) -> SaveProtocol:
        """Sets the tiers in which the save is due; False where there is none.

        Raises `StepAlreadyExistsError`, `SaveFailedError` after too many losses, ValueError for arguments that nothing
        can be saved of.
        """
        step = save.step
        if (why := self._decider.refusal(step, force=save.force)) is not None:
            self._events.emit(Kind.SKIPPED, step=step, reason=why)
            return False
        if step < 0:
            raise ValueError(f"step {step} cannot be saved: steps are 0 or more")
        assert save.arguments is not None
        save.arguments.check()
        reached = self._reached_preemption(step)
        due = self._due(step, force=save.force, reached=reached)
        save.due = due if save.last is None else due & save.last.tiers
        save.must_wait = save.force or reached
        if not save.due:
            return False
        self._outcomes.health.raise_if_overdue(step)
        if save.last is None and self._decider.refusal(step, force=False) is not None:
            # An earlier save of the step may be in flight, and may still fail: waits until all processes know its end.
            yield from self._threads.settle(Deadline(self._coordinator.timeout_s))
        self._threads.raise_if_closed()
        there = [record for record in self._branch.records() if record.step == step]
        if there and not _may_repeat(save, there):
            raise StepAlreadyExistsError(
                f"step {step} exists already in {self._durable_steps.url} or its fast tiers; restore an earlier step, "
                f"or call delete({step}), before it is saved again"
            )
        self._branch.refuse_to_start_anew(self._durable_steps.url, self._repair)
        unproven.wait()
        return True

    def is_due(self, step: int) -> bool:
        """Whether an un-forced save of `step` would be taken for any tier. All processes ask together."""
        if self._decider.refusal(step, force=False) is not None:
            return False
        return bool(self._due(step, force=False, reached=self._reached_preemption(step)))

    def _due(self, step: int, *, force: bool, reached: bool) -> frozenset[str]:
        is_saving = not self._threads.idle
        return self._decider.due(step, reached_preemption=reached, force=force, is_saving=is_saving)

    def _reached_preemption(self, step: int) -> bool:
        return bool(self._durable_steps.stock.orbax.reached_preemption(step))

    def _collect(self, save: Save) -> bool:
        """The values as they are now, and their places in a slot; False where no tier that is due can hold them."""
        assert save.arguments is not None
        with collection_paused():  # it would look through thousands of objects, none of which it may free
            save.arguments.collect(save)
        if save.by_orbax:  # what the pipeline takes it vetoes itself, where it has to
            self._outcomes.raise_if_stopped()
            save.must_wait = True  # Orbax writes on this thread, while no other save is in flight
        return bool(save.due)

    def _wait_for_turn(self, save: Save) -> SaveProtocol:
        """Waits for the saves before one that is due in the durable tier.

        Waits at most as long as for other processes. A save that is due in fast tiers alone does not wait. A save that
        is not forced does not wait either, if early saves are skipped (`durable_busy`) or the durable tier fails.
        The last save of a run waits for the writer, and for half of its time for peers and disk; it queues behind
        a durable save, so that the faster tiers do not wait.
        """
        last = None if save.last is None else save.last.deadline
        patient = self._options.durable_busy == "wait" and not self._durable.failing
        save.waits = last is not None or (DURABLE in save.due and (save.must_wait or patient))
        save.was_busy, save.waiting_s = save.waits and not self._threads.idle, clock.monotonic_s()
        save.deadline = last or Deadline(self._coordinator.timeout_s if save.waits else 0.0)
        before = described(self._outcomes.under_way.left())
        save.in_time = not save.waits or (yield from self._say_waiting(save))
        if last is not None:
            yield from self._threads.wait_fast(Deadline(last.left_s / 2))
        elif save.waits and not save.in_time and not save.must_wait and self._durable.failing:
            save.waits, save.in_time, save.deadline = False, True, Deadline(0.0)
        save.spans.ended("wait_for_prev", save.waiting_s)
        save.turn_s = clock.monotonic_s()
        save.waited_s = save.turn_s - save.waiting_s
        if save.waited_s > _SAID_AFTER_S:
            _log.warning("save waited %.1f s for the previous save: %s", save.waited_s, before)

    def _say_waiting(self, save: Save) -> SaveProtocol:
        """Waits, and logs for what where that takes longer than a moment."""
        deadline = save.deadline
        if (yield from self._await_earlier(save, Deadline(min(_SAID_AFTER_S, deadline.left_s)))):
            return True
        if deadline.passed:
            return False
        left = described(self._outcomes.under_way.left())
        _log.warning("save waits for the previous save, %.0f s at most: %s", deadline.left_s, left)
        return (yield from self._await_earlier(save, deadline))

    def _await_earlier(self, save: Save, deadline: Deadline) -> SaveProtocol:
        in_time = yield from self._threads.wait_decided(deadline)  # a handler finds the save it interrupts being staged
        if in_time and save.last is None:
            in_time = yield from self._threads.wait_durable(deadline, patient=save.must_wait)
        return in_time

    def _name(self, save: Save) -> SaveProtocol:
        """Gives the save its identity; False where a signal handler saved in the middle of this call: the run has a
        later state, and continues from that one."""
        save.save_id, save.writer = self._branch.next_save(save.name, save.step), self._writer
        self._decider.taken(save.step, save.due, save.metrics)
        if not self._branch.is_overtaken(save.name):
            assert save.arguments is not None
            save.arguments.taken()
            return True
        self._decider.forget(save.step)
        yield from self.veto(save.name, CheckpointError(OVERTAKEN))
        self._events.emit(Kind.SKIPPED, step=save.step, reason=OVERTAKEN)
        return False

    def _begin_by_orbax(self, save: Save) -> None:
        """Has Orbax write the durable step; the other tiers are ours."""
        try:
            self._durable.begin_by_orbax(save)
        except BaseException:
            self._decider.forget(save.step)
            raise
        save.due -= {DURABLE}

    def veto(self, name: str, error: BaseException) -> SaveProtocol:
        """This process raises in the call `name` of `save`: the others drop the save at once. Raises nothing."""
        if self._coordinator.count == 1:
            return
        ballot, judge = self._voting.veto_of(error)

        def no_identity() -> None:
            kind = SaveFailedError if isinstance(error, SaveFailedError) else CheckpointError
            raise kind(f"the save raised: {describe(error)}")

        try:
            if self._replicas.refuses:
                yield self._replicas.veto(name)
            yield Veto(self._slots.channel, name, ballot, judge)
        except CheckpointError as failure:  # the others time out, and drop it then
            _log.warning("save %s: its error could not be sent to the other processes: %s", name, failure)
        if self._coordinator.process == 0:  # the others ask for it before they vote
            with suppress(CheckpointError):
                yield Ask("identity", name, no_identity)

    def take_back(self, save: Save) -> None:
        """The call of `save` raises: nothing of its values is read once this returns, and nothing that was read
        meanwhile is committed. A snapshot that was complete before is committed as usual (`is_voted`).

        Waits for a copy that has begun.
        """
        if not save.is_voted:
            return
        save.loan.withdraw()
        save.is_voted = not self._threads.stager.idle or save.loan.received  # a queued job is one or the other
        if not save.by_orbax:
            self._decider.not_taken(save.step)

    # The staging thread.

    def _receive(self, save: Save) -> None:
        """From here on the save is voted on, whatever happens."""
        save.loan.received = True
        self._outcomes.under_way.begin(save.step, save.due, share_bytes=save.description.held_bytes)
        self._outcomes.phase(save.save_id, "begun")
        self._outcomes.raise_if_stopped()
        self._maker.size(save.description.slot_bytes, save.description.share_bytes)

    def _report_staged(self, save: Save) -> None:
        """The step loop was held until now."""
        save.staged_s = clock.monotonic_s()
        if not save.by_orbax:  # that step has begun, and Orbax may have committed it by now
            self._ledger.begin(save.save_id)
        if save.slot is None:
            return
        computing_s = save.staging.computing_s
        stall_s = max(0.0, save.staged_s - save.start_s - computing_s)
        heartbeat.staged(max(0.0, stall_s - save.waited_s), computing_s)
        self._events.emit(
            Kind.STAGED,
            step=save.step,
            strategy=save.staging.strategy,
            reason=save.staging.reason,
            bytes=save.description.held_bytes,
            tiers=sorted(save.due),
            stall_s=round(stall_s, 6),
            waited_s=round(save.waited_s, 6),
            computing_s=round(computing_s, 6),
            **({"tree_bytes": save.description.tree_bytes} if DURABLE in save.due else {}),
            **({"policy": "wait"} if save.was_busy else {}),
        )
        self._maker.reserve(save.description.slot_bytes)  # the other slots: the next saves find them made

    def _hand_over(self, save: Save) -> None:
        """The step loop goes on, and so does the save."""
        self._threads.count(save.slot is not None)
        self._slots.hold(save)
        save.forget_arrays()
        if save.failure is None:
            save.returned.set_result(None)
        else:
            save.returned.set_exception(save.failure)

    # The writer thread.

    def _end(self, save: Save) -> None:
        """The first tier is done with the save."""
        self._slots.end(save)
        self._threads.count(-(save.slot is not None))

    def _taken_by(self, save: Save, verdict: Verdict | None) -> list[SlowerTier]:
        """The slower tiers that take a save which the first one has kept: no process has refused it for them."""
        self._slots.hurry_no_more(save)
        if verdict is None or verdict.refusal is not None or save.slot is None:
            return []
        refused = verdict.more["slower"]
        taken = [tier for tier in self._slower if tier.name in save.due and tier.name not in refused]
        for name, (policy, reason) in refused.items():
            self._outcomes.skipped(save.save_id, name, Refusal(policy=policy, reason=reason), gone=not taken)
        return taken


def _may_repeat(save: Save, there: Sequence[StepRecord]) -> bool:
    """Whether a step that was saved is saved again: with `force`, one that only fast tiers hold. A script that forces
    its last step counts on its being in the durable root, and knows nothing of the tiers."""
    if save.last is not None:
        return save.last.again
    fast_alone = all(record.state == "committed" and DURABLE not in record.tiers for record in there)
    return save.force and fast_alone
