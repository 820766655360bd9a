"""Counts lost saves, and decides when a job must not continue without an error."""

from __future__ import annotations

import threading
from typing import final

from ckptkit.errors import SaveFailedError
from ckptkit.model.manifest import SaveId
from ckptkit.model.policies import FailurePolicy
from ckptkit.util import clock
from ckptkit.util.words import count_text

_ANY = "any tier"
_WITHOUT_VERDICT = 3  # further losses, if process 0 sends nothing
_AGE_WITHOUT_VERDICT = 2.0  # times the limit, if process 0 sends nothing


@final
class SaveHealth:
    """The losses since the last commit, by tier. Safe from several threads.

    Process 0 decides when it is too much, and announces it in its verdicts: all processes raise in the same `save`. A
    process that no longer receives verdicts decides for itself, some losses later.
    """

    def __init__(self, policy: FailurePolicy):
        self._policy = policy
        self._lock = threading.RLock()  # of the threads that report; the step loop asks without it
        self._lost_in_row = 0  # saves that no tier has committed
        # By tier: when the first and the last loss since the last commit were, and which save the last one was.
        self._losses: dict[str, tuple[float, float, SaveId]] = {}
        self._reason = ""
        self._announced: str | None = None

    def committed(self, tier: str) -> None:
        """All processes hold a save in `tier`."""
        with self._lock:
            self._lost_in_row = 0
            self._losses.pop(_ANY, None)
            self._losses.pop(tier, None)

    def lost(self, save_id: SaveId, tier: str, reason: str, *, gone: bool) -> None:
        """A save was left out of `tier` for another reason than being too early; `gone`: no tier will have it."""
        with self._lock:
            self._reason = f"step {save_id.step}, tier {tier}: {reason}"
            self._lost_in_row += gone
            self._note(save_id, tier, gone=gone)

    def losing(self, save_id: SaveId, tier: str, *, gone: bool) -> None:
        """Process 0 is about to announce such a loss: the same message also has the result of `overdue`."""
        with self._lock:
            self._note(save_id, tier, gone=gone)

    def _note(self, save_id: SaveId, tier: str, *, gone: bool) -> None:
        now_s = clock.monotonic_s()
        for name in (tier, _ANY) if gone else (tier,):
            first_s, _, last = self._losses.get(name, (now_s, now_s, None))
            if last != save_id:  # process 0 notes one loss twice: when it announces it, and when it has learnt it
                self._losses[name] = first_s, now_s, save_id

    def overdue(self) -> str | None:
        """On process 0: why the next `save` is to raise; None where it is not.

        Begins to count anew: a loop that continues after the error has as much time again.
        """
        with self._lock:
            return self._overdue(self._policy.skipped_max)

    def announce(self, why: str | None) -> None:
        """Process 0 has found why the next `save` is to raise (None: it has not)."""
        if why is not None:
            with self._lock:
                self._announced = why
                self._begin_again()

    def raise_if_overdue(self, step: int) -> None:
        """Raises `SaveFailedError` where saves have been lost for longer than the policy allows."""
        most = self._policy.skipped_max
        why, self._announced = self._announced, None
        why = why or self._overdue(None if most is None else most + _WITHOUT_VERDICT, age_times=_AGE_WITHOUT_VERDICT)
        if why is not None:
            raise SaveFailedError(f"step {step} is not saved: {why}", step=step)

    def _overdue(self, most: int | None, *, age_times: float = 1.0) -> str | None:
        why = None
        if most is not None and self._lost_in_row >= most:
            why = f"{count_text(self._lost_in_row, 'save')} in a row lost (skipped_max={self._policy.skipped_max})"
        for tier, limit_s in self._policy.age_limits_s.items():
            # Until the last loss, not until now: a tier whose saves are further apart has another try.
            first_s, last_s, _ = self._losses.get(tier, (0.0, 0.0, None))
            if last_s - first_s > age_times * limit_s:
                why = f"{tier} has committed no save for {last_s - first_s:.0f} s (max_age_s={limit_s:g})"
        if why is None:
            return None
        self._begin_again()
        return f"{why}; the last loss was of {self._reason}"

    def _begin_again(self) -> None:
        self._lost_in_row = 0
        now_s = clock.monotonic_s()
        self._losses = {tier: (now_s, now_s, last) for tier, (*_, last) in list(self._losses.items())}
