"""The account of loops whose step numbers are not 0, 1, 2, ...: they skip, repeat, and go back in one process."""

from __future__ import annotations

import pytest

from ckptkit.events import Event, Kind
from ckptkit.goodput import Part, goodput_report
from tests.goodput.test_goodput import at, parts, span
from tests.goodput.test_signs import save

STARTED = at(Kind.STARTED, 0.0, attempt=0)


def steps(begin_s: float, numbers: list[int], length_s: float = 1.0) -> list[Event]:
    return [
        span("step", begin_s + k * length_s, begin_s + (k + 1) * length_s, step=number)
        for k, number in enumerate(numbers)
    ]


def test_span_of_many_steps_counts_whole() -> None:
    """Breaks when a scan of ten steps for each span has a goodput of 10 %."""
    report = goodput_report([[STARTED, *steps(0.0, [10 * k for k in range(10)], 10.0)]])
    assert report.goodput.ml_goodput == pytest.approx(1.0)
    assert report.goodput.new_steps == pytest.approx(1.0)


def test_parts_of_a_step_are_one_step() -> None:
    """Breaks when four spans for each step, as of gradient accumulation, have a goodput of 25 %."""
    report = goodput_report([[STARTED, *steps(0.0, [k // 4 for k in range(100)])]])
    assert report.goodput.ml_goodput == pytest.approx(1.0)
    assert report.goodput.new_steps == pytest.approx(1.0)
    assert (report.goodput.distinct_steps, report.goodput.step_s_p50) == (25, pytest.approx(4.0))


def test_every_tenth_step_stands_for_ten() -> None:
    """Breaks when a log with a line for each tenth step counts the others as lost; the loss still counts."""
    first = [STARTED, *(span("step", 10.0 * k, 10.0 * k + 1, step=10 * k) for k in range(6))]
    second = [span("step", 100.0 + 10 * k, 101.0 + 10 * k, step=40 + 10 * k) for k in range(6)]
    report = goodput_report([first, [at(Kind.STARTED, 100.0, attempt=1), *second]])
    assert report.goodput.ml_goodput == pytest.approx((40.0 + 51.0) / 151.0)
    assert report.disruptions[0].lost_steps == 2


def test_step_that_raised_is_not_in_the_time_of_the_step_before() -> None:
    """Breaks when a step that failed and is tried again counts as progress in the first line."""
    failed = at(Kind.SPAN, 5.0, step=3, span="step", duration_s=2.0, failed=True)
    report = goodput_report([[STARTED, *steps(0.0, [0, 1, 2]), failed, *steps(5.0, [3, 4, 5])]])
    assert report.goodput.ml_goodput == pytest.approx(6 / 8)
    assert report.parts_s[Part.WASTED] == pytest.approx(2.0)


@pytest.mark.parametrize("named", [25, None])
@pytest.mark.parametrize("first", [25, 26])  # by what the number of a save means
def test_restore_of_an_older_step_is_a_rollback(named: int | None, first: int) -> None:
    """Breaks when the steps that a loop undoes itself, without a guard, are productive twice."""
    restore = span("checkpoint_restore", 50.0, 51.0, step=named)
    again = steps(51.0, list(range(first, first + 50)))
    report = goodput_report([[STARTED, *steps(0.0, list(range(50))), restore, *again]])
    lost = 50 - first
    assert parts(report) == {
        "productive": first + 50.0,
        "checkpoint_restore": 1.0,
        "wasted_progress_from_spike": lost,
    }
    assert report.goodput.ml_goodput == pytest.approx((100 - lost) / 101)
    assert report.goodput.new_steps == pytest.approx((100 - lost) / 101)


def test_restore_that_repeats_no_step_undoes_none() -> None:
    """Breaks when a restore for an evaluation, or one of another training in the process, makes a run a waste."""
    evaluation = span("checkpoint_restore", 10.0, 11.0, step=3)
    log = [STARTED, *steps(0.0, list(range(10))), evaluation, *steps(11.0, list(range(10, 20)))]
    another = [span("checkpoint_restore", 31.0, 32.0, step=500), *steps(32.0, list(range(5)))]
    report = goodput_report([[*log, *another]])
    assert report.parts_s[Part.WASTED_BY_SPIKE] == 0.0
    failed = at(Kind.SPAN, 33.0, step=2, span="checkpoint_restore", duration_s=1.0, failed=True)
    report = goodput_report([[STARTED, *steps(0.0, list(range(5))), failed, *steps(33.0, [2, 3])]])
    assert report.parts_s[Part.WASTED_BY_SPIKE] == 0.0


def test_two_rollbacks_undo_what_each_went_back_over() -> None:
    """Breaks when a second rollback, less far back than the first, brings steps back that the first undid."""
    log = [STARTED, *steps(0.0, list(range(10)))]
    log += [span("checkpoint_restore", 10.0, 11.0, step=2), *steps(11.0, list(range(2, 8)))]
    log += [span("checkpoint_restore", 17.0, 18.0, step=6), *steps(18.0, list(range(6, 12)))]
    report = goodput_report([log])
    assert report.parts_s[Part.WASTED_BY_SPIKE] == pytest.approx(8.0 + 2.0)
    assert report.goodput.distinct_steps == 12


def guarded(first: int) -> list[Event]:
    """A guard goes back to save 3; the next step has number `first`."""
    back = [span("checkpoint_restore", 6.0, 7.0, step=3), at(Kind.ROLLED_BACK, 7.0, step=3)]
    return [STARTED, *steps(0.0, list(range(6))), *back, *steps(7.0, list(range(first, 8)))]


@pytest.mark.parametrize(("first", "undone"), [(3, 3), (4, 2)])
def test_restored_step_is_kept_where_its_save_holds_it(first: int, undone: int) -> None:
    """Breaks when each rollback of a guard with step_number="last" has one kept step too few."""
    report = goodput_report([guarded(first)])
    assert report.parts_s[Part.WASTED_BY_SPIKE] == pytest.approx(undone)
    assert report.goodput.distinct_steps == 8


@pytest.mark.parametrize("later", [True, False])
def test_restored_step_is_kept_where_steps_are_known_from_calls(later: bool) -> None:
    """Breaks when the step that was saved, and that a guard went back to, counts as undone."""
    log = [STARTED, at(Kind.OPENED, 0.0), *(save(k, k, k + 0.1) for k in range(1, 6))]
    log += [span("checkpoint_restore", 5.5, 6.0, step=3), at(Kind.ROLLED_BACK, 6.0, step=3)]
    log += [save(k, k + 3.0, k + 3.1) for k in range(4, 8)] if later else []
    report = goodput_report([log])
    assert report.goodput.distinct_steps == (7 if later else 3)
    assert report.parts_s[Part.WASTED_BY_SPIKE] == pytest.approx(2 * 0.9)
