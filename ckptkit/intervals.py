"""How much work to do between two saves: the formulas, over numbers or arrays of runs.

All times are in seconds. `cost_s` is what a save takes from the step loop (stall and contention), `mtbf_s` the mean
time between the failures that lose what this interval puts at risk; an interval is time of work, the save not included.
"""

from __future__ import annotations

from typing import Any

import numpy as np


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
    than a faster one: where its optimum asks for it, neighbours share an interval, that of their costs and their
    failures together (the min-max form of isotonic regression). Cost: levels^3 operations on arrays.
    """
    costs, rates = np.broadcast_arrays(np.asarray(costs_s, float), 1.0 / np.asarray(mtbfs_s, float))
    levels = costs.shape[-1]

    def shared(first: int, last: int) -> np.ndarray:
        cost, rate = costs[..., first : last + 1].sum(axis=-1), rates[..., first : last + 1].sum(axis=-1)
        return np.where(rate > 0, daly_s(cost, 1.0 / np.where(rate > 0, rate, 1.0)), np.inf)

    def optimum(level: int) -> np.ndarray:
        least = [np.minimum.reduce([shared(j, k) for k in range(level, levels)]) for j in range(level + 1)]
        return np.maximum.reduce(least)

    return np.stack([optimum(level) for level in range(levels)], axis=-1)


def overhead(interval_s: Any, cost_s: Any, mtbf_s: Any) -> Any:
    """Share of time that one level costs: saves, and work lost again, with exponential failures (exact).

    1 - w / (M (exp((w + C) / M) - 1)), the restart left out: Daly 2006, equation 13, without R.
    """
    work, mtbf = np.asarray(interval_s, float), np.asarray(mtbf_s, float)
    return 1.0 - work / (mtbf * np.expm1((work + np.asarray(cost_s, float)) / mtbf))
