"""The share of time that saves at one interval cost: what the formulas and the simulation are held against."""

from __future__ import annotations

from typing import Any

import numpy as np


def overhead(interval_s: Any, cost_s: Any, mtbf_s: Any) -> Any:
    """Share of time that one level costs: saves, and work lost again, with exponential failures (exact).

    1 - w / (M (exp((w + C) / M) - 1)), the restart left out: Daly 2006, equation 13, without R.
    """
    work, mtbf = np.asarray(interval_s, float), np.asarray(mtbf_s, float)
    return 1.0 - work / (mtbf * np.expm1((work + np.asarray(cost_s, float)) / mtbf))
