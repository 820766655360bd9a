"""When lost saves are too many: the next `save` raises, on every process or on none."""

from __future__ import annotations

from itertools import count

import pytest

from ckptkit.errors import SaveFailedError
from ckptkit.manager.observers import FirstOfMany
from ckptkit.model.manifest import SaveId
from ckptkit.model.policies import FailurePolicy
from ckptkit.save.book.health import SaveHealth


@pytest.fixture
def clock_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A stopped clock."""
    now_s = [1000.0]
    monkeypatch.setattr("ckptkit.util.clock.monotonic_s", lambda: now_s[0])
    return now_s


_numbers = count()


def next_save() -> SaveId:
    number = next(_numbers)
    return SaveId(1, number, number)


def lose(health: SaveHealth, saves: int, *, tier: str = "ram", gone: bool = True) -> None:
    for _ in range(saves):
        health.lost(next_save(), tier, "process 1: full", gone=gone)


def test_losses_in_a_row_are_announced_once() -> None:
    """A loop that only calls `save` would lose every checkpoint without an exception."""
    first, other = SaveHealth(FailurePolicy(skipped_max=3)), SaveHealth(FailurePolicy(skipped_max=3))
    lose(first, 2)
    assert first.overdue() is None
    lose(first, 1)
    why = first.overdue()
    for health in (first, other):
        health.announce(why)
        with pytest.raises(SaveFailedError, match=r"step 9 is not saved: 3 saves in a row lost .*process 1: full"):
            health.raise_if_overdue(9)
        health.raise_if_overdue(10)  # a loop that goes on has as many again
    assert first.overdue() is None


def test_commit_ends_the_count() -> None:
    """A run that lost one save a day would be ended after ten days."""
    health = SaveHealth(FailurePolicy(skipped_max=3))
    for _ in range(5):
        lose(health, 2)
        health.committed("ram")
    assert health.overdue() is None


def test_process_without_verdicts_decides_for_itself() -> None:
    """A process that is cut off from the others would go on training alone."""
    health = SaveHealth(FailurePolicy(skipped_max=2))
    lose(health, 2)
    health.raise_if_overdue(1)  # process 0 has a few saves to announce it
    lose(health, 20)
    with pytest.raises(SaveFailedError, match="saves in a row lost"):
        health.raise_if_overdue(2)


def test_age_of_each_tier_is_limited(clock_s: list[float]) -> None:
    """A durable tier that is away for hours would be noticed when the ramdisk is lost."""
    health = SaveHealth(FailurePolicy(skipped_max=None, max_age_s={"durable": 100.0}))
    lose(health, 3, tier="durable", gone=False)
    clock_s[0] += 99
    assert health.overdue() is None
    health.committed("ram")
    clock_s[0] += 2
    lose(health, 1, tier="durable", gone=False)
    assert "durable has committed no save for 101 s (max_age_s=100)" in str(health.overdue())


def test_one_lost_save_does_not_end_a_run_that_saves_seldom(clock_s: list[float]) -> None:
    """A job with a durable save every two hours would be ended by one disturbance of the bucket."""
    health = SaveHealth(FailurePolicy(max_age_s=100.0))
    for _ in range(2):
        lose(health, 1, tier="durable", gone=False)
        clock_s[0] += 7200
        assert health.overdue() is None  # as at each vote of the ramdisk meanwhile
        health.raise_if_overdue(1)
        health.committed("durable")
    lose(health, 1, tier="durable", gone=False)
    clock_s[0] += 7200
    lose(health, 1, tier="durable", gone=False)
    assert "durable has committed no save for 7200 s" in str(health.overdue())


def test_loss_that_is_learnt_late_is_one_loss(clock_s: list[float]) -> None:
    """A verdict that takes longer than the limit would end the job for one lost save."""
    health, save = SaveHealth(FailurePolicy(max_age_s=5.0)), next_save()
    health.losing(save, "durable", gone=True)
    clock_s[0] += 6
    health.lost(save, "durable", "away", gone=True)
    assert health.overdue() is None


def test_no_limit_raises_never(clock_s: list[float]) -> None:
    """A user who turned the limits off would lose a run to them."""
    health = SaveHealth(FailurePolicy(skipped_max=None, max_age_s=None))
    lose(health, 1000)
    clock_s[0] += 1e6
    assert health.overdue() is None
    health.raise_if_overdue(1)


def test_repeated_log_lines_are_counted(clock_s: list[float]) -> None:
    """A tier that is away would fill the log, or its line be missed."""
    limit = FirstOfMany(60.0)
    assert [limit.admit(("ram", "veto")) for _ in range(3)] == [0, None, None]
    assert limit.admit(("ssd", "veto")) == 0
    clock_s[0] += 61
    assert [limit.admit(("ram", "veto")) for _ in range(2)] == [2, None]


@pytest.mark.parametrize(
    "words", [{"skipped_max": 0}, {"max_age_s": 0.0}, {"max_age_s": {"ram": -1.0}}, {"raise_in_save": "some"}]
)
def test_invalid_limits_are_refused(words: dict[str, object]) -> None:
    """A mistyped limit would raise at every save, or never."""
    with pytest.raises(ValueError, match=next(iter(words))):
        FailurePolicy(**words)  # pyright: ignore[reportArgumentType]
