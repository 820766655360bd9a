"""Handles failed durable saves: retry, drop, pause, and at last an error. Process 0 decides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator
from typing import Any

from ckptkit.durable.cells.tensorstore_wait import is_transient
from ckptkit.durable.steps import DurableSteps
from ckptkit.errors import CheckpointError, StoreError, heard_from
from ckptkit.events import Kind
from ckptkit.job.coordination import Job
from ckptkit.model.manifest import SaveId
from ckptkit.model.policies import FailurePolicy
from ckptkit.model.tiers import DURABLE
from ckptkit.save.agreement.commit_log import CommitLog
from ckptkit.save.agreement.protocol import Ask, Effect, SaveProtocol, Sleep
from ckptkit.save.agreement.voting import Voting
from ckptkit.util import clock
from ckptkit.util.words import count_text

_PAUSES_MAX = 4  # doublings of a pause
_jitter = random.Random()  # its own: a job that seeds `random` gets the same numbers with us in the background


class DurableRetry:
    """Attempts durable saves, knows for how long they have been failing, and pauses a tier that fails again and again.

    `attempt` runs in the durable thread of every process. Its counts are process 0's, received at each save: a process
    that missed a verdict would otherwise retry alone.
    """

    def __init__(self, policy: FailurePolicy, job: Job, voting: Voting, log: CommitLog):
        self._policy = policy
        self._voting = voting
        self._log = log
        self._coordinator = job.coordinator
        self._events = job.events
        self._failing_from_s: float | None = None  # monotonic; the same None or not on every process
        self._failed_in_row = 0  # saves
        self._failed_tries = 0  # of the save in flight
        self._paused_until_s = 0.0  # monotonic; only process 0's counts
        self._last_reason = ""

    @property
    def failing(self) -> bool:
        """Whether the last durable save has failed, or the one in flight more than once: not worth waiting for."""
        return self._failed_in_row > 0 or self._failed_tries > 1

    def attempt(
        self,
        save_id: SaveId,
        name: str,
        write: Callable[[int], SaveProtocol],
        durable: DurableSteps,
        *,
        repeatable: bool = True,
        forced: bool = False,
    ) -> SaveProtocol:
        """Runs `write(number of the try)` until all processes have succeeded, or no retry is left or can help.

        Then raises its error.

        `durable` reports on process 0 whether the step exists although a process has reported an error. In a pause
        nothing is run and `StoreError` is raised, unless the save is `forced` or not `repeatable` (already begun).
        `name` is that of the save's barriers.
        """
        began_s = clock.monotonic_s()
        step = save_id.step
        left_s = yield from self._learn_of_pause(name)
        paused = self._failed_in_row >= self._policy.pause_after
        if paused and left_s > 0 and repeatable and not forced:
            raise StoreError(
                f"the tier is paused for {left_s:.1f} s more, after {self._failed_in_row} failed saves in a row: "
                f"{self._last_reason}",
                step=step,
                tier=DURABLE,
            )
        retries_left = self._policy.retries if repeatable and not paused else 0
        delay_s = self._policy.retry_delay_s
        for number in itertools.count():
            error = None
            try:
                yield from write(number)
            except Exception as caught:  # noqa: BLE001  voted on: a process that does not vote stops the others
                error = caught
            verdict = yield from self._verdict(error, durable, save_id, name, is_last=retries_left == 0)
            if verdict["done"]:
                self._succeeded(step, verdict)
                return
            self._failed_tries += 1
            if retries_left == 0 or not verdict["transient"]:
                self._failed(step, began_s, verdict["reason"])
                raise error or heard_from(verdict["process"], verdict["name"], verdict["reason"])
            # Processes of one job agree on it, and several jobs do not come back to a bucket at the same time.
            wait_s = delay_s * verdict["jitter"]
            self._events.emit(Kind.RETRIED, step=step, tier=DURABLE, reason=verdict["reason"], delay_s=round(wait_s, 6))
            yield Sleep(wait_s)
            retries_left -= 1
            delay_s *= 2

    def _learn_of_pause(self, name: str) -> Generator[Effect, Any, float]:
        """How long a pause lasts by process 0's clock, and how many saves it has seen fail. Cost: one small read."""

        def know() -> list[float]:
            return [self._failed_in_row, self._paused_until_s - clock.monotonic_s()]

        failed_in_row, left_s = yield Ask("durable-pause", name, know)
        self._failed_in_row = int(failed_in_row)
        return float(left_s)

    def _succeeded(self, step: int, verdict: dict[str, Any]) -> None:
        if self._failing_from_s is not None:
            failed_s = round(clock.monotonic_s() - self._failing_from_s, 6)
            self._events.emit(Kind.RECOVERED, step=step, tier=DURABLE, failures=self._failed_in_row, failed_s=failed_s)
        self._failing_from_s = None
        self._failed_in_row = self._failed_tries = 0
        if "reason" in verdict:  # the step is committed; steps that were to be deleted after it may still exist
            reason = f"step {step} is committed, and then: {verdict['name']}: {verdict['reason']}"
            self._events.emit(Kind.DEGRADED, step=step, tier=DURABLE, reason=reason)

    def _failed(self, step: int, began_s: float, reason: str) -> None:
        self._failed_in_row += 1
        self._failed_tries = 0
        self._last_reason = reason
        if self._failing_from_s is None:
            self._failing_from_s = began_s
            self._events.emit(Kind.DEGRADED, step=step, tier=DURABLE, reason=reason)
        if self._failed_in_row < self._policy.pause_after:
            return
        pause_s = self._policy.pause_s * 2 ** min(self._failed_in_row - self._policy.pause_after, _PAUSES_MAX)
        self._paused_until_s = clock.monotonic_s() + pause_s
        said = (
            f"{count_text(self._failed_in_row, 'save')} in a row failed; the next is tried in {pause_s:g} s. {reason}"
        )
        self._events.emit(Kind.DEGRADED, step=step, tier=DURABLE, reason=said, pause_s=pause_s)

    def _verdict(
        self, error: Exception | None, durable: DurableSteps, save_id: SaveId, name: str, *, is_last: bool
    ) -> Generator[Effect, Any, dict[str, Any]]:
        mine = None if error is None else [is_transient(error), type(error).__name__, str(error)]

        def booked() -> None:
            self._log.append(save_id, DURABLE)
            self._log.drop_durable(durable.kept())

        def judge(said: list[Any]) -> dict[str, Any]:
            failed = [(process, *each) for process, each in enumerate(said) if each is not None]
            if not failed:
                booked()
                return {"done": True}
            process, _, name, reason = failed[0]
            transient = all(each[1] for each in failed)
            done = _is_there(lambda: durable.holds(save_id))
            if done:
                booked()
            elif is_last or not transient:
                self._voting.losing(save_id, DURABLE)
            return {
                "done": done,
                "transient": transient,
                "process": process,
                "name": name,
                "reason": reason,
                "jitter": _jitter.uniform(0.5, 1.0),
            }

        return (yield from self._voting.agree("durable-outcome", name, mine, judge))


def _is_there(landed: Callable[[], bool]) -> bool:
    """The result of `landed`; False if it cannot be checked: the next try finds an existing step."""
    try:
        return landed()
    except (CheckpointError, OSError):
        return False
