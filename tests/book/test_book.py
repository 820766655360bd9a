"""Restarts after drawn histories give what the book allows, and faults that are put into the library are found.

The processes that fork a history's processes are forked themselves from a template that has not used JAX.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.book.book import DURABLE, MAYBE, RAM, YES, Book, Run
from tests.book.history import draw
from tests.cases import long_except
from tests.forked import run_forked

CONFIG = {"tiers": (RAM,), "keep": {RAM: 1, DURABLE: None}, "sharded": True}
# Where each mutation was found last: the seed, and the most processes. A seed leads elsewhere once histories change.
FOUND = {
    "roots": (2, 1),
    "runs": (125, 1),
    "joined": (11, 3),
    "order": (14, 1),
    "latest": (18, 1),
    "names": (36, 3),
    "ranks": (136, 3),
    "abandoned": (18, 1),
    "known": (111, 1),
    "unrecorded": (131, 1),
    "told": (2, 1),
    "kept": (70, 1),
}
_SEEDS = 200  # `make campaign NAME=book` plays more


def play(*words: object) -> subprocess.CompletedProcess[str]:
    """`python -m tests.book WORDS`, in one process that forks those of the jobs."""
    command = [sys.executable, "-m", "tests.book", "--jobs", "1", *map(str, words)]
    return run_forked(command, timeout=400)


@pytest.mark.parametrize(
    ("first", "seeds", "processes"),
    [(100, 40, 1), (100, 12, 4), *(pytest.param(first, 100, 1, marks=pytest.mark.long) for first in (140, 240))],
)
def test_restarts_give_what_the_book_allows(first: int, seeds: int, processes: int) -> None:
    """If it failed, a restart could mix two runs, take a dead one, or an older state than it could have."""
    done = play("--first", first, "--seeds", seeds, "--processes", processes)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mutation", long_except({"roots", "order", "known", "joined"}, FOUND))
def test_book_finds_a_fault_of_each_rule(mutation: str) -> None:
    """If it failed, the book would allow whatever the library answers."""
    seed, processes = FOUND[mutation]
    words = ("--mutation", mutation, "--processes", processes, "--shrink", 0, "--stop")
    done = play("--first", seed, "--seeds", 1, *words)
    if done.returncode == 0:
        done = play("--first", 0, "--seeds", _SEEDS, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "seed " in done.stdout


def test_same_seed_draws_the_same_history() -> None:
    """If it failed, a disagreement could not be repeated."""
    assert draw(7, processes=4) == draw(7, processes=4)
    assert draw(7, processes=4) != draw(8, processes=4)


def saved(book: Book, hosts: tuple[str, ...], value: int, step: int, *tiers: str) -> Run:
    """A run that has made one save, and closed."""
    run = book.open("root", hosts, CONFIG)
    book.begin_save(run, value, step)
    book.end_save(run, value, taken=True)
    book.settled(run, {step: tiers})
    return run


def values(book: Book, hosts: tuple[str, ...]) -> list[int | None]:
    """The values that a restart on these hosts may give."""
    return [save and save.value for save in book.answers(book.open("root", hosts, CONFIG))]


def test_book_has_no_answer_of_two_hosts_that_saved_apart() -> None:
    """If it failed, the book would allow a step that is joined from two runs."""
    book = Book()
    saved(book, ("a", "b"), 1, 3, RAM)
    del book.roots["root"]
    saved(book, ("c", "d"), 2, 3, RAM)
    assert values(book, ("a", "d")) == [None]
    assert values(book, ("c", "d")) == [2]


def test_book_takes_the_save_made_last_whatever_its_step() -> None:
    """If it failed, the book would call a higher step newer."""
    book = Book()
    saved(book, ("a",), 1, 30, RAM, DURABLE)
    run = book.open("root", ("a",), CONFIG)
    book.restored(run, 1)
    book.begin_save(run, 2, 15)
    assert values(book, ("a",)) == [2, 1], "it may be lost while it is under way"
    book.end_save(run, 2, taken=True)
    book.settled(run, {15: (RAM,)})
    assert values(book, ("a",)) == [2]
    assert values(book, ("b",)) == [1]
    assert book.saves[1].fast[RAM] == [MAYBE], "the ramdisk keeps one"
    assert run.root.durable[1] == YES
