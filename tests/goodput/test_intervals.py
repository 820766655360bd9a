"""The formulas for save intervals: near the optimum of the exact cost, and ordered over levels."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.goodput.intervals import GROWTHS, daly_s, first_s, growth, levels_s, moments, next_s, young_s
from tests.goodput.exact import overhead

COSTS = st.floats(1e-2, 1e3)
MTBFS = st.floats(1e3, 1e7)


def test_young_is_the_square_root_of_twice_the_product():
    """A wrong constant would set every interval wrong by the same factor, and nothing else would show it."""
    assert young_s(50.0, 10_000.0) == pytest.approx(1000.0)


@given(cost=COSTS, mtbf=MTBFS)
def test_daly_is_within_a_ten_thousandth_of_the_optimum(cost: float, mtbf: float):
    """The estimate must be as good as in its paper: within a ten-thousandth of the least overhead."""
    grid = daly_s(cost, mtbf) * np.geomspace(0.2, 5.0, 4001) if daly_s(cost, mtbf) > 0 else np.array([mtbf])
    least = overhead(grid, cost, mtbf).min()
    assert overhead(daly_s(cost, mtbf), cost, mtbf) <= least + 1e-4 or cost > mtbf / 2


def test_daly_never_exceeds_the_mtbf():
    """Where a save costs more than twice the MTBF, saving once per MTBF is what is left."""
    assert daly_s(3000.0, 1000.0) == 1000.0


@settings(deadline=None)
@given(costs=st.lists(COSTS, min_size=3, max_size=3), mtbfs=st.lists(MTBFS, min_size=3, max_size=3))
def test_levels_are_ordered_and_no_ordered_choice_is_cheaper(costs: list[float], mtbfs: list[float]):
    """Levels that share an interval must share the best one: a faster tier that saved alone would be a waste."""
    found = levels_s(np.array(costs), np.array(mtbfs))
    assert (np.diff(found) >= 0).all()
    if max(costs) > min(mtbfs) / 100:
        return  # far from first order, the levels' own overheads do not add up any more

    def first_order(wanted: np.ndarray) -> float:
        return float((np.array(costs) / wanted + wanted / (2 * np.array(mtbfs))).sum())

    factors = np.geomspace(0.25, 4.0, 9)
    others = (found * np.array(each) for each in itertools.product(factors, repeat=3))
    best = min(first_order(each) for each in others if (np.diff(each) >= 0).all())
    assert first_order(found) <= best * 1.02


def test_level_that_nothing_needs_never_saves_or_affects_others():
    """A tier that alone survives no failure must not pull the others to its interval."""
    found = levels_s(np.array([0.1, 5.0]), np.array([1e4, np.inf]))
    assert found[0] == pytest.approx(float(daly_s(0.1, 1e4)))
    assert np.isinf(found[1])


def grown(uptimes: np.ndarray) -> tuple[float, float]:
    """The result of `growth` for these uptimes, each relative to their mean."""
    chosen, factor = growth(moments(uptimes, uptimes.mean()).sum(axis=0))
    return float(chosen), float(factor)


@pytest.mark.parametrize(("shape", "expected"), [(1.0, (1.0,)), (0.7, (0.8, 0.9)), (0.5, (0.7, 0.8)), (3.0, (1.0,))])
def test_interval_growth_follows_the_clustering_of_failures(shape: float, expected: tuple[float, ...]):
    """Growing without clusters would cost goodput; a Weibull shape k asks for (k + 1) / 2 at most."""
    uptimes = np.random.default_rng(2).weibull(shape, 4000)
    chosen, _ = grown(uptimes)
    assert chosen in expected
    assert grown(uptimes[:3])[0] >= 0.9, "three uptimes prove little"


def test_interval_is_unchanged_without_clusters():
    """All that is known of Daly's interval must go on to hold where there is nothing to gain."""
    nothing = growth(np.zeros((2, len(GROWTHS))))
    assert float(nothing[0]) == 1.0
    assert float(first_s(1000.0, 20_000.0, nothing)) == pytest.approx(1000.0)
    assert float(next_s(1000.0, 5000.0, 1.0)) == pytest.approx(1000.0)


@pytest.mark.parametrize("shape", [0.5, 0.7])
def test_growing_interval_beats_fixed_on_clustered_failures(shape: float):
    """The reason for growing at all: counted save by save, on failures that the choice has not seen."""
    rng, cost = np.random.default_rng(3), 0.03
    seen, uptimes = (rng.weibull(shape, 40_000) / math.gamma(1.0 + 1.0 / shape) for _ in range(2))
    chosen, factor = grown(seen)

    def kept(first: float, power: float) -> float:
        saves = np.floor((uptimes / first) ** power)
        return float(np.maximum(first * saves ** (1.0 / power) - saves * cost, 0.0).mean())

    best_fixed = max(kept(each, 1.0) for each in np.geomspace(0.1, 0.6, 40))
    first = float(first_s(daly_s(cost, 1.0) + cost, 1.0, (chosen, factor)))
    assert kept(first, chosen) > best_fixed * (1.001 if shape == 0.7 else 1.005)
    ages = first * np.arange(1, 6) ** (1.0 / chosen)
    assert next_s(first, ages[:-1], chosen) == pytest.approx(np.diff(ages))
