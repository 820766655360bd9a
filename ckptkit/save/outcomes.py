"""What becomes of a save: the votes of all processes, and what is booked and said of the result."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ckptkit.errors import CheckpointError, SaveFailedError, StoreFullError
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import SaveId
from ckptkit.model.tiers import DURABLE, MEMORY, PEER
from ckptkit.save.ledger import Ledger
from ckptkit.save.records import Save, SaveTargets
from ckptkit.save.retention import Retention
from ckptkit.slots.arena import Arena
from ckptkit.util import clock

_T = TypeVar("_T")
_log = logging.getLogger(__name__)  # for those who keep no events: what is lost without an exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a save does not go on. `skip`: it came too early; `wait`: it waited for its turn in vain; `veto`: a process
    could not do its part."""

    policy: Literal["skip", "wait", "veto"]
    reason: str


class Outcomes:
    """The book, the events and the votes of saves. Safe from several threads; a vote's channel belongs to one."""

    def __init__(self, tiers: SaveTargets, job: Job, ledger: Ledger, retention: Retention):
        self._tiers = tiers
        self._coordinator = job.coordinator
        self._events = job.events
        self._ledger = ledger
        self._retention = retention
        self._failures: list[SaveFailedError] = []
        self._stopped: CheckpointError | None = None

    def vote(self, channel: str, save_id: SaveId, refusal: Refusal | None) -> Refusal | None:
        """Everybody's refusals of a save as one, None when there are none; raises where the meeting fails."""

        def joined(refusals: list[list[str] | None]) -> list[str] | None:
            said = [(process, *each) for process, each in enumerate(refusals) if each is not None]
            if not said:
                return None
            policies = [policy for _, policy, _ in said]
            reasons = [f"process {process}: {reason}" for process, _, reason in said]
            # The veto is what somebody has to look at: coming too early passes by itself.
            return [max(policies, key=("skip", "wait", "veto").index), "; ".join(reasons[:4])]

        mine = None if refusal is None else [refusal.policy, refusal.reason]
        verdict = self._coordinator.agree(channel, mine, joined, about=str(save_id))
        return None if verdict is None else Refusal(policy=verdict[0], reason=verdict[1])

    def tried(
        self,
        save_id: SaveId,
        tier: str,
        act: Callable[[], _T],
        *,
        degrading: type[Exception] | tuple[type[Exception], ...] = StoreFullError,
        due: frozenset[str] = frozenset(),
    ) -> tuple[_T | None, Refusal | None]:
        """What `act` returns; or, for the vote, why this process refuses the save, which is reported here and stored.

        An error of `degrading` degrades `tier`, and fails a durable save that is `due`; any other error fails the save.
        """
        try:
            return act(), None
        except Exception as error:  # noqa: BLE001  the top of a thread: voted on
            if isinstance(error, degrading):
                self.no_room(save_id, tier, error, due)
            else:
                self.failed(save_id, tier, error)
            return None, Refusal(policy="veto", reason=describe(error))

    def conclude(
        self,
        channel: str,
        save_id: SaveId,
        tier: str,
        refusal: Refusal | None,
        *,
        taken: Callable[[], None],
        left_out: Callable[[], None],
        gone: bool,
    ) -> None:
        """Votes on what every process has done for a slower tier, and then calls `taken` or `left_out`. `gone` is as
        in `skipped`."""
        try:
            refusals = self.vote(channel, save_id, refusal)
            if refusals is None:
                taken()
            else:
                left_out()
                self.skipped(save_id, tier, refusals, gone=gone)
        except CheckpointError as error:  # nobody knows the verdict: what is committed here stays
            self.failed(save_id, tier, error)

    def phase(self, save_id: SaveId, phase: str, tier: str | None = None) -> None:
        """A save crossed a phase boundary here."""
        self._events.emit(Kind.PHASE, step=save_id.step, tier=tier, phase=phase)

    def committed(self, save: Save, tier: str, arena: Arena | None) -> None:
        """All processes hold the save in `tier`: it is booked, protected, and what it replaces is given up."""
        if tier == MEMORY:
            return
        self._ledger.commit(save.save_id, tier, save.description.held_bytes)
        if arena is None:
            self._keep_durable()
        self._replaced(save.save_id, self._retention.committed(save.save_id, tier))
        self._events.emit(
            Kind.COMMITTED,
            step=save.save_id.step,
            tier=tier,
            bytes=save.description.held_bytes,
            duration_s=round(clock.monotonic_s() - save.staged_s, 6),
            **({"method": arena.method} if arena is not None and arena.synced else {}),
        )

    def copied(self, save: Save) -> None:
        """Every process's slot of the save stands on other hosts too: it is kept, here and there, until a newer one
        does."""
        self._ledger.commit(save.save_id, PEER)
        self._replaced(save.save_id, self._retention.copied(save.save_id))
        duration_s = round(clock.monotonic_s() - save.staged_s, 6)
        held_bytes = save.description.held_bytes
        self._events.emit(Kind.COMMITTED, step=save.save_id.step, tier=PEER, bytes=held_bytes, duration_s=duration_s)

    def committed_by_orbax(self, save_id: SaveId, began_s: float) -> None:
        """Orbax has committed a save that it wrote itself; nothing of it was staged or proven."""
        self._ledger.commit(save_id, DURABLE)
        self._keep_durable()
        self._replaced(save_id, self._retention.committed(save_id, DURABLE))
        duration_s = round(clock.monotonic_s() - began_s, 6)
        self._events.emit(Kind.COMMITTED, step=save_id.step, tier=DURABLE, bytes=0, duration_s=duration_s)

    def _replaced(self, save_id: SaveId, problems: Sequence[tuple[str, Exception]]) -> None:
        for tier, error in problems:
            self.degraded(save_id.step, tier, error)

    def _keep_durable(self) -> None:
        kept = set(self._tiers.durable.kept())
        self._ledger.keep_only(DURABLE, [r.save_id for r in self._ledger.records() if r.step in kept])

    def skipped(self, save_id: SaveId, tier: str, refusal: Refusal, *, gone: bool) -> None:
        """All processes leave the save out of `tier`; `gone` where no other tier will hold it."""
        if gone:
            # One that some tier holds already stays; one that came too early is no failure.
            self._ledger.fail(save_id, remembered=refusal.policy != "skip")
        self._events.emit(Kind.SKIPPED, step=save_id.step, tier=tier, policy=refusal.policy, reason=refusal.reason)

    def degraded(self, step: int | None, tier: str, error: Exception) -> None:
        """`tier` has no room, or cannot be used for now: training goes on with what is left."""
        reason = describe(error)
        self._events.emit(Kind.DEGRADED, step=step, tier=tier, reason=reason)
        _log.warning("tier %s is degraded: %s", tier, reason)

    def failed(self, save_id: SaveId, tier: str, error: Exception) -> None:
        """A save failed on this process: said now, and raised by the next `raise_failure`."""
        self._ledger.fail(save_id)
        reason = describe(error)
        self._events.emit(Kind.FAILED, step=save_id.step, tier=tier, reason=reason)
        failure = SaveFailedError(
            f"step {save_id.step} was not committed to tier {tier}: {reason}", step=save_id.step, tier=tier
        )
        failure.__cause__ = error
        self._failures.append(failure)

    def no_room(self, save: SaveId, tier: str, error: Exception, due: frozenset[str]) -> None:
        """There is no room for a save in a fast tier: the tier is degraded, and a durable save that needed it fails."""
        self.degraded(save.step, tier, error)
        if DURABLE in due:
            self.failed(save, DURABLE, error)

    def stop(self, error: CheckpointError) -> None:
        """No later save is to be taken: `error` is raised from now on, until a restore (`go_on`)."""
        self._stopped = self._stopped or error
        _log.error("%s", error)

    def go_on(self) -> None:
        """The run continues from a restored step: what stopped it is behind it."""
        self._stopped = None

    def raise_if_stopped(self) -> None:
        """Raises what `stop` was given."""
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)

    def raise_failure(self) -> None:
        """Raises what stopped the run, or the first background failure that was not raised yet, once; later ones are in
        its notes."""
        self.raise_if_stopped()
        taken = []
        while self._failures:  # one by one: a thread may add one meanwhile
            taken.append(self._failures.pop(0))
        if taken:
            first, *others = taken
            for other in others:
                first.add_note(f"also: {other}")
            raise first


def describe(error: BaseException) -> str:
    """An error as one line, with its class."""
    return "".join(traceback.format_exception_only(error)).strip()
