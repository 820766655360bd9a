"""The protocol of saves under simulated faults: no violation in many seeds, and known faults are found."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from tests.cases import long_except
from tests.simulation import MUTATIONS, Plan, failures, mutated, run_plan, shrunk
from tests.simulation.scheduler import PENDING, Scheduler, Violation

# Where each mutation was found last. A seed leads elsewhere once the protocol or the simulator changes.
FOUND = {"C2": 6, "C3": 3, "C4": 1, "C5": 199, "H6": 2, "disk": 280, "limits": 7, "age": 54}
_SEEDS = 1000  # `make campaign NAME=protocol` runs more


@pytest.mark.parametrize(
    ("first", "seeds"),
    [(0, 40), *(pytest.param(first, 240, marks=pytest.mark.long) for first in (40, 280, 520, 760))],
)
def test_protocol_holds_in_a_thousand_seeds(first: int, seeds: int) -> None:
    """If it failed, a job could lose a committed save, never free a slot, or never save again after a fault."""
    found = next(failures(first, seeds), None)
    assert found is None, str(shrunk(found)) if found is not None else ""


@pytest.mark.parametrize("mutation", long_except(set(MUTATIONS) - {"C5"}, MUTATIONS))
def test_simulator_finds_a_fault_that_is_put_back(mutation: str) -> None:
    """If it failed, the simulator would pass whatever the protocol does."""
    with mutated(mutation):
        seeds = chain([FOUND[mutation]], range(_SEEDS))
        found = next((failure for seed in seeds if (failure := run_plan(Plan.of(seed))) is not None), None)
        assert found is not None
        smaller = shrunk(found)
    assert len(smaller.plan.faults) <= len(found.plan.faults)
    assert f"--first {found.plan.seed} --seeds 1" in str(smaller)


def test_same_seed_gives_the_same_run() -> None:
    """If it failed, a failing seed could not be repeated."""
    with mutated("C3"):
        first, second = run_plan(Plan.of(FOUND["C3"])), run_plan(Plan.of(FOUND["C3"]))
    assert first is not None
    assert second is not None
    assert (first.problem, first.log) == (second.problem, second.log)


def test_scheduler_reports_an_unhandled_error() -> None:
    """If it failed, a thread of ours that dies would look like one that has nothing to do."""
    scheduler = Scheduler(random.Random(0))
    scheduler.perform = lambda task, request: PENDING

    def steps() -> object:
        raise KeyError("lost")
        yield

    scheduler.start("worker", None, steps())  # pyright: ignore[reportArgumentType]
    with pytest.raises(Violation, match="worker ended with KeyError: 'lost'"):
        scheduler.run(10)
