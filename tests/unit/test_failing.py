"""When durable saves have been failing for too long: one verdict, and nobody waits for a save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.coordination import Coordinator, Decide, LocalCoordinator
from ckptkit.errors import SaveFailedError
from ckptkit.events import EventLog
from ckptkit.manager.failing import DurableUpkeep
from ckptkit.policy import FailurePolicy


class Told:
    """A process that is told a word of process 0, whatever it would say itself."""

    process = 1
    count = 2

    def __init__(self, word: float):
        self._word = word
        self.asked = 0

    def agree(self, channel: str, value: Any, decide: Decide, *, timeout_s: float) -> Any:
        del channel, timeout_s
        return decide([value, None])

    def tell(self, channel: str, decide: Callable[[], Any], *, timeout_s: float) -> Any:
        del channel, decide, timeout_s
        self.asked += 1
        return self._word


def upkeep(coordinator: Coordinator, max_age_s: float | None) -> DurableUpkeep:
    return DurableUpkeep(FailurePolicy(retries=0, durable_max_age_s=max_age_s), coordinator, EventLog(), 5.0)


def fail(kept: DurableUpkeep) -> None:
    def write() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        kept.attempt(0, write, lambda: False)


def test_what_process_0_knows_decides_for_all() -> None:
    """One process would raise from `save` where the others go on and wait for it."""
    with pytest.raises(SaveFailedError, match=r"step 7 is not saved: every durable save of the last 3\.0 s has failed"):
        upkeep(Told(3.0), 2.0).raise_if_overdue(7)  # nothing has failed here yet
    behind = upkeep(Told(0.0), 0.0)
    fail(behind)
    behind.raise_if_overdue(8)  # process 0 has not heard of it


def test_without_a_limit_nobody_is_asked() -> None:
    """Every durable save would cost a round trip for an option that is not set."""
    told = Told(1e9)
    upkeep(told, None).raise_if_overdue(1)
    assert told.asked == 0


def test_one_process_decides_by_its_own_clock() -> None:
    """A job of one process would never stop."""
    kept = upkeep(LocalCoordinator(), 0.0)
    kept.raise_if_overdue(1)
    fail(kept)
    with pytest.raises(SaveFailedError, match=r"durable_max_age_s is 0; mend the durable tier"):
        kept.raise_if_overdue(2)
    kept.attempt(3, lambda: None, lambda: False)
    kept.raise_if_overdue(4)
