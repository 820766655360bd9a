"""Compares what two runs left behind (`trainer --proof DIR`): every leaf's digests, every step's records and loss."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as one process began it: which record stood in which row of the global batch."""

    process: str
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The records of all processes of a run; `steps` has each step as often as it was begun, in order of a process.

    A step that a process was killed in has its records, not its loss; another process may have ended and saved it.
    """

    directory: Path
    boxes: dict[tuple[str, str], set[str]]  # leaf and box to digests: one, unless replicas differ
    steps: dict[int, list[Step]]
    losses: dict[int, set[str]]  # of each step, one for each value that a process noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All differences between two runs, sorted (none: they are identical), and how much was compared."""

    differences: tuple[str, ...]
    leaves: int
    boxes: int
    steps: int
    repeated_steps: int

    @property
    def is_identical(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def compare(reference: Path, resumed: Path) -> Verdict:
    """The verdict on two proof directories. A step that was taken several times must be the same each time.

    Raises `ValueError` if one of them is incomplete, since a comparison without differences would then mean nothing.
    """
    expected, found = load_proof(reference), load_proof(resumed)
    differences = [*_compare_boxes(expected, found), *_compare_steps(expected, found)]
    return Verdict(
        differences=tuple(text for _, text in sorted(differences)),
        leaves=len({leaf for leaf, _ in expected.boxes}),
        boxes=len(expected.boxes),
        steps=len(expected.steps),
        repeated_steps=sum(_times_taken(steps) > 1 for steps in found.steps.values()),
    )


def load_proof(directory: Path) -> Proof:
    """The proof in `directory`: `state-<process>.json`, `records-<process>.jsonl` and `losses-<process>.jsonl` of the
    same processes."""
    states = {path.stem.removeprefix("state-"): path for path in directory.glob("state-*.json")}
    records = {path.stem.removeprefix("records-"): path for path in directory.glob("records-*.jsonl")}
    noted = {path.stem.removeprefix("losses-"): path for path in directory.glob("losses-*.jsonl")}
    if not states or not set(states) == set(records) == set(noted):
        raise ValueError(
            f"{directory} is not a complete proof: final states of processes {sorted(states)}, records of "
            f"{sorted(records)}, losses of {sorted(noted)}; was a run with --proof cut off?"
        )
    boxes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in states.values():
        for leaf, digests in json.loads(path.read_text()).items():
            for box, digest in digests.items():
                boxes[leaf, box].add(digest)
    steps: dict[int, list[Step]] = defaultdict(list)
    for process, path in sorted(records.items()):
        for step, rows in _read_lines(path, "rows", _pairs):
            steps[step].append(Step(process=process, rows=rows))
    losses: dict[int, set[str]] = defaultdict(set)
    for path in noted.values():
        for step, loss in _read_lines(path, "loss", lambda loss: f"{float.fromhex(loss)!r} ({loss})"):
            losses[step].add(loss)
    if not boxes or not steps:
        raise ValueError(f"{directory} is not a complete proof: {len(boxes)} boxes and {len(steps)} steps")
    return Proof(directory=directory, boxes=boxes, steps=steps, losses=losses)


def _pairs(rows: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(row), int(record)) for row, record in rows)


def _read_lines(path: Path, key: str, read: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            noted: dict[str, Any] = json.loads(line)
            step, value = noted["step"], read(noted[key])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a step: {line[:100]!r}") from error
        yield step, value


def _times_taken(steps: Iterable[Step]) -> int:
    processes = [step.process for step in steps]
    return max(map(processes.count, processes))


def _compare_boxes(expected: Proof, found: Proof) -> Iterator[tuple[tuple[Any, ...], str]]:
    for leaf, box in expected.boxes.keys() | found.boxes.keys():
        want, have = expected.boxes.get((leaf, box), set()), found.boxes.get((leaf, box), set())
        if want != have or len(want) > 1:
            said = f"state: leaf {leaf} box [{box}] is {_words(want)} in the reference, {_words(have)} in the run"
            yield (0, leaf, box), said


def _compare_steps(expected: Proof, found: Proof) -> Iterator[tuple[tuple[Any, ...], str]]:
    for number in expected.steps.keys() | found.steps.keys():
        want, have = expected.steps.get(number, []), found.steps.get(number, [])
        if not want or not have:
            where = "run" if want else "reference"
            yield (1, number), f"step {number}: missing in the {where}"
            continue
        for what, wanted, had in (
            ("record ids", _records(want), _records(have)),
            ("loss", expected.losses.get(number, set()), found.losses.get(number, set())),
        ):
            for key in sorted(wanted ^ had):
                where = "reference" if key in wanted else "run"
                yield (1, number, what, key), f"step {number}: {what} {key} only in the {where}"
        for process in _changing(want) | _changing(have):
            said = f"step {number}: process {process} read other rows when it took the step again"
            yield (1, number, "rows", process), said


def _changing(steps: Iterable[Step]) -> set[str]:
    """The processes whose rows differ between their takes of a step: a union over takes hides a dropped row."""
    takes: dict[str, set[frozenset[tuple[int, int]]]] = defaultdict(set)
    for step in steps:
        takes[step.process].add(frozenset(step.rows))
    return {process for process, rows in takes.items() if len(rows) > 1}


def _records(steps: Iterable[Step]) -> set[str]:
    return {f"{record} in row {row}" for step in steps for row, record in step.rows}


def _words(digests: set[str]) -> str:
    return " and ".join(sorted(digests)) or "missing"
