"""Whether an attempt fails where the last one did."""

from __future__ import annotations

from ckptkit.launch.watch import Watch
from ckptkit.util.heartbeat import Beats


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
