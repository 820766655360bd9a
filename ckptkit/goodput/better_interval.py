"""The interval of saves that would have lost least of a run, and what a run lost with its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ckptkit.events import Event, Kind
from ckptkit.goodput import GoodputReport, intervals
from ckptkit.util.clock import time_text

LOSSES_MIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterInterval:
    """The tier that takes most saves: how often it is saved to, and how often it should be. All in seconds.

    By the first-order waste C/T + T/2M of Young and Daly: a save every T takes C, and a loss every M repeats half of T.
    """

    tier: str
    every_s: float
    best_s: float
    stall_s: float
    mtbf_s: float

    @property
    def gain(self) -> float:
        """The share of a run that the better interval would give back."""
        return self._waste(self.every_s) - self._waste(self.best_s)

    @property
    def arithmetic(self) -> str:
        """Both sums, as a reader would check them."""
        now, best = self._waste(self.every_s), self._waste(self.best_s)
        return f"stall/interval + interval/(2 x time between losses): {self._sum(self.every_s)} = {now:.2%} now, " + (
            f"{self._sum(self.best_s)} = {best:.2%} then"
        )

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {**asdict(self), "gain": self.gain}

    def _waste(self, every_s: float) -> float:
        return min(1.0, self.stall_s / every_s + every_s / (2 * self.mtbf_s))

    def _sum(self, every_s: float) -> str:
        stall, every, mtbf = map(time_text, (self.stall_s, every_s, self.mtbf_s))
        return f"{stall}/{every} + {every}/(2 x {mtbf})"


def better_interval(report: GoodputReport, events: Sequence[Event]) -> BetterInterval | None:
    """The best interval by Daly's formula (`intervals.daly_s`), from the run's own numbers.

    C: the median stall, T: the median time between commits to the tier that takes most saves, M: the run over its
    losses. None where these are not known: with fewer than 3 losses or commits, or without stalls.
    """
    if len(report.disruptions) < LOSSES_MIN or not report.saves.stall_ms_p50:
        return None
    committed = [event for event in events if event.kind == Kind.COMMITTED and event.process == 0 and event.tier]
    counts = Counter(event.tier for event in committed)
    tier = counts.most_common(1)[0][0] if counts else None
    times = sorted(event.at_s for event in committed if event.tier == tier)
    gaps = [after - before for before, after in pairwise(times)]
    if tier is None or len(gaps) < LOSSES_MIN or median(gaps) <= 0:
        return None
    stall_s, mtbf_s = report.saves.stall_ms_p50 / 1e3, report.wall_s / len(report.disruptions)
    best_s = max(1e-6, float(intervals.daly_s(stall_s, mtbf_s)))
    return BetterInterval(tier=tier, every_s=median(gaps), best_s=best_s, stall_s=stall_s, mtbf_s=mtbf_s)
