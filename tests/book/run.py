"""Plays seeds, and prints how to repeat a disagreement: `python -m tests.book --seeds 1000`."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from tests.book.history import History, draw

_BATCH = 20  # seeds of one task of a pool
_SHRUNK = 5  # disagreements whose histories are made shorter
_TRIES = 2  # a history is played so often while it is made shorter: kills are not at the same moment each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A disagreement, and the history that gives it."""

    history: History
    processes: int
    problem: str

    def __str__(self) -> str:
        head = f"seed {self.history.seed}: {self.problem}"
        repeat = f"python -m tests.book --first {self.history.seed} --seeds 1 --processes {self.processes}"
        return "\n".join([head, f"repeat it: {repeat}", *(f"  {line}" for line in self.history.lines())])


def findings(first: int, count: int, processes: int) -> Iterator[Finding]:
    """The disagreements among `count` seeds from `first`."""
    from tests.book.jobs import Jobs
    from tests.book.play import play

    jobs = Jobs()
    try:
        for seed in range(first, first + count):
            history = draw(seed, processes=processes)
            try:
                problem = play(history, jobs)
            except Exception:  # noqa: BLE001  a fault of the book's own is shown with its seed too
                problem = f"the book failed: {traceback.format_exc()[-2000:]}"
            if problem is not None:
                yield Finding(history=history, processes=processes, problem=problem)
    finally:
        jobs.close()


def shrunk(finding: Finding) -> Finding:
    """The same with as few events as still give a disagreement."""
    from tests.book.jobs import Jobs
    from tests.book.play import play

    jobs, is_smaller = Jobs(), True
    try:
        while is_smaller:
            is_smaller = False
            for history in finding.history.smaller():
                problem = next((p for _ in range(_TRIES) if (p := play(history, jobs)) is not None), None)
                if problem is not None and _kind(problem) == _kind(finding.problem):
                    finding = Finding(history=history, processes=finding.processes, problem=problem)
                    is_smaller = True
                    break
    finally:
        jobs.close()
    return finding


def _kind(problem: str) -> str:
    """A problem without its numbers: a shorter history has to show the same one."""
    return re.sub(r"[\[{(].*?[\]})]|[0-9.]+|none", "", problem.splitlines()[0].partition(": ")[2])[:60]


def _prepare() -> None:
    """Imports what the forked processes need. The backend of JAX stays untouched here."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=1"
    import ckptkit.cli
    import ckptkit.manager  # noqa: F401
    import tests.book.process  # noqa: F401

    gc.collect()
    gc.freeze()  # or each forked process would copy every page at its first collection


def _batch(task: tuple[int, int, int, str | None]) -> list[Finding]:
    from tests.book.mutations import mutated

    first, count, processes, mutation = task
    with mutated(mutation):
        return list(findings(first, count, processes))


def _shrink(task: tuple[Finding, str | None]) -> Finding:
    from tests.book.mutations import mutated

    with mutated(task[1]):
        return shrunk(task[0])


@click.command()
@click.option("--seeds", default=100, show_default=True, help="How many seeds to play.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--jobs", default=2, show_default=True, help="How many histories are played at a time.")
@click.option("--processes", type=int, help="The most processes of a run.  [default: 1, and 4 for every tenth batch]")
@click.option("--mutation", help="Put a fault into the library (mutations.py), to see it found.")
@click.option("--shrink", default=_SHRUNK, show_default=True, help="How many disagreements are made shorter.")
@click.option("--stop", is_flag=True, help="Play no further seeds once there is a disagreement.")
def main(
    seeds: int, first: int, jobs: int, processes: int | None, mutation: str | None, shrink: int, stop: bool
) -> None:
    """Plays histories of jobs, and compares each restart with the book.

    Exits with 1 where they disagree, and prints the command that repeats it.
    """
    began_s, found, done = time.monotonic(), list[Finding](), 0
    starts = range(first, first + seeds, _BATCH)
    tasks = [_task(start, min(_BATCH, first + seeds - start), processes, mutation) for start in starts]
    with _pool(jobs if len(tasks) > 1 else 1) as run:
        for task, batch in zip(tasks, run(_batch, tasks), strict=False):
            for each in batch:
                click.echo(f"seed {each.history.seed}: {each.problem.splitlines()[0]}")
            found += batch
            done += task[1]
            if done % 1000 == 0:
                click.echo(f"{done} seeds, {len(found)} disagreements", err=True)
            if stop and found:
                break
        seconds = time.monotonic() - began_s
        for each in run(_shrink, [(each, mutation) for each in found[:shrink]]):
            click.echo(str(each))
    click.echo(f"{done} seeds from {first}, {len(found)} disagreements, {seconds:.1f} s, {done / seconds:.1f} seeds/s")
    raise SystemExit(1 if found else 0)


def _task(start: int, count: int, processes: int | None, mutation: str | None) -> Any:
    chosen = processes or (4 if start // _BATCH % 10 == 9 else 1)
    return start, count, chosen, mutation


@contextmanager
def _pool(jobs: int) -> Iterator[Callable[[Any, list[Any]], Iterable[Any]]]:
    """`map`, in so many processes; with one, in this process, of which nothing but the imports may have used JAX."""
    if jobs == 1:
        _prepare()
        yield map
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
