"""How often each contender saves: ours by our own formula from what saves cost, stock Orbax's by trying.

Both look at calibration runs alone; none of their faults is one of those that are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.fault_places import OURS, Every
from ckptkit import EventLog, GoodputOptimal, IntervalBounds
from ckptkit.events import Event

SWEPT_SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the mean time between faults


def first_guess(contender: str, mtbf_s: float, step_s: float) -> Every:
    """The intervals of calibration runs, and of runs that have none."""
    if contender == OURS:
        return of_seconds(mtbf_s / 20, mtbf_s / 10, mtbf_s / 4, step_s)  # a minute shows several saves of each
    return Every(durable=_steps(mtbf_s / 4, step_s))


def of_seconds(ram_s: float, ssd_s: float, durable_s: float, step_s: float) -> Every:
    """Three tiers' intervals in steps. Slower tiers save with saves of the faster ones: one copy feeds them all."""
    ram = _steps(ram_s, step_s)
    ssd = ram * max(1, round(_steps(ssd_s, step_s) / ram))
    return Every(ram=ram, ssd=ssd, durable=ssd * max(1, round(_steps(durable_s, step_s) / ssd)))


def learned(contender: str, events: Sequence[Event], mtbf_s: float, step_s: float) -> Every:
    """The result of `GoodputOptimal` for the events of a run without faults."""
    tiers = ("ram", "ssd", "durable") if contender == OURS else ("durable",)
    log = EventLog()
    bounds = IntervalBounds(min_s=max(1e-3, step_s), max_s=2 * mtbf_s)
    best = GoodputOptimal(log, tiers=tiers, prior_mtbf_s=mtbf_s, bounds=bounds)
    for event in events:
        log.emit(event.kind, step=event.step, tier=event.tier, **event.fields)
    wanted_s = [best.interval_s(tier) for tier in tiers]
    if contender == OURS:
        return of_seconds(wanted_s[0], wanted_s[1], wanted_s[2], step_s)
    return Every(durable=_steps(wanted_s[0], step_s))


def sweep(mtbf_s: float, step_s: float, goodput_of: Callable[[Every], float]) -> tuple[Every, list[dict[str, Any]]]:
    """The best of a few fixed intervals, and what each came to."""
    tried = list(dict.fromkeys(Every(durable=_steps(share * mtbf_s, step_s)) for share in SWEPT_SHARES))
    rows = [{"every": str(every), "goodput": goodput_of(every)} for every in tried]
    best = max(range(len(tried)), key=lambda number: rows[number]["goodput"])
    return tried[best], rows


def _steps(seconds: float, step_s: float) -> int:
    return max(1, round(seconds / step_s))
