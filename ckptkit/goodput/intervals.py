"""How much work to do between two saves: the formulas, over numbers or arrays of runs.

All times are in seconds. `cost_s` is the time that a save takes from the step loop (stall and contention). `mtbf_s` is
the mean time between the failures that lose the work of this interval. An interval is time of work, the save not
included.

If failures cluster, the hazard is highest just after a failure, so intervals should grow with the age of the uptime.
Save n comes at an age of `first * n ** (1 / growth)`: its rate follows the square root of a Weibull hazard of shape 2 *
growth - 1 (Y. Ling, J. Mi, X. Lin, IEEE TC 50(7), 2001). A growth of 1 gives a constant interval.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

GROWTHS = (0.6, 0.7, 0.8, 0.9, 1.0)
INTERVAL_MAX_S = 24 * 3600.0  # unless the caller sets another one
# Uptimes without clusters that are believed before any was seen, and the most that one may weigh: bench/LOG.md.
_LIVES, _SHARE_MAX = 5.0, 20.0
_GROWTHS = np.array(GROWTHS)
_POWERS = np.stack([_GROWTHS, 1.0 - _GROWTHS])
_EXPONENTIAL = np.array([[math.gamma(1.0 + power) for power in row] for row in _POWERS])


def young_s(cost_s: Any, mtbf_s: Any) -> Any:
    """sqrt(2 C M): J. W. Young, CACM 17(9), 1974. Good while the cost is small against the MTBF."""
    return np.sqrt(2.0 * np.asarray(cost_s, float) * np.asarray(mtbf_s, float))


def daly_s(cost_s: Any, mtbf_s: Any) -> Any:
    """The higher-order estimate of J. T. Daly, FGCS 22(3), 2006, equation 37: never above the MTBF.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C where C < 2M, else M.
    """
    cost, mtbf = np.asarray(cost_s, float), np.asarray(mtbf_s, float)
    share = np.minimum(cost / (2.0 * mtbf), 1.0)
    estimate = young_s(cost, mtbf) * (1.0 + np.sqrt(share) / 3.0 + share / 9.0) - cost
    return np.where(cost < 2.0 * mtbf, np.maximum(estimate, 0.0), mtbf)


def levels_s(costs_s: Any, mtbfs_s: Any) -> Any:
    """The optimum of several levels, fastest first: shapes (..., levels) in and out.

    `mtbfs_s[i]` is that of failures which level `i` survives and no faster one does (infinity: none). To first
    order the levels do not disturb each other, so each has its own optimum (A. Benoit et al., "Towards optimal
    multi-level checkpointing", IEEE TC 66(7), 2017); here each by `daly_s`. A slower level must not save more often
    than a faster one. If its optimum asks for that, neighbours share one interval, for their costs and failures
    together (the min-max form of isotonic regression). Cost: levels^3 operations on arrays of runs.
    """
    levels = range(np.shape(costs_s)[-1])
    costs, rates = _levels_first(costs_s, 1.0 / np.asarray(mtbfs_s, float))
    pairs = [(first, last) for first in levels for last in levels[first:]]
    cost, rate = (np.stack([reduce(np.add, each[j : k + 1]) for j, k in pairs]) for each in (costs, rates))
    with np.errstate(divide="ignore", invalid="ignore"):  # never a failure: no interval
        together = np.where(rate > 0, daly_s(cost, 1.0 / rate), np.inf)
    shared = dict(zip(pairs, together, strict=True))  # the interval that levels first to last would have together

    def optimum(level: int) -> np.ndarray:
        least = (reduce(np.minimum, (shared[j, k] for k in levels[level:])) for j in levels[: level + 1])
        return reduce(np.maximum, least)

    return _behind(np.stack([optimum(level) for level in levels]), 1)


def _levels_first(costs: Any, rates: Any) -> list[np.ndarray]:
    """Both with as many axes, the levels in front."""
    axes = max(np.ndim(costs), np.ndim(rates))
    padded = (np.asarray(each, float)[(None,) * (axes - np.ndim(each))] for each in (costs, rates))
    return [_in_front(each, 1) for each in padded]


def _in_front(table: np.ndarray, axes: int) -> np.ndarray:
    """The last axes in front and those of runs behind, side by side in memory: operations on all runs are the cost."""
    runs = table.ndim - axes
    return np.ascontiguousarray(table.transpose(*range(runs, table.ndim), *range(runs)))


def _behind(table: np.ndarray, axes: int) -> np.ndarray:
    """The first axes behind those of runs again, as callers see them."""
    return table.transpose(*range(axes, table.ndim), *range(axes))


def learned_s(
    costs_s: Any, failures: Any, up_s: Any, *, prior_failures: float, prior_mtbf_s: float, prior_shares: Any
) -> Any:
    """`levels_s` of what was seen: `failures` (..., levels) in `up_s` of uptime, and a prior.

    The prior is worth `prior_failures` failures at `prior_mtbf_s`, divided over the levels by `prior_shares`: the
    posterior mean of a gamma prior for the rate and a Dirichlet prior for the shares.
    """
    counts = np.asarray(prior_shares, float) * prior_failures + np.asarray(failures, float)
    exposed_s = np.asarray(prior_failures * prior_mtbf_s + np.asarray(up_s, float))
    with np.errstate(divide="ignore"):
        return levels_s(costs_s, exposed_s[..., None] / counts)


def moments(up_s: Any, mean_s: Any) -> Any:
    """The evidence of an uptime for clusters, to be summed over uptimes: its powers, relative to the mean uptime so far
    (its own included). Shape (..., 2, growths), from (...).
    """
    share = np.minimum(np.asarray(up_s, float) / np.asarray(mean_s, float), _SHARE_MAX)
    return _behind(share ** _over(share, _POWERS), 2)


def _over(runs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """`table` with axes behind for those of `runs`."""
    return table.reshape(table.shape + (1,) * np.ndim(runs))


def growth(summed: Any) -> tuple[Any, Any]:
    """The growth that would have cost least on the uptimes whose `moments` are `summed`, and its factor of `first_s`.

    Saves at ages `(n / A) ** (1 / q)` cost `C A E[t^q]` in an uptime t. To first order they lose
    `E[t^(1 - q)] / (2 q A)` of it. With the best A the sum is the square root of `2 C E[t^q] E[t^(1 - q)] / q`. No
    distribution is assumed; the prior is 5 exponential uptimes, whose best growth is 1.
    """
    sums = _in_front(np.asarray(summed, float), 2)
    sums = sums + _LIVES * _over(sums[0, 0], _EXPONENTIAL)
    risen, rest = sums
    best = np.argmin(risen * rest / _over(risen[0], _GROWTHS), axis=0)
    flat = sums.reshape(2, len(_GROWTHS), -1)
    of = flat[:, best.ravel(), np.arange(best.size)].reshape(2, *best.shape) / rest[-1]
    chosen, mean = _GROWTHS[best], risen[-1] / rest[-1]
    return chosen, (of[1] * mean ** (2.0 * chosen - 1.0) / (chosen * of[0])) ** (-0.5 / chosen)


def first_s(period_s: Any, mtbf_s: Any, grown: tuple[Any, Any]) -> Any:
    """When the first save after a restart ends, where `period_s` from save to save would be best without clusters.

    `mtbf_s` is that of all failures together, `grown` what `growth` found. With a growth of 1 it is `period_s`.
    """
    chosen, factor = grown
    mtbf = np.asarray(mtbf_s, float)
    return mtbf * (np.asarray(period_s, float) / mtbf) ** (1.0 / chosen) * factor


def next_s(first: Any, age_s: Any, chosen: Any) -> Any:
    """From a save at `age_s` of the uptime to the next one, where the first is due at `first`."""
    age = np.asarray(age_s, float)
    return (age**chosen + np.asarray(first, float) ** chosen) ** (1.0 / chosen) - age
