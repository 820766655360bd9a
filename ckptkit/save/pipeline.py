"""The parts of saves, made and joined; and the calls of `save` on the step loop's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.errors import CheckpointError, heard_from
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import SaveId, Writer
from ckptkit.model.policies import SaveOptions
from ckptkit.model.tiers import PEER, SSD
from ckptkit.save.agreement.commit_log import CommitLog
from ckptkit.save.agreement.fence import EpochFence
from ckptkit.save.agreement.protocol import Machinery, SaveProtocol, Veto, drive
from ckptkit.save.agreement.replica_check import ReplicaComparison
from ckptkit.save.agreement.voting import Voting
from ckptkit.save.book.ledger import Branch
from ckptkit.save.book.outcomes import Outcomes
from ckptkit.save.book.retention import Retention
from ckptkit.save.book.under_way import SavesUnderWay
from ckptkit.save.circuit_breaker import DurableRetry
from ckptkit.save.decider import Decider
from ckptkit.save.flow import Parts, SaveFlow
from ckptkit.save.records import Save, SaveTargets
from ckptkit.save.slot_maker import SlotMaker
from ckptkit.save.threads import SaveThreads
from ckptkit.save.tiers import DurableTier, SlotTier, slower_tiers
from ckptkit.snapshot.describe import Describer
from ckptkit.util.clock import Deadline

_SAID_EVERY_S = 10.0  # of a wait for the copy: new slots are touched for the first time

_log = logging.getLogger("ckptkit")


@dataclass(slots=True)
class Call:
    """One call of `save`, by the name of its barriers."""

    name: str
    save: Save | None = None  # once its arguments are read


class SavePipeline:
    """Owner of the parts of saves.

    `describe` describes a save of some trees, and raises for leaves that cannot be saved. `slots` makes the slots of
    future saves. `outcomes` records failures. `threads` can be waited for.
    """

    def __init__(
        self,
        targets: SaveTargets,
        job: Job,
        writer: Writer,
        branch: Branch,
        decider: Decider,
        retention: Retention,
        options: SaveOptions,
        machinery: Machinery,
    ):
        coordinator, ledger = job.coordinator, branch.ledger
        self._targets, self._coordinator = targets, coordinator
        self._branch, self.decider = branch, decider
        self._one_caller = threading.RLock()  # a signal handler may save in the middle of a save
        self.describe = Describer()
        self.under_way = SavesUnderWay(lambda: targets.durable.pace.taken_bytes)
        self.outcomes = Outcomes(targets, job, ledger, retention, options.on_failure, self.under_way)
        log = CommitLog(ledger, self.outcomes.booked)
        self.voting = Voting(log, self.outcomes, coordinator.process, self._held, branch.order)
        self.slots = SlotMaker(targets, retention, self.outcomes, machinery)
        replicas = ReplicaComparison(options.replicas, job, self.outcomes, writer.host)
        claim = EpochFence(targets, coordinator, ledger, self.outcomes)
        first = SlotTier(
            targets, branch, self.outcomes, claim, replicas, options, machinery, timeout_s=coordinator.timeout_s
        )
        retry = DurableRetry(options.on_failure, job, self.voting, log)
        durable = DurableTier(targets, branch, claim, retry, self.outcomes, machinery)
        first.slower = slower_tiers(targets, self.voting, self.outcomes, durable, machinery)
        self.threads = SaveThreads(first.slower, durable, self.under_way, machinery)
        parts = Parts(
            slots=first,
            slower=first.slower,
            durable=durable,
            threads=self.threads,
            maker=self.slots,
            voting=self.voting,
            outcomes=self.outcomes,
            replicas=replicas,
        )
        self.flow = SaveFlow(targets, job, writer, branch, decider, options, parts)
        self._report_losses()

    def _report_losses(self) -> None:
        """An event for each directory of slots whose files go while the run lives."""
        targets = self._targets
        peer_arenas = () if targets.peer_copies is None else targets.peer_copies.peer_arenas
        disk = () if targets.disk is None else ((SSD, targets.disk),)
        for tier, arena in ((targets.staging_name, targets.staging), *disk, *((PEER, each) for each in peer_arenas)):
            arena.on_lost = partial(self.outcomes.degraded, None, tier)

    @contextmanager
    def entered(self, step: int) -> Iterator[Call]:
        """A call of `save`, from its first line on: where it raises, the other processes drop the save at once. Threads
        take turns."""
        with self._one_caller:
            call = Call(self._branch.enter(step))
            self.slots.go_on()  # the step after a restore is done
            try:
                with self.decider.asked_in(call.name):
                    yield call
            except BaseException as error:
                if call.save is None or not call.save.is_voted:
                    self.run(self.flow.veto(call.name, error))
                raise

    def save(self, call: Call, save: Save) -> bool:
        """Makes a save; returns whether it was taken, once the caller may donate the state (`SaveFlow.save`).

        The copy runs on a thread of the pipeline while the caller waits for it. An exception that a signal raises in
        the caller (Ctrl-C) can interrupt the wait, and never the thread that holds a slot. The caller then takes its
        values back: a copy that has not begun never begins, the caller waits for one that has, and the save is dropped
        by vote.
        """
        call.save = save
        try:
            taken = self.run(self.flow.save(save))
            if taken is not None:
                return taken
            while not save.returned.wait(_SAID_EVERY_S):
                _log.info("save waits: step %d gets its slot and its copy", save.step)
            save.returned.result()
        except BaseException:
            self.flow.take_back(save)
            raise
        return True

    def is_due(self, step: int) -> bool:
        """Whether an un-forced save of `step` would be taken for any tier. All processes ask together."""
        self.slots.go_on()
        with self.decider.asked_in("asked." + self._branch.enter(step, "should_save")):
            return self.flow.is_due(step)

    def run(self, protocol: SaveProtocol) -> Any:
        """Runs a protocol on the caller's thread."""
        return drive(protocol, self._coordinator)

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
    def directory(self) -> Path | None:
        """A directory of this process alone in the first tier that has one: it is cleaned at the next start."""
        disk = self._targets.disk
        return self._targets.staging.directory or (None if disk is None else disk.directory)

    def close(self, deadline: Deadline) -> bool:
        """Finishes what is under way and joins the threads; False where some still run at the deadline."""
        ended = self.threads.close(deadline)
        return self.slots.close(deadline.left_s) and ended

    def _held(self, tier: str) -> list[SaveId] | None:
        """The saves that this process has committed in a fast tier."""
        if tier == PEER:
            return None  # the copies of others are not what this process holds
        arena = self._targets.disk if tier == SSD else self._targets.staging
        return [] if arena is None else arena.held()
