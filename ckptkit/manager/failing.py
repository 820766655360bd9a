"""What becomes of a durable save that fails: tried again, given up, at last an error. Process 0 decides for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ckptkit import clock
from ckptkit.coordination import Coordinator
from ckptkit.durable.reader import is_transient
from ckptkit.errors import SaveFailedError, heard_from
from ckptkit.events import EventLog, Kind
from ckptkit.manager.taken import DURABLE
from ckptkit.policy import FailurePolicy


class DurableUpkeep:
    """Attempts durable saves, and knows for how long they have been failing."""

    def __init__(self, policy: FailurePolicy, coordinator: Coordinator, events: EventLog, timeout_s: float):
        self._policy = policy
        self._coordinator = coordinator
        self._events = events
        self._timeout_s = timeout_s
        self._failing_from_s: float | None = None  # monotonic; the same None or not on every process

    def attempt(
        self, step: int, write: Callable[[], None], landed: Callable[[], bool], *, repeatable: bool = True
    ) -> None:
        """Runs `write` until all processes have succeeded, or no retry is left or can help; then raises its error.

        In the durable thread of every process. `landed` says on process 0 whether the step is there although a
        process has reported an error.
        """
        began_s = clock.monotonic_s()
        retries_left = self._policy.retries if repeatable else 0
        delay_s = self._policy.retry_delay_s
        while True:
            error = None
            try:
                write()
            except Exception as caught:  # noqa: BLE001  voted on: who does not vote leaves the others waiting
                error = caught
            verdict = self._verdict(error, landed)
            if verdict["done"]:
                self._failing_from_s = None
                if "reason" in verdict:  # the step is there, and what was to be deleted after it perhaps too
                    reason = f"step {step} is committed, and then: {verdict['name']}: {verdict['reason']}"
                    self._events.emit(Kind.DEGRADED, step=step, tier=DURABLE, reason=reason)
                return
            if retries_left == 0 or not verdict["transient"]:
                break
            self._events.emit(Kind.RETRIED, step=step, tier=DURABLE, reason=verdict["reason"], delay_s=delay_s)
            time.sleep(delay_s)
            retries_left -= 1
            delay_s *= 2
        if self._failing_from_s is None:
            self._failing_from_s = began_s
            self._events.emit(Kind.DEGRADED, step=step, tier=DURABLE, reason=verdict["reason"])
        raise error or heard_from(verdict["process"], verdict["name"], verdict["reason"])

    def raise_if_overdue(self, step: int) -> None:
        """Raises `SaveFailedError` where durable saves have been failing for too long, on every process or on none.

        Called by all processes, whatever is on its way: what process 0 knows by now decides, with its clock. Without
        a limit nobody asks; with one, process 0 waits for nobody, and the others for its word.
        """
        limit_s = self._policy.durable_max_age_s
        if limit_s is None:
            return
        age_s = self._coordinator.tell("overdue", self._failing_for_s, timeout_s=self._timeout_s)
        if age_s > limit_s:
            raise SaveFailedError(
                f"step {step} is not saved: every durable save of the last {age_s:.1f} s has failed, and "
                f"durable_max_age_s is {limit_s:g}; mend the durable tier, or raise durable_max_age_s",
                step=step,
                tier=DURABLE,
            )

    def _failing_for_s(self) -> float:
        from_s = self._failing_from_s  # the durable thread may set it meanwhile
        return 0.0 if from_s is None else clock.monotonic_s() - from_s

    def _verdict(self, error: Exception | None, landed: Callable[[], bool]) -> dict[str, Any]:
        mine = None if error is None else [is_transient(error), type(error).__name__, str(error)]

        def judge(said: list[Any]) -> dict[str, Any]:
            failed = [(process, *each) for process, each in enumerate(said) if each is not None]
            if not failed:
                return {"done": True}
            process, _, name, reason = failed[0]
            transient = all(each[1] for each in failed)
            return {"done": landed(), "transient": transient, "process": process, "name": name, "reason": reason}

        return self._coordinator.agree("durable-outcome", mine, judge, timeout_s=self._timeout_s)
