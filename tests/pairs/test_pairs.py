"""A few interleavings of the most telling pairs of commands, and whether the generator finds a rule that is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import main
from ckptkit.upkeep import rolling_back
from tests.pairs import COMMANDS, Interleaving, Pairs, pairs_of
from tests.pairs.gate import moments
from tests.roots.media import Disk

POINTS = 4  # of each pair
TELLING = [
    ("rollback", "prune"),
    ("prune", "rollback"),
    ("pin", "prune"),
    ("copy-out", "prune"),
    ("prune", "verify"),
    ("verify", "prune"),
    ("du", "prune"),
    ("job", "prune"),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("orbax_may_fail"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    home = tmp_path_factory.mktemp("pairs")
    return Pairs(home, Disk(home / "places"), main)


def _spread(numbers: list[int], points: int) -> list[int]:
    return numbers[:: max(1, len(numbers) // points)][-points:]


def _failures(pairs: Pairs, first: str, second: str, numbers: Callable[[list[int]], list[int]]) -> list[str]:
    found = []
    for number in numbers(moments(pairs.trace(first, second), pairs.trace(second, first))):
        which = Interleaving(medium="disk", first=first, second=second, at=number)
        found += [f"{each.kind}: {each.text}\n  repeat: {which}" for each in pairs.run(which).failures]
    return found


@pytest.mark.parametrize(("first", "second"), TELLING)
def test_two_commands_at_once_harm_no_step(pairs: Pairs, first: str, second: str) -> None:
    """A step could be lost, or a sound one called damaged, where two commands work over one root at once."""
    failures = _failures(pairs, first, second, lambda numbers: _spread(numbers, POINTS))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("first", ["convert", "verify"])
def test_step_deleted_while_it_is_read_is_not_called_damaged(pairs: Pairs, first: str) -> None:
    """A prune during a conversion would look like damage, or like a step that cannot be read: exit code 11 or 13 for a
    sound run."""
    failures = _failures(pairs, first, "prune", lambda numbers: [*numbers[:8], *_spread(numbers, 16)])
    assert not failures, "\n".join(failures)


def test_broken_rule_is_found(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator could let everything pass: a rollback without a lease, and without a second look, is found."""

    @contextmanager
    def not_held(*_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(rolling_back, "_held", not_held)
    monkeypatch.setattr(rolling_back, "_require_there", lambda *_: None)
    failures = _failures(pairs, "rollback", "prune", lambda numbers: _spread(numbers, 8))
    assert any("rolled back to a step that is not there" in each for each in failures)


def test_every_pair_with_a_writer_is_taken_in_both_roles() -> None:
    """A command that is added could be left out of the campaign."""
    chosen = pairs_of()
    assert {first for first, _ in chosen} == {second for _, second in chosen} == set(COMMANDS)
    assert ("verify", "steps") not in chosen
    assert {(second, first) for first, second in chosen} == set(chosen)


def test_moments_after_unrelated_reads_are_left_out() -> None:
    """The campaign could take hours for interleavings that are the same, or leave out those that are not."""
    first = [("/1/a", False), ("/2/a", False), ("/_ckptkit/leases/x", True), ("/3/a", False)]
    assert moments(first, [("/2/b", True), ("/1/a", False)]) == [1, 3, 4]


def test_job_is_a_command(tmp_path: Path) -> None:
    """The job of the pairs could save nothing."""
    from tests.roots.catalog import KINDS

    with KINDS["ckptkit composite"].open(tmp_path / "run", "ckptkit") as manager:
        manager.save(1, args=KINDS["ckptkit composite"].arguments(1))
    call = COMMANDS["job"].call
    assert call is not None
    call(str(tmp_path / "run"))
    assert {path.name for path in (tmp_path / "run").iterdir() if path.name.isdecimal()} == {"60", "61"}
