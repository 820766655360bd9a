"""The outcome of a save: records, reports and errors."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ckptkit.errors import CheckpointError, SaveFailedError, StoreFullError
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import SaveId
from ckptkit.model.policies import FailurePolicy
from ckptkit.model.tiers import DURABLE, MEMORY, PEER
from ckptkit.save.book.health import SaveHealth
from ckptkit.save.book.ledger import Ledger
from ckptkit.save.book.retention import Retention
from ckptkit.save.book.under_way import SavesUnderWay
from ckptkit.save.records import Refusal, Save, SaveTargets
from ckptkit.slots.arena import Arena
from ckptkit.util import clock

_log = logging.getLogger("ckptkit")
_FAILURES_KEPT = 100
_NO_LOSS = ("skip", "report")  # to count a report would make each process raise for the loss of another


class Outcomes:
    """The book, the events and the errors of saves. Safe from several threads."""

    def __init__(
        self,
        tiers: SaveTargets,
        job: Job,
        ledger: Ledger,
        retention: Retention,
        policy: FailurePolicy,
        under_way: SavesUnderWay,
    ):
        self._tiers = tiers
        self.under_way = under_way
        self._events = job.events
        self._ledger = ledger
        self._retention = retention
        self._policy = policy
        self._failures: deque[SaveFailedError] = deque(maxlen=_FAILURES_KEPT)  # that the step loop has not raised yet
        self._raised: dict[int, list[SaveFailedError]] = {}  # by thread, of those
        self._stopped: CheckpointError | None = None
        self._differing: set[str] = set()  # items of which a warning reported that their values differ by process
        self.health = SaveHealth(policy)

    def refused(self, save: Save, tier: str, error: Exception) -> Refusal:
        """Why this process refuses a save, for the vote: an act for it raised `error`, which is reported here.

        A tier without room is degraded, and a durable save that needed it fails. The tier of copies on other hosts is
        degraded by any `CheckpointError`, because the ramdisk has the step. Any other error fails the save.
        """
        if isinstance(error, StoreFullError) or (tier == PEER and isinstance(error, CheckpointError)):
            self.no_room(save.save_id, tier, error, save.due if tier == self._tiers.staging_name else frozenset())
        else:
            self.failed(save.save_id, tier, error)
        return Refusal(policy="veto", reason=describe(error))

    def keep_only(self, tier: str, held: Iterable[SaveId]) -> None:
        """All processes hold these saves in `tier`, and no other."""
        self._ledger.keep_only(tier, held)

    def booked(self, save_id: SaveId, tier: str) -> None:
        """This process learnt that all processes hold a save in `tier`: releases the saves that it replaces."""
        self.health.committed(tier)
        replaced = self._retention.copied(save_id) if tier == PEER else self._retention.committed(save_id, tier)
        for name, error in replaced:
            self.degraded(save_id.step, name, error)

    def phase(self, save_id: SaveId, phase: str, tier: str | None = None) -> None:
        """A save crossed a phase boundary here."""
        self.under_way.advance()
        self._events.emit(Kind.PHASE, step=save_id.step, tier=tier, phase=phase)

    def committed(self, save: Save, tier: str, arena: Arena | None, unwritten: Mapping[str, int] | None = None) -> None:
        """All processes hold the save in `tier`, and the log has recorded it. `unwritten`: fields about bytes that
        were not written because they were there already."""
        if tier == MEMORY:
            return
        self._ledger.hold(save.save_id, tier, save.description.held_bytes)
        self.under_way.end(save.save_id.step, tier)
        self._events.emit(
            Kind.COMMITTED,
            step=save.save_id.step,
            tier=tier,
            bytes=save.description.held_bytes,
            duration_s=round(clock.monotonic_s() - save.staged_s, 6),
            **({"method": arena.method} if arena is not None and arena.synced else {}),
            **(unwritten or {}),
        )

    def committed_by_orbax(self, save_id: SaveId, began_s: float) -> None:
        """Orbax has committed a save that it wrote itself; nothing of it was staged or verified."""
        self.under_way.end(save_id.step, DURABLE)
        duration_s = round(clock.monotonic_s() - began_s, 6)
        self._events.emit(Kind.COMMITTED, step=save_id.step, tier=DURABLE, bytes=0, duration_s=duration_s)

    def skipped(self, save_id: SaveId, tier: str, refusal: Refusal, *, gone: bool) -> None:
        """All processes leave the save out of `tier`; `gone` where no other tier will hold it."""
        self._ended(save_id, tier)
        if gone:
            # A save that some tier holds already stays; one that came too early is not a failure.
            self._ledger.fail(save_id, remembered=refusal.policy != "skip")
        if refusal.policy not in _NO_LOSS:
            self.health.lost(save_id, tier, refusal.reason, gone=gone)
        self._events.emit(Kind.SKIPPED, step=save_id.step, tier=tier, policy=refusal.policy, reason=refusal.reason)

    def host_values_differ(self, save_id: SaveId, items: Mapping[str, int]) -> None:
        """On process 0: one warning for each item whose NumPy leaves, numbers or JSON differ by process."""
        for name, process in items.items():
            if name not in self._differing:
                self._differing.add(name)
                _log.warning(
                    "step %d: values in host memory (NumPy arrays, Python numbers, JSON) of item %r differ between "
                    "process 0 and process %d. Every process gets those of process 0 back. Save values of one process "
                    "as a jax.Array with an axis for the processes",
                    *(save_id.step, name, process),
                )

    def losing(self, save_id: SaveId, tier: str, policy: str, *, gone: bool) -> None:
        """Process 0 is about to announce that all processes leave a save out of `tier`."""
        if policy not in _NO_LOSS:
            self.health.losing(save_id, tier, gone=gone)

    def _ended(self, save_id: SaveId, tier: str) -> None:
        """The save will not reach `tier`, nor any other where that is the first."""
        self.under_way.end(save_id.step, None if tier == self._tiers.staging_name else tier)

    def degraded(self, step: int | None, tier: str, error: Exception) -> None:
        """`tier` has no room, or cannot be used for now: training continues with the other tiers."""
        reason = describe(error)
        self._events.emit(Kind.DEGRADED, step=step, tier=tier, reason=reason)

    def failed(self, save_id: SaveId, tier: str, error: Exception) -> None:
        """A save failed on this process: reported now, and raised later (`raise_failure`)."""
        self._ledger.fail(save_id)
        self._ended(save_id, tier)
        reason = describe(error)
        lost = not any(record.save_id == save_id for record in self._ledger.every())
        self.health.lost(save_id, tier, reason, gone=lost)
        self._events.emit(Kind.FAILED, step=save_id.step, tier=tier, reason=reason)
        failure = SaveFailedError(
            f"step {save_id.step} was not committed to tier {tier}: {reason}", step=save_id.step, tier=tier
        )
        failure.__cause__ = error
        failure.lost = lost
        self._failures.append(failure)

    def no_room(self, save: SaveId, tier: str, error: Exception, due: frozenset[str]) -> None:
        """A fast tier has no room for a save: the tier is degraded, and a durable save that needed it fails."""
        self.degraded(save.step, tier, error)
        if DURABLE in due:
            self.failed(save, DURABLE, error)

    def stop(self, error: CheckpointError) -> None:
        """No later save is to be taken: `error` is raised from now on, until a restore (`go_on`)."""
        self._stopped = self._stopped or error
        _log.error("%s", error)

    def go_on(self) -> None:
        """The run continues from a restored step: an error that stopped it no longer counts."""
        self._stopped = None

    def raise_if_stopped(self) -> None:
        """Raises the error that `stop` was given."""
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)

    def raise_failure(self, *, in_save: bool = False) -> None:
        """Raises what stopped the run, or the first background failure that this thread has not raised yet; later ones
        are in its notes. The thread that saves (`in_save`) ends the matter for threads that ask later.

        In a `save`, `FailurePolicy.raise_in_save` chooses the failures that raise.
        """
        self.raise_if_stopped()
        raised = self._raised.setdefault(threading.get_ident(), [])
        fresh = [failure for failure in self._failures.copy() if failure not in raised]
        if in_save:
            wanted = self._policy.raise_in_save
            fresh = [each for each in fresh if wanted == "all" or (wanted == "lost" and each.lost)]
        if not fresh:
            return
        raised += fresh
        if in_save or threading.current_thread() is threading.main_thread():
            for failure in raised:
                with suppress(ValueError):
                    self._failures.remove(failure)
            self._raised.clear()
        first, *others = fresh
        for other in others:
            first.add_note(f"also: {other}")
        raise first.with_traceback(None)


def describe(error: BaseException) -> str:
    """An error as one line, with its class."""
    return "".join(traceback.format_exception_only(error)).strip()
