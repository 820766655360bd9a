"""Rules: when what a loop measures is suspicious, and when that is an alarm. Pure functions of the last readings.

The thresholds follow what teams publish. PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) went back to a
checkpoint about 100 steps before a spike and skipped the 200 to 500 batches around it; OPT-175B (Zhang et al. 2022,
arXiv:2205.01068, section 2.5) went back and lowered the rate; OLMo 2 (2025, arXiv:2501.00656) counts as a spike
what is 7 standard deviations from the mean of the last 1,000 values. Here a median takes the place of the mean, and the
median distance of neighbours that of the standard deviation: a few odd values do not move them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

# Of independent normal values: the median distance of two neighbours is 0.6745 x sqrt(2) standard deviations.
_DISTANCE_TO_DEVIATION = 1 / (0.6745 * math.sqrt(2))
_FLOOR = 0.01  # of the median: a signal that hardly moves would raise alarms by its last digits


class Reading(NamedTuple):
    """One value of one signal. `suspect`: a rule found it suspicious."""

    step: int
    value: float
    suspect: bool = False


class Finding(NamedTuple):
    """A rule's verdict on the newest reading: it is above `limit`. `onset`: the first step of the trouble for an alarm,
    None if the reading is only suspicious."""

    rule: str
    limit: float
    onset: int | None


class Rule(Protocol):
    """Judges the newest reading of a signal by those before it. The same readings give the same finding."""

    @property
    def signal(self) -> str | None:
        """The signal that it judges; None: every signal."""
        ...

    @property
    def readings_max(self) -> int:
        """How many readings it looks at, at most."""
        ...

    @property
    def delay_steps(self) -> int:
        """How many steps an alarm comes after its onset, at most."""
        ...

    def judge(self, readings: Sequence[Reading]) -> Finding | None:
        """None where the last of `readings` (oldest first, never empty) is as expected."""
        ...


@dataclass(frozen=True, slots=True)
class NonFinite:
    """An alarm at the first value that is NaN or infinite. `signal` None: of any signal."""

    signal: str | None = None
    readings_max = 1
    delay_steps = 0

    def judge(self, readings: Sequence[Reading]) -> Finding | None:
        """See `Rule.judge`."""
        newest = readings[-1]
        return None if math.isfinite(newest.value) else Finding("non-finite", math.inf, newest.step)


@dataclass(frozen=True, slots=True)
class Spike:
    """An alarm after `patience` values in a row that are `deviations` above the median of the `window` before them.

    A deviation is the standard deviation of normal values whose neighbours are as far apart, and at least 1 % of the
    median. Suspicious values are not among those `window`. The rule finds nothing before `minimum`
    values are known.
    """

    signal: str = "loss"
    deviations: float = 7.0
    window: int = 128
    patience: int = 3
    minimum: int = 32

    def __post_init__(self) -> None:
        if not (self.deviations > 0 and 2 <= self.minimum <= self.window and self.patience >= 1):
            raise ValueError(f"{self}: give deviations above 0, patience of 1 or more, 2 <= minimum <= window")

    @property
    def readings_max(self) -> int:
        """See `Rule.readings_max`."""
        return self.window + 4 * self.patience  # some of them are suspicious

    @property
    def delay_steps(self) -> int:
        """See `Rule.delay_steps`."""
        return self.patience - 1

    def judge(self, readings: Sequence[Reading]) -> Finding | None:
        """See `Rule.judge`."""
        usual = [each.value for each in readings[:-1] if not each.suspect and math.isfinite(each.value)][-self.window :]
        if len(usual) < self.minimum:
            return None
        middle = median(usual)
        limit = middle + self.deviations * _deviation(usual, middle)
        if not readings[-1].value > limit:
            return None
        row = [readings[-1].step]
        for each in reversed(readings[:-1]):
            if not each.suspect or len(row) == self.patience:
                break
            row.append(each.step)
        return Finding("spike", limit, row[-1] if len(row) == self.patience else None)


@dataclass(frozen=True, slots=True)
class Divergence:
    """An alarm where the median of the last `window` values is `deviations` above that of the `window` before them.

    It finds what rises too slowly for `Spike`, or stays high. A deviation is as in `Spike`, of the earlier values.
    """

    signal: str = "loss"
    deviations: float = 3.0
    window: int = 50

    def __post_init__(self) -> None:
        if not (self.deviations > 0 and self.window >= 2):
            raise ValueError(f"{self}: give deviations above 0 and a window of 2 values or more")

    @property
    def readings_max(self) -> int:
        """See `Rule.readings_max`."""
        return 2 * self.window

    @property
    def delay_steps(self) -> int:
        """See `Rule.delay_steps`."""
        return self.window - 1

    def judge(self, readings: Sequence[Reading]) -> Finding | None:
        """See `Rule.judge`."""
        values = [each.value for each in readings[-2 * self.window :]]
        if len(values) < 2 * self.window or not all(map(math.isfinite, values)):
            return None
        before, now = values[: self.window], values[self.window :]
        middle = median(before)
        limit = middle + self.deviations * _deviation(before, middle)
        return Finding("divergence", limit, readings[-self.window].step) if median(now) > limit else None


def _deviation(values: Sequence[float], middle: float) -> float:
    """From the distances of neighbours: the fall of a young run's loss within the window is not noise."""
    distances = [abs(later - value) for value, later in pairwise(values)]
    return max(_DISTANCE_TO_DEVIATION * median(distances), _FLOOR * abs(middle))
