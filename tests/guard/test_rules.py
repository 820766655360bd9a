"""When a value is suspicious, and when that is an alarm."""

from __future__ import annotations

import math
import random

import pytest

from ckptkit.guard import Divergence, NonFinite, Skips, Spike
from ckptkit.guard.rules import Finding, Reading, Rule


def judged(rule: Rule, values: list[float]) -> list[Finding | None]:
    """The finding of a rule at each value, as for a guard."""
    readings: list[Reading] = []
    found = []
    for step, value in enumerate(values):
        readings = [*readings, Reading(step, value)][-rule.readings_max :]
        found.append(rule.judge(readings))
        if found[-1] is not None:
            readings[-1] = readings[-1]._replace(suspect=True)
    return found


def noisy(steps: int, seed: int = 0) -> list[float]:
    """A loss that falls, with the noise of small batches."""
    rng = random.Random(seed)
    return [2 + 3 * math.exp(-step / 60) + rng.gauss(0, 0.05) for step in range(steps)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_is_an_alarm_at_once(value: float) -> None:
    """A run would save a state of NaN for as long as it is patient."""
    assert judged(NonFinite(), [1.0, value])[1] == Finding("non-finite", math.inf, 1)
    assert judged(NonFinite(), [1.0, 2.0]) == [None, None]


def test_spike_has_its_onset_at_the_first_high_value() -> None:
    """The run would go back to a step within the trouble."""
    found = judged(Spike(patience=3), [*noisy(100), 6.0, 6.0, 6.0])
    assert not any(found[:100])
    assert [each and each.onset for each in found[100:]] == [None, None, 100]


def test_one_high_value_is_no_alarm() -> None:
    """Every odd batch would cost a rollback."""
    found = judged(Spike(patience=3), [*noisy(100), 6.0, 6.0, *noisy(110)[100:], 6.0, 2.5, 2.5])
    assert not any(each and each.onset is not None for each in found)


def test_high_values_do_not_raise_the_limit() -> None:
    """A long spike would become what is usual, and the alarm would never come."""
    limits = [each.limit for each in judged(Spike(patience=50), [*noisy(100), *[6.0] * 40]) if each]
    assert len(limits) == 40
    assert len(set(limits)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_rules_are_silent_on_a_run_that_falls_with_noise(seed: int) -> None:
    """A healthy run would be taken back."""
    for rule in (NonFinite(), Spike(), Divergence()):
        assert not any(each and each.onset is not None for each in judged(rule, noisy(600, seed))), (seed, rule)


def test_divergence_finds_a_slow_rise_that_no_spike_is() -> None:
    """A run that leaves its valley slowly would never be noticed."""
    rng = random.Random(0)
    rise = [*noisy(300), *(2.0 + 0.004 * step + rng.gauss(0, 0.05) for step in range(150))]
    assert not any(each and each.onset is not None for each in judged(Spike(), rise))
    found = judged(Divergence(window=50), rise)
    first, finding = next((step, each) for step, each in enumerate(found) if each)
    assert 300 <= first < 420
    assert finding.onset == first - 49


def test_constant_signal_raises_no_alarm_by_its_last_digits() -> None:
    """A median absolute deviation of 0 would make every rounding a spike."""
    assert not any(judged(Spike(), [*[1.0] * 100, *[1.001] * 20]))


@pytest.mark.parametrize(
    "make", [lambda: Spike(deviations=0), lambda: Spike(minimum=200), lambda: Divergence(window=1)]
)
def test_rules_that_cannot_work_are_refused(make) -> None:
    """A guard would run and never report anything."""
    with pytest.raises(ValueError, match="give deviations above 0"):
        make()


def test_skips_number_the_batches_that_are_left() -> None:
    """A batch would be trained on twice, or left out unsaid."""
    skips = Skips().and_also(5, 8).and_also(10, 11)
    assert list(map(skips.batch_of, range(9))) == [0, 1, 2, 3, 4, 8, 9, 11, 12]
    assert skips.and_also(7, 10) == Skips(((5, 11),))
    assert str(skips) == "5 to 7, 10 to 10"


@pytest.mark.parametrize("ranges", [((5, 5),), ((5, 8), (7, 9)), ((8, 9), (1, 2)), ((-1, 2),)])
def test_ranges_that_are_no_skips_are_refused(ranges) -> None:
    """A damaged position would be trained from."""
    with pytest.raises(ValueError, match="ascending, disjoint ranges"):
        Skips(ranges)
