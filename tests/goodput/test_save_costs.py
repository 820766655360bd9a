"""The cost of a save, from events: noise of steps is not a cost, and overlapping saves are not counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from ckptkit.events import Event, Kind
from ckptkit.goodput.policy import SaveCosts


class Loop:
    """A step loop whose events a `SaveCosts` receives."""

    def __init__(self, *tiers: str):
        self.costs = SaveCosts(tiers)

    def _hear(self, kind: Kind, *, step: int | None = None, tier: str | None = None, **fields: object) -> bool:
        return self.costs.hear(Event(kind=kind, at_s=0.0, process=0, step=step, tier=tier, fields=fields))

    def steps(self, *durations_s: float) -> None:
        for duration_s in durations_s:
            self._hear(Kind.SPAN, span="step", duration_s=duration_s)

    def stage(self, step: int, *tiers: str, stall_s: float = 0.0) -> None:
        self._hear(Kind.STAGED, step=step, tiers=list(tiers), stall_s=stall_s)

    def end(self, step: int, tier: str, kind: Kind = Kind.COMMITTED) -> bool:
        return self._hear(kind, step=step, tier=tier, duration_s=1.0)


def test_step_noise_is_not_a_cost() -> None:
    """A sum of only the longer steps takes noise for a cost, and more of it with longer commits."""
    random, loop = np.random.default_rng(7), Loop("durable")
    for save in range(40):
        loop.steps(*random.normal(1.0, 0.2, 6).clip(0.5))
        loop.stage(save, "durable", stall_s=0.01)
        loop.steps(*random.normal(1.0, 0.2, 4).clip(0.5))
        loop.end(save, "durable")
    (cost_s,) = loop.costs.costs_s()
    assert cost_s < 0.2, "20 saves of 5 steps: a standard error of 0.1 s; the positive parts alone come to 0.4 s"


def test_cost_of_each_tier_is_what_it_adds() -> None:
    """A save of all tiers is staged once; what the durable tier takes longer is its own."""
    loop = Loop("ram", "durable")
    loop.steps(*[1.0] * 10)
    for save in range(5):
        loop.stage(save, "ram", "durable", stall_s=0.25)
        loop.end(save, "ram")
        loop.steps(1.5, 1.5)
        loop.end(save, "durable")
        loop.steps(1.25, *[1.0] * 5)
    assert loop.costs.costs_s() == pytest.approx([0.25 + 0.5, 0.5 + 0.25])


def test_overlapping_save_does_not_include_the_other_cost() -> None:
    """A ramdisk save while the bucket is written would look as costly as the bucket, and be made as seldom."""
    loop = Loop("ram", "durable")
    loop.steps(*[1.0] * 10)
    for save in range(0, 10, 2):
        loop.stage(save, "ram", stall_s=0.1)
        loop.end(save, "ram")
        loop.steps(1.0, 1.0)
        loop.stage(save + 1, "durable", stall_s=0.1)
        loop.steps(2.0)
        loop.stage(save + 100, "ram", stall_s=0.1)
        loop.end(save + 100, "ram")
        loop.steps(2.0)
        loop.end(save + 1, "durable")
        loop.steps(1.0, 1.0)
    assert loop.costs.costs_s() == pytest.approx([0.1, 2.0])


def test_compilation_step_is_excluded_from_the_mean() -> None:
    """The first step compiles: with it in the mean all saves would seem to speed the loop up."""
    loop = Loop("durable")
    loop.steps(30.0, *[1.0] * 9)
    loop.stage(1, "durable")
    loop.steps(1.5, 1.5)
    loop.end(1, "durable")
    loop.steps(1.5)
    assert loop.costs.costs_s() == pytest.approx([1.5])


def test_without_step_spans_the_stall_is_the_cost() -> None:
    """A loop that records no steps would never learn anything."""
    loop = Loop("durable")
    loop.stage(1, "durable", stall_s=0.3)
    assert loop.end(1, "durable")
    assert loop.costs.costs_s() == pytest.approx([0.3])


@pytest.mark.parametrize("kind", [Kind.SKIPPED, Kind.FAILED, Kind.DEGRADED])
def test_steps_after_a_failed_save_are_quiet(kind: Kind) -> None:
    """A failed save that stays in flight would leave no step to compare with."""
    loop = Loop("ram", "durable")
    loop.stage(1, "ram", "durable")
    loop.end(1, "ram")
    assert not loop.end(1, "durable", kind)
    loop.steps(5.0, *[1.0] * 10)
    loop.stage(2, "ram")
    loop.steps(1.5)
    loop.end(2, "ram")
    loop.steps(1.0)
    assert loop.costs.costs_s()[0] == pytest.approx(0.25, abs=0.01), "half a second in one of two saves"


@pytest.mark.parametrize("kind", [Kind.SKIPPED, Kind.FAILED])
@pytest.mark.parametrize("staged", ["ram", "memory"])
def test_vetoed_save_counts_as_finished(kind: Kind, staged: str) -> None:
    """One veto of another process, and no step would be quiet again: steps that become longer would be a save's."""
    loop = Loop("durable")
    loop.steps(*[1.0] * 10)
    loop.stage(1, "ssd", "durable")
    loop.end(1, staged, kind)
    loop.steps(*[2.0] * 300)
    loop.stage(2, "durable")
    loop.steps(2.0)
    loop.end(2, "durable")
    loop.steps(2.0)
    assert loop.costs.costs_s() == pytest.approx([0.0])


def test_saves_without_an_end_event_are_dropped() -> None:
    """A log that lacks an end must not grow the state without a limit, nor keep steps from being quiet."""
    loop = Loop("ram")
    for save in range(1000):
        loop.stage(save, "ram", "elsewhere")
    assert len(loop.costs._on_its_way) <= 8


def test_cost_is_learned_from_overlapping_saves() -> None:
    """With no save by itself nothing would be learned but stalls."""
    loop = Loop("durable")
    loop.steps(*[1.0] * 10)
    loop.stage(0, "durable")
    for save in range(1, 30):
        loop.stage(save, "durable")
        loop.steps(2.0)
        loop.end(save - 1, "durable")
    assert loop.costs.costs_s()[0] > 0.5
