"""When durable saves have been failing for too long: one verdict, and nobody waits for a save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.errors import StoreError, TransientStoreError
from ckptkit.events import Event, EventLog, Kind
from ckptkit.job.coordination import Decide, LocalCoordinator
from ckptkit.model.policies import FailurePolicy
from tests.save.protocols import Retry


class Told:
    """A process that gets process 0's decision, whatever its own would be."""

    process = 1
    count = 2
    timeout_s = 5.0

    def __init__(self, word: float):
        self._word = word
        self.asked = self.failed = 0

    def agree(
        self,
        channel: str,
        value: Any,
        decide: Decide,
        *,
        timeout_s: float | None = None,
        about: str = "",
        is_veto: Callable[[Any], bool] | None = None,
        order: Any = None,
    ) -> Any:
        del channel, timeout_s, is_veto, order
        return decide([value, None])

    def ask_process_0(
        self,
        channel: str,
        decide: Callable[[], Any],
        *,
        timeout_s: float | None = None,
        about: str = "",
        order: Any = None,
    ) -> Any:
        if channel == "durable-pause":
            return [self.failed, self._word]
        self.asked += 1
        return self._word

    def recall(self, channel: str, about: str) -> tuple[bool, Any]:
        raise AssertionError(f"{channel} of {about}: no verdict was missed")

    def veto(self, channel: str, value: Any, decide: Decide, *, about: str) -> None:
        raise AssertionError(f"{channel} of {about}: nothing raised")


def fail(kept: Retry) -> None:
    def write() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        kept.attempt(0, write)


def paused(monkeypatch: pytest.MonkeyPatch, pauses: int) -> tuple[Retry, list[Event], list[float]]:
    """A tier that is paused after two failures, and a stopped clock."""
    now_s = [1000.0]
    monkeypatch.setattr("ckptkit.util.clock.monotonic_s", lambda: now_s[0])
    events: list[Event] = []
    log = EventLog()
    log.observe(events.append)
    kept = Retry(LocalCoordinator(), FailurePolicy(retries=5, pause_after=2, pause_s=10.0), log)
    for _ in range(pauses + 1):
        now_s[0] += 1000
        fail(kept)
    return kept, events, now_s


def test_pause_ends_with_one_attempt_and_grows_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is away would be asked at every save, or never again."""
    kept, events, now_s = paused(monkeypatch, 1)
    with pytest.raises(StoreError, match=r"paused for 10\.0 s more, after 2 failed saves in a row: .*full"):
        kept.attempt(3, lambda: pytest.fail("it was tried"))
    tries: list[int] = []

    def away() -> None:
        tries.append(1)
        raise ConnectionResetError("reset")

    now_s[0] += 10.5
    with pytest.raises(ConnectionResetError):
        kept.attempt(4, away)
    assert len(tries) == 1, "the probe has no retries"
    assert [event.fields["pause_s"] for event in events if "pause_s" in event.fields] == [10.0, 20.0]
    now_s[0] += 10.5
    with pytest.raises(StoreError, match=r"paused for 9\.5 s more"):
        kept.attempt(5, lambda: None)
    now_s[0] += 10
    kept.attempt(6, lambda: None)
    recovered = events[-1]
    assert (recovered.kind, recovered.step, recovered.fields["failures"]) == (Kind.RECOVERED, 6, 3)
    assert not kept.failing


def test_process_that_missed_a_verdict_pauses_with_the_others() -> None:
    """It would begin a save to which nobody comes, wait for them twice, and be busy there all the time."""
    told = Told(25.0)
    kept = Retry(told, FailurePolicy(pause_after=3))
    told.failed = 3
    with pytest.raises(StoreError, match=r"paused for 25\.0 s more, after 3 failed saves in a row"):
        kept.attempt(7, lambda: pytest.fail("it was tried"))
    told.failed = 0
    kept.attempt(8, lambda: None)
    assert not kept.failing


def test_pause_length_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a night of failures a tier would be left alone for days."""
    _, events, _ = paused(monkeypatch, 9)
    pauses = [event.fields["pause_s"] for event in events if "pause_s" in event.fields]
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0, 160.0, 160.0]


def test_forced_and_started_saves_are_not_refused_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save of a run, or what Orbax is writing already, would be called failed untried."""
    words: dict[str, Any]
    for words in ({"forced": True}, {"repeatable": False}):
        kept, _, _ = paused(monkeypatch, 1)
        kept.attempt(3, lambda: None, **words)
        assert not kept.failing


def test_unreadable_bucket_is_retried() -> None:
    """Whether the step has landed is asked of the bucket that has just failed: that would end all retries."""
    kept = Retry(LocalCoordinator(), FailurePolicy(retries=2, retry_delay_s=0.001))
    tries = [TransientStoreError("away"), TransientStoreError("away"), None]

    def write() -> None:
        if (error := tries.pop(0)) is not None:
            raise error

    def landed() -> bool:
        raise TransientStoreError("away")

    kept.attempt(1, write, landed)
    assert tries == []
