"""The tiers of a save: the slots that it is staged in, the SSD, other hosts, the durable root.

Each has the same verbs (`SaveTier`): `copy` brings a save into the tier and commits it on this process, `keep` and
`drop` follow from the vote of all processes. `begin` has a slower tier take a save, in a thread of its own.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

from ckptkit.errors import CheckpointError, PeerUnreachableError, StoreFullError
from ckptkit.model.manifest import SaveId
from ckptkit.model.policies import SaveOptions
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.save.agreement.fence import EpochFence
from ckptkit.save.agreement.protocol import Ask, Do, Machinery, SaveProtocol, SideBySide, Wait
from ckptkit.save.agreement.replica_check import (
    ReplicaComparison,
    differing_host_values,
    first_look,
    host_values,
)
from ckptkit.save.agreement.voting import SaveTier, Verdict, Voting, joined
from ckptkit.save.book.ledger import OVERTAKEN, Branch
from ckptkit.save.book.outcomes import Outcomes, describe
from ckptkit.save.circuit_breaker import DurableRetry
from ckptkit.save.records import PeerCopies, Refusal, Save, SaveTargets
from ckptkit.slots.arena import Arena
from ckptkit.snapshot.describe import Digests
from ckptkit.snapshot.items import array_items
from ckptkit.util import clock
from ckptkit.util.clock import Deadline
from ckptkit.util.gc_pause import collection_paused

_TOO_EARLY = Refusal(policy="skip", reason="still writing an older step")
_THREADS = {SSD: "disk", PEER: "peer-copy", DURABLE: "durable"}
_TRANSFER_SHARE = 0.5  # of the longest wait for other processes: a slow sender still comes to the vote in time


@final
class SlotTier(SaveTier):
    """The slots that a save is staged in: the ramdisk's, or anonymous memory. The slower tiers read from them."""

    def __init__(
        self,
        targets: SaveTargets,
        branch: Branch,
        outcomes: Outcomes,
        claim: EpochFence,
        replicas: ReplicaComparison,
        options: SaveOptions,
        machinery: Machinery,
        timeout_s: float,
    ):
        """`timeout_s`: the longest wait for other processes."""
        super().__init__(targets.staging_name, "commit")
        self._targets, self._arena = targets, targets.staging
        self._branch, self._outcomes, self._claim, self._replicas = branch, outcomes, claim, replicas
        self._options, self._begin_staging = options, machinery.begin_staging
        self._pace = targets.durable.pace  # the durable tier lets a save pass until its first commit
        self._timeout_s = timeout_s
        self._newest = 0.0  # the order of the newest save that came here
        self.slower: Sequence[SlowerTier] = ()

    # In the staging thread.

    def take_slot(self, save: Save, *, in_flight: int) -> SaveProtocol:
        """Gives the save a slot, or the reason why this process has none; waits for one where it was its turn to wait.

        Which of the two is a local matter of timing, so it decides nothing: the refusal goes into the vote.
        """
        order, newest, in_flight_max = self._branch.order(save.name), self._newest, self._options.in_flight_max
        self._newest = max(order, newest)
        if order < newest:
            save.refusal = Refusal(policy="skip", reason=OVERTAKEN)
        elif not save.in_time:
            reason = f"earlier saves were not done within {self._timeout_s:.1f} s"
            save.refusal = Refusal(policy="wait", reason=reason)
        elif in_flight >= in_flight_max:
            reason = f"too early: snapshots in flight: {in_flight}, in_flight_max={in_flight_max}"
            save.refusal = Refusal(policy="skip", reason=reason)
        else:
            yield from self._acquire(save)

    def _acquire(self, save: Save) -> SaveProtocol:
        size_bytes, waiting_s = save.description.slot_bytes, clock.monotonic_s()
        try:
            save.slot = yield Do("take a slot", lambda: self._arena.acquire(size_bytes, timeout_s=save.deadline.left_s))
        except StoreFullError as error:
            self._outcomes.no_room(save.save_id, self.name, error, save.due)
            save.refusal = Refusal(policy="veto", reason=describe(error))
        except (CheckpointError, OSError) as error:  # a mount that became read-only, for example: training continues
            self._outcomes.failed(save.save_id, self.name, error)
            save.refusal = Refusal(policy="veto", reason=describe(error))
        else:
            if save.slot is None:
                reason = "no free slot: slower tiers still read the others, or they are still being made"
                save.refusal = Refusal(policy="wait" if save.waits else "skip", reason=reason)
        finally:
            save.waited_s += clock.monotonic_s() - waiting_s

    def stage(self, save: Save) -> SaveProtocol:
        """Copies the state into the slot, as far as the strategy has to before the caller may donate it."""
        slot, trees = save.slot, save.items.trees
        if slot is None:
            return
        self._pace.begin_urgent(save.name)
        try:
            for tier in self.slower:
                tier.begin_early(save)
            copied = save.disk_copy.filled if save.disk_copy is not None else None
            save.local_replicas, compared = self._replicas.shards(save.description, trees)
            begin = partial(self._begin_staging, self._options.staging, save.description, trees, slot.memory)
            with save.loan.reading():
                save.staging = yield Do("stage", collection_paused()(partial(begin, copied, compared)))
                if save.loan.withdrawn:
                    save.staging.finish()  # gives back the memory of its transfers
        except BaseException:  # a deleted array, for example: the caller raises it, the slot is free again
            save.slot = None
            self._arena.release(slot)
            self.end(save)
            raise

    def hold(self, save: Save) -> None:
        """The slot stays as it is until `end`: the slower tiers will read it."""
        if save.slot is not None:
            save.lease(self.name, self._arena)

    def hurry_no_more(self, save: Save) -> None:
        """The save has come through here, or will not."""
        self._pace.end_urgent(save.name)

    def end(self, save: Save) -> None:
        """The save was passed on, or dropped."""
        self.hurry_no_more(save)
        for tier in self.slower:
            tier.leave_out(save)
        save.let_go(self.name, self._arena)

    # In the writer thread.

    def identify_first(self, save: Save) -> SaveProtocol:
        """On process 0, also where it refuses the save: the others wait for the identity."""
        if save.writer.process != 0:
            return
        try:
            yield from self.identify(save)
        except Exception as error:  # noqa: BLE001  voted on
            save.refusal = self._outcomes.refused(save, self.name, error)

    def identify(self, save: Save) -> SaveProtocol:
        """Gives the save the identity that process 0 has for it, once that has recorded the run's epoch: no process
        commits anything under an epoch that another run could begin too."""
        if save.identified:
            return
        own = save.save_id
        decided = yield Ask("identity", save.name, lambda: self._claim.claim(own).to_list(), self._branch.order)
        save.save_id = SaveId.from_list(decided)
        save.identified = True
        self._branch.adopt(save.save_id)
        self._branch.ledger.identify(own, save.save_id)

    def finish_staging(self, save: Save) -> SaveProtocol:
        """Moves what is left of the state into the slot; `copy` raises an error of it."""
        if save.slot is None:
            return
        try:
            save.digests = yield Do("finish staging", save.staging.finish)
            self._outcomes.phase(save.save_id, "staged", self.name)
        except Exception as error:  # noqa: BLE001  raised in `copy`, and voted on
            save.failure = error

    def compare(self, save: Save) -> SaveProtocol:
        """Compares replicas before the commit, where a difference refuses the save: a job that ends after the commit
        would be resumed from it. Called by all processes, also where this one has a refusal; that stays."""
        if not self._replicas.refuses:
            return
        digests = None if save.refusal is not None else save.digests
        try:
            found = yield from self._replicas.compare_before_commit(save.name, self._compared(save, digests))
        except CheckpointError as error:
            save.refusal = save.refusal or Refusal(policy="veto", reason=describe(error))
            return
        save.replicas_differ = found
        if found["sets"] or found["local"]:
            save.refusal = save.refusal or Refusal(policy="veto", reason="replicas differ")

    def copy(self, save: Save) -> SaveProtocol:
        """Commits the slot, or only its identity where slots are memory without files."""
        if save.failure is not None:
            raise save.failure
        yield from self.identify(save)
        slot = save.slot
        assert slot is not None, "a process without a slot refuses"
        if self._arena.directory is not None:
            text = save.manifest_text(slot.name)
            yield Do("commit here", lambda: self._arena.commit(slot, save.save_id, text))
        self._outcomes.phase(save.save_id, "committed_here", self.name)

    def ballot(self, save: Save) -> dict[str, Any]:
        """Hashes of replicas and of values in host memory, and the slower tiers that this process can fill now."""
        refusals = {tier.name: tier.refusal(save) for tier in self.slower if tier.name in save.due}
        return {
            "host": host_values(save, save.digests or {}) if save.writer.count > 1 else {},
            "replicas": None if self._replicas.refuses else self._compared(save, save.digests),
            "slower": {name: why and [why.policy, why.reason] for name, why in refusals.items()},
        }

    def decide(self, save: Save, ballots: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Which boxes differ, and the tiers that leave the save out: one that is busy anywhere does so everywhere."""
        self._outcomes.host_values_differ(save.save_id, differing_host_values(ballots))
        found = first_look([ballot and ballot["replicas"] for ballot in ballots])
        tiers = dict.fromkeys(tier for ballot in ballots if ballot is not None for tier in ballot["slower"])
        later = {
            tier: joined([None if ballot is None else ballot["slower"].get(tier) for ballot in ballots])
            for tier in tiers
        }
        return {"replicas": found, "slower": {tier: why for tier, why in later.items() if why is not None}}

    def explain(self, save: Save, verdict: Verdict) -> SaveProtocol:
        """Names the boxes of replicas that differ."""
        if not verdict.more:  # a process raised before it could vote
            return verdict
        found = save.replicas_differ or verdict.more["replicas"]
        why = yield from self._replicas.follow_up(save.save_id, save.name, save.description, found, save.digests)
        if why is None or verdict.refusal is None:
            return verdict
        return replace(verdict, refusal=replace(verdict.refusal, reason=why))

    def keep(self, save: Save) -> None:
        """The ramdisk has it."""
        self._outcomes.committed(save, self.name, self._arena)

    def drop(self, save: Save) -> None:
        """The slot holds nothing any more."""
        if save.slot is not None:
            self._arena.discard(save.slot)

    def release(self, save: Save) -> None:
        """The slot may be reused, as far as no slower tier reads it, and no policy protects it."""
        if save.slot is not None:
            self._arena.release(save.slot)

    def _compared(self, save: Save, digests: Mapping[int, Digests] | None) -> dict[str, Any] | None:
        return self._replicas.ballot(save.description, save.local_replicas, digests)


class SlowerTier(SaveTier):
    """A tier that is filled from the slot of a save, in a thread of its own. It reads the slot under a lease."""

    def __init__(self, name: str, channel: str, staging: Arena, outcomes: Outcomes, machinery: Machinery):
        super().__init__(name, channel)
        self._staging, self._outcomes = staging, outcomes
        self.worker = machinery.make_worker(f"ckptkit-{_THREADS[name]}", waiting_max=1)

    def refusal(self, save: Save) -> Refusal | None:
        """Why this process cannot take the save now. Whether a tier is still busy with an older step is a local matter,
        so it is voted on."""
        del save
        return None if self.worker.idle else _TOO_EARLY

    def begin_early(self, save: Save) -> None:
        """Begins to copy while the slot is still being filled, if this tier can."""

    def begin(self, save: Save) -> None:
        """All processes have committed the save to the first tier, and take it here: copies, votes, keeps or drops."""
        save.lease(self.name, self._staging)
        self.worker.submit(lambda: self.fill(save))

    def leave_out(self, save: Save) -> None:
        """The save does not come here: ends what `begin_early` began."""

    @abstractmethod
    def fill(self, save: Save) -> SaveProtocol:
        """Takes the save through this tier. In the tier's thread."""


@final
class DiskTier(SlowerTier):
    """Slots on a local disk. The copy begins while the state is being staged, and is for nothing if the save is
    dropped: a slot on the disk is committed by its manifest, once all processes have filled theirs."""

    def __init__(self, arena: Arena, voting: Voting, staging: Arena, outcomes: Outcomes, machinery: Machinery):
        super().__init__(SSD, "disk-commit", staging, outcomes, machinery)
        self._arena, self._voting, self._make_copy = arena, voting, machinery.make_disk_copy
        self._lock = threading.Lock()
        self._promised_to: str | None = None  # the name of a save

    def refusal(self, save: Save) -> Refusal | None:
        """A disk that is free is promised to this save until `leave_out`: one that is staged meanwhile must not take
        what all processes vote on."""
        return None if save.disk_copy is not None or self._promise(save) else _TOO_EARLY

    def begin_early(self, save: Save) -> None:
        """Copies the boxes as they come. Does nothing where the disk is still busy with an older step, or promised."""
        if SSD in save.due:
            self._begin_copy(save, save.description.extents, None)

    def begin(self, save: Save) -> None:
        """Has the copy committed; makes it now where the disk was busy when the save was staged."""
        if save.disk_copy is None:
            self._begin_copy(save, (), save.cell_digests())
        assert save.disk_copy is not None, "the disk was promised to this save"
        save.disk_takes_it.set_result(True)

    def leave_out(self, save: Save) -> None:
        """Ends the copy without a save, unless that was begun; and the disk is free for the next one."""
        if save.disk_copy is not None and not save.disk_takes_it.done():
            save.disk_copy.abandon()
            save.disk_takes_it.set_result(False)
        with self._lock:
            if self._promised_to == save.name:
                self._promised_to = None

    def fill(self, save: Save) -> SaveProtocol:
        """Copies, waits for the decision about the save, commits, votes."""
        copy, failure, refusal = save.disk_copy, None, None
        assert copy is not None
        self._outcomes.phase(save.save_id, "begun", SSD)
        try:
            refusal = yield from self._voting.settle(self.channel)
            if refusal is None:
                save.disk_slot = yield Do("copy to the disk", copy.run)
                self._outcomes.phase(save.save_id, "copied", SSD)
        except Exception as error:  # noqa: BLE001  voted on, where the save is taken at all
            failure = error
        finally:
            save.let_go(SSD, self._staging)
        taken = False
        try:
            taken = yield Wait(save.disk_takes_it)
        finally:
            if not taken:
                self.release(save)
        if taken:
            if failure is not None:
                refusal = self._outcomes.refused(save, SSD, failure)
            yield from self._voting.run(self, save, refusal=refusal, gone=DURABLE not in save.due)

    def copy(self, save: Save) -> SaveProtocol:
        """Commits the copy."""
        slot = save.disk_slot
        assert slot is not None, "a copy that failed is a refusal"
        text = save.manifest_text(slot.name)
        yield Do("commit to the disk", lambda: self._arena.commit(slot, save.save_id, text))
        self._outcomes.phase(save.save_id, "committed_here", SSD)

    def keep(self, save: Save) -> None:
        """The disk has it."""
        kept_bytes = save.disk_copy.kept_bytes if save.disk_copy is not None else 0
        self._outcomes.committed(save, SSD, self._arena, {"kept_bytes": kept_bytes} if kept_bytes else None)

    def drop(self, save: Save) -> None:
        """The slot on the disk holds nothing any more."""
        if save.disk_slot is not None:
            self._arena.discard(save.disk_slot)

    def release(self, save: Save) -> None:
        """The slot on the disk may be reused, as far as no policy protects it."""
        if save.disk_slot is not None:
            self._arena.release(save.disk_slot)

    def _promise(self, save: Save) -> bool:
        with self._lock:
            free = self.worker.idle
            if free:
                self._promised_to = save.name
            return free

    def _begin_copy(self, save: Save, extents: Any, digests: Mapping[tuple[int, int], str] | None) -> None:
        """Copies the slot: as the boxes of `extents` come, or at once, with the `digests` of what is there."""
        with self._lock:
            if self.worker.idle and self._promised_to in {None, save.name}:
                slot, size_bytes = save.slot, save.description.slot_bytes
                save.disk_copy = self._make_copy(slot, extents, size_bytes, self._arena, digests)
                save.lease(SSD, self._staging)
                self.worker.submit(lambda: self.fill(save))


@final
class PeerTier(SlowerTier):
    """Copies of this process's slot on the hosts that keep them.

    A copy that fails on one process leaves the step out of this tier everywhere and degrades the tier. Nothing else
    stops: the ramdisk has the step, and the next one is tried again.
    """

    def __init__(self, copies: PeerCopies, voting: Voting, staging: Arena, outcomes: Outcomes, machinery: Machinery):
        super().__init__(PEER, "peer-commit", staging, outcomes, machinery)
        self._copies, self._voting = copies, voting

    def fill(self, save: Save) -> SaveProtocol:
        """Sends, votes."""
        yield from self._voting.run(self, save, gone=False)

    def copy(self, save: Save) -> SaveProtocol:
        """Sends this process's slot to its keepers."""
        self._outcomes.phase(save.save_id, "begun", PEER)
        try:
            yield Do("copy to peers", lambda: self._send(save))
        finally:
            self.release(save)
        self._outcomes.phase(save.save_id, "committed_here", PEER)

    def keep(self, save: Save) -> None:
        """The keepers have it."""
        self._copies.receiver.end(save.save_id)
        self._outcomes.committed(save, PEER, None)

    def drop(self, save: Save) -> None:
        """The copies of others that came here count no more."""
        self._copies.receiver.end(save.save_id)

    def release(self, save: Save) -> None:
        """The slot was sent, or will not be."""
        save.let_go(PEER, self._staging)

    def _send(self, save: Save) -> None:
        slot, size_bytes, limit_s = save.slot, save.description.slot_bytes, self._copies.timeout_s * _TRANSFER_SHARE
        assert slot is not None
        deadline = Deadline(limit_s)
        self._copies.client.try_again()
        for keeper in self._copies.keepers:
            memory, process = slot.memory[:size_bytes], save.writer.process
            for sent_bytes in self._copies.client.send_copy(keeper, save.save_id, process, memory, save.manifest_text):
                if deadline.passed:
                    raise PeerUnreachableError(
                        f"process {keeper} took {sent_bytes} of {size_bytes} bytes in {limit_s:g} s"
                    )


@final
class DurableTier(SlowerTier):
    """Steps in the durable root. A copy is tried again, and all processes vote on each try (`DurableRetry`)."""

    def __init__(
        self,
        targets: SaveTargets,
        branch: Branch,
        claim: EpochFence,
        retry: DurableRetry,
        outcomes: Outcomes,
        machinery: Machinery,
    ):
        super().__init__(DURABLE, "durable-outcome", targets.staging, outcomes, machinery)
        self._steps, self._ledger, self._claim, self._retry = targets.durable, branch.ledger, claim, retry

    @property
    def failing(self) -> bool:
        """Whether it is not worth waiting for."""
        return self._retry.failing

    def wait_until_pruned(self) -> None:
        """Waits until the steps that no policy keeps are deleted."""
        self._steps.wait_until_pruned()

    def refusal(self, save: Save) -> Refusal | None:
        """A save that waited is taken although the tier is busy: it queues."""
        return None if self.worker.idle or save.must_wait else _TOO_EARLY

    def fill(self, save: Save) -> SaveProtocol:
        """Writes the step, by as many tries as it takes; keeps it or drops it."""
        self._outcomes.phase(save.save_id, "begun", DURABLE)
        try:
            yield from self._retry.attempt(
                save.save_id, save.name, lambda _: self.copy(save), self._steps, forced=save.must_wait
            )
            self._outcomes.phase(save.save_id, "committed_here", DURABLE)
            self.keep(save)
        except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
            self._outcomes.failed(save.save_id, DURABLE, error)
            self.drop(save)
        finally:
            self.release(save)

    def copy(self, save: Save) -> SaveProtocol:
        """One try. Its barriers have the same name on every process."""
        about = f"{save.name}.{save.durable_tries}"
        save.durable_tries += 1
        # The fence waits for the root's answer; meanwhile the items are written without a wait for other processes.
        arrays = yield SideBySide(self._claim.fence(save.save_id, about), lambda: self._array_items(save))
        yield Do(
            "write durably",
            lambda: self._steps.save(
                save.save_id,
                {**arrays, **save.items.durable},
                metrics=save.metrics,
                ancestry=self._ledger.ancestry,
                custom_metadata=save.items.custom_metadata,
                check_epoch=lambda: self._claim.check(save.save_id),
                about=about,
            ),
        )

    def keep(self, save: Save) -> None:
        """The root has it."""
        self._outcomes.committed(save, DURABLE, None, self._steps.shared)

    def drop(self, save: Save) -> None:
        """Without its marker a step does not count, and the next save removes it."""

    def release(self, save: Save) -> None:
        """The step was written, or will not be."""
        save.let_go(DURABLE, self._staging)

    def begin_by_orbax(self, save: Save) -> None:
        """Has Orbax write the step: begins on the caller's thread, and waits for its end in this tier's.

        Orbax's objects are the caller's: what failed is not tried again.
        """
        assert save.arguments is not None
        self._ledger.begin(save.save_id)
        try:
            save.arguments.begin_by_orbax(save.save_id)
        except BaseException:
            self._ledger.fail(save.save_id)
            raise
        save_id, name, began_s = save.save_id, save.name, clock.monotonic_s()
        self._outcomes.under_way.begin(save.step, frozenset({DURABLE}))
        self.worker.submit(lambda: self._finish_by_orbax(save_id, name, began_s))

    def _finish_by_orbax(self, save_id: SaveId, name: str, began_s: float) -> SaveProtocol:
        def finish(_: int) -> SaveProtocol:
            yield Do("finish by Orbax", lambda: self._steps.finish_by_orbax(save_id))

        try:
            yield Do("claim the epoch", lambda: self._claim.claim(save_id))
            yield from self._retry.attempt(save_id, name, finish, self._steps, repeatable=False)
            self._outcomes.committed_by_orbax(save_id, began_s)
        except Exception as error:  # noqa: BLE001  the top of a thread: reported and stored
            self._outcomes.failed(save_id, DURABLE, error)

    @collection_paused()  # records of every leaf, all of which stay until the save is over
    def _array_items(self, save: Save) -> dict[str, Any]:
        assert save.slot is not None
        return array_items(
            save.description,
            save.manifest(save.slot),
            save.slot.memory,
            save.items,
            lambda: self._outcomes.phase(save.save_id, "written", DURABLE),
        )


def slower_tiers(
    targets: SaveTargets, voting: Voting, outcomes: Outcomes, durable: DurableTier, machinery: Machinery
) -> tuple[SlowerTier, ...]:
    """The tiers behind the first one, the fastest first."""
    peers, disk, shared = targets.peer_copies, targets.disk, (voting, targets.staging, outcomes, machinery)
    return (
        *([PeerTier(peers, *shared)] if peers is not None else []),
        *([DiskTier(disk, *shared)] if disk is not None else []),
        durable,
    )
