"""Whether an attempt fails where the last one did, and which of its processes hangs."""

from __future__ import annotations

import pytest

from ckptkit.launch import HangPolicy, RestartPolicy
from ckptkit.launch.watch import Hang, Recovery, Watch
from ckptkit.util.heartbeat import Beats, Saves


def beats(step: int) -> Beats:
    return Beats(count=1, step=step, at_s=1.0, longest_s=0.0, first_step=step, first_s=1.0)


def test_failure_before_a_step_of_process_0_is_at_no_step() -> None:
    """The restart would be announced as a failure "after step None again", and delayed."""
    watch = Watch(None)
    watch.begin(0)
    watch.lost(1.0, failed=True)
    watch.begin(1)
    watch.recovery({0: None, 1: beats(1)})
    watch.look({0: None, 1: beats(1)})
    watch.lost(2.0, failed=True)
    assert watch.has_stepped
    assert watch.reached is None
    assert not watch.fails_again


def test_signal_between_two_failures_makes_them_no_repetition() -> None:
    """A job that is killed now and then would wait longer and longer."""
    watch = Watch(None)
    for attempt, (failed, again) in enumerate([(True, False), (False, False), (True, False), (True, True)]):
        watch.begin(attempt)
        watch.recovery({0: beats(7)})
        watch.look({0: beats(7)})
        watch.lost(float(attempt), failed=failed)
        assert watch.fails_again is again, attempt


def watched(monkeypatch: pytest.MonkeyPatch, hang: HangPolicy) -> tuple[Watch, list[float]]:
    """A watch whose first attempt begins at 100 s, and the clock."""
    now = [100.0]
    monkeypatch.setattr("ckptkit.launch.watch.monotonic_s", lambda: now[0])
    watch = Watch(hang)
    watch.begin(0)
    return watch, now


def at(count: int, at_s: float, longest_s: float = 0.0, first_s: float = 100.0) -> Beats:
    return Beats(count=count, step=count, at_s=at_s, longest_s=longest_s, first_step=1, first_s=first_s)


def lost(process: int, pause_s: float, limit_s: float = 60.0, *, is_lost: bool = True) -> Hang:
    return Hang(process=process, pause_s=pause_s, limit_s=limit_s, is_lost=is_lost)


def test_given_limit_counts_from_the_start_of_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that hangs before its first step would never end, whatever limit its user gave."""
    watch, now = watched(monkeypatch, HangPolicy(limit_s=60.0))
    now[0] = 159.0
    assert watch.look({0: None, 1: None}) is None
    now[0] = 161.0
    assert watch.look({0: None, 1: None}) == lost(0, 61.0)
    assert watch.look({}) is None, "workers that are not Python mark no steps"
    watch.begin(1)
    assert watch.look({0: None, 1: None}) is None


def test_limit_before_a_first_step_is_learnt_from_earlier_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long compilation would be taken for a deadlock, or a start that hangs after a restart wait without a limit."""
    watch, now = watched(monkeypatch, HangPolicy())
    now[0] = 1e6
    assert watch.look({0: None}) is None, "nothing is known of this job"
    assert watch.look({0: at(40, 1e6, first_s=400.0)}) is None
    watch.begin(1)
    now[0] = 1e6 + 2999.0  # ten times the 300 s of the first attempt
    assert watch.look({0: None}) is None
    now[0] += 2.0
    assert watch.look({0: None}) == lost(0, 3001.0, 3000.0, is_lost=False)
    assert watch.look({0: None}) is None, "it is reported once"
    now[0] += 3000.0
    assert watch.look({0: None}) == lost(0, 6001.0, 3000.0)


@pytest.mark.parametrize("saves", [1, 40, 400])
def test_loop_that_calls_only_where_it_saves_is_never_ended_by_default(
    saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged script of Orbax that saves each few hours would be restarted until its restarts are spent."""
    watch, now = watched(monkeypatch, HangPolicy())
    for attempt in range(2):
        watch.begin(attempt)
        now[0] += 1e6
        assert watch.look({0: None}) is None
        saved = Saves(count=saves)
        done = Beats(count=saves + 1, step=saves, at_s=now[0], longest_s=1.0, first_step=1, first_s=now[0], saves=saved)
        now[0] += 1e7
        assert watch.look({0: done}) is None


def test_loop_that_marks_its_steps_is_suspected_once_and_then_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that hangs in a collective would hold its machines until a person looks."""
    watch, now = watched(monkeypatch, HangPolicy())
    now[0] = 1000.0
    assert watch.look({0: at(500, 1000.0)}) is None
    now[0] = 2801.0
    assert watch.look({0: at(500, 1000.0)}) == lost(0, 1801.0, 1800.0, is_lost=False)
    assert watch.look({0: at(501, 2801.0, 1801.0)}) is None, "it was an evaluation"
    now[0] = 2801.0 + 2 * 18_010.0 + 1.0
    assert watch.look({0: at(501, 2801.0, 1801.0)}) == lost(0, 36_021.0, 18_010.0)


def test_process_without_a_step_is_named_before_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher would name a healthy process, and its host would be replaced."""
    watch, now = watched(monkeypatch, HangPolicy(limit_s=60.0))
    now[0] = 200.0
    assert watch.look({0: at(2, 130.0), 1: at(1, 120.0), 2: None}) == lost(2, 70.0)
    assert watch.look({0: at(2, 130.0), 1: at(1, 120.0)}) == lost(1, 70.0)


@pytest.mark.parametrize("restarts", [0, 1, 1023, 1024, 10**9])
def test_wait_before_a_restart_has_a_bound(restarts: int) -> None:
    """A job with many restarts would end with an OverflowError of its launcher."""
    assert RestartPolicy(backoff_s=1.0).backoff_after(restarts) == min(60.0, 2.0 ** min(restarts, 10))


@pytest.mark.parametrize(
    ("reached", "again"),
    [(None, "no step was lost"), (6, "no step was lost"), (7, "step 7 again"), (9, "steps 7 to 9 again")],
)
def test_recovery_names_the_steps_that_are_done_again(reached: int | None, again: str) -> None:
    """The line that most people see of a restart would read "steps 7 to 7 again"."""
    recovery = Recovery(attempt=2, seconds=1.5, step=7, reached=reached)
    assert recovery.text == f"attempt 2: step 7 is done 1.5 s after the loss; {again}"
