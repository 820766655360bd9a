"""Runs seeds, and prints how to repeat a failure: `python -m tests.simulation --seeds 1000`."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import click

from tests.simulation.job import SimJob
from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.plan import Plan
from tests.simulation.scheduler import Violation

_BATCH = 200  # seeds of one task of a pool; cycles are collected after each
_SHOWN = 40  # lines of the log of a failing run


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A finding of the oracle: the plan that failed, the violated promise, and the last lines of its log."""

    plan: Plan
    problem: str
    log: tuple[str, ...]

    def __str__(self) -> str:
        repeat = f"python -m tests.simulation --first {self.plan.seed} --seeds 1"
        faults = "\n".join(f"  {fault}" for fault in self.plan.faults) or "  none"
        log = "\n".join(f"  {line}" for line in self.log)
        head = f"seed {self.plan.seed}: {self.problem}\nrepeat it: {repeat}"
        return f"{head}\nfaults that are needed:\n{faults}\nlog:\n{log}"


def run_plan(plan: Plan) -> Failure | None:
    """One run of a plan; what the oracle found, or None. The same plan gives the same run."""
    job = SimJob(plan)
    try:
        job.run()
    except Violation as violation:
        return Failure(plan=plan, problem=str(violation), log=tuple(job.log[-_SHOWN:]))
    return None


def shrunk(failure: Failure) -> Failure:
    """The failure with as few faults as still make the plan fail."""
    smaller = True
    while smaller:
        smaller = False
        for fault in failure.plan.faults:
            plan = replace(failure.plan, faults=tuple(each for each in failure.plan.faults if each is not fault))
            found = run_plan(plan)
            if found is not None:
                failure, smaller = found, True
                break
    return failure


def failures(first: int, count: int) -> Iterator[Failure]:
    """The failures among `count` seeds from `first`."""
    was_enabled = gc.isenabled()
    gc.disable()  # a run leaves cycles; they go together
    try:
        for seed in range(first, first + count):
            found = run_plan(Plan.of(seed))
            if found is not None:
                yield found
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()


def _batch(first: int, count: int, mutation: str | None) -> list[Failure]:
    with mutated(mutation):
        return list(failures(first, count))


@click.command()
@click.option("--seeds", default=1000, show_default=True, help="How many seeds to run.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--jobs", default=2, show_default=True, help="How many processes run them.")
@click.option("--mutation", type=click.Choice(sorted(MUTATIONS)), help="Put a known fault back, to see it found.")
def main(seeds: int, first: int, jobs: int, mutation: str | None) -> None:
    """Runs the protocol of saves and restores in simulated jobs under faults, and checks what it promises.

    Exits with 1 where a promise is broken, and prints the command that repeats it.
    """
    began_s, found = time.monotonic(), list[Failure]()
    starts = range(first, first + seeds, _BATCH)
    counts = [min(_BATCH, first + seeds - start) for start in starts]
    if len(counts) == 1:
        found = _batch(first, seeds, mutation)
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            for batch in pool.map(_batch, starts, counts, [mutation] * len(counts)):
                found += batch
    seconds = time.monotonic() - began_s
    with mutated(mutation):
        for failure in found[:3]:
            click.echo(str(shrunk(failure)))
    rate = seeds / seconds
    click.echo(f"{seeds} seeds from {first}, {len(found)} violations, {seconds:.1f} s, {rate:.0f} seeds/s")
    raise SystemExit(1 if found else 0)
