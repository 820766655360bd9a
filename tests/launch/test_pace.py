"""A process that is persistently slower than the others is named while the job runs."""

from __future__ import annotations

import pytest

from ckptkit.launch import watch
from ckptkit.launch.roster import beats_message, beats_of
from ckptkit.launch.watch import Pace
from ckptkit.util import stragglers
from ckptkit.util.heartbeat import Beats, Saves


def beats(saves: int, own_s: float, computing_s: float) -> Beats:
    sums = Saves(count=saves, own_s=saves * own_s, computing_s=saves * computing_s)
    return Beats(count=1, step=1, at_s=1.0, longest_s=0.0, first_step=1, first_s=1.0, saves=sums)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(watch, "monotonic_s", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("slow", "line"),
    [
        ((0.5, 0.2), "process 1 is slow: it takes 500 ms for its part of a save, the others 100 ms; look at its host"),
        (
            (0.1, 0.02),
            "process 1 is slow: it starts its steps last; at saves the others wait 200 ms or more for the devices, and "
            "it waits 20 ms; look at its host",
        ),
    ],
)
def test_slow_process_is_named_once_after_enough_saves(
    slow: tuple[float, float], line: str, clock: list[float]
) -> None:
    """The job would run at the speed of its slowest host, and nobody would know which; or the log would be flooded."""
    watched, said = Pace(), []
    for second in range(20):
        clock[0] += 1.0
        found = watched.look({0: beats(3 * second, 0.1, 0.2), 1: beats(second, *slow), 2: beats(second, 0.1, 0.2)})
        said += [(second, each) for each in found]
        assert watched.look({1: beats(1000, 9.0, 9.0)}) == [], "two samples in one second"
    assert said == [(stragglers.SAMPLES_MIN, line)]


def test_even_processes_and_a_process_alone_are_not_named(clock: list[float]) -> None:
    """A host would be replaced without a reason."""
    even, alone = Pace(), Pace()
    for second in range(20):
        clock[0] += 1.0
        assert even.look({process: beats(second, 0.1, 0.2) for process in range(4)}) == []
        assert alone.look({0: beats(second, 5.0, 0.0), 1: None}) == []


def test_message_holds_the_beats_of_its_host_alone() -> None:
    """A host could put the blame on a process of another one, or its clock could make a step look hours old."""
    sent = {4: beats(3, 0.5, 0.25), 5: None, 9: beats(1, 1.0, 1.0)}
    received = beats_of(beats_message(sent), range(4, 6))
    assert set(received) == {4, 5}
    assert received[5] is None
    assert received[4] is not None
    assert received[4].saves == Saves(count=3, own_s=1.5, computing_s=0.75)
    assert abs(received[4].at_s - 1.0) < 5.0, "an age, not a time of the other clock"
