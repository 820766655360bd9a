"""Compares what two runs left behind (`trainer --proof DIR`): every leaf's digests, every step's records and loss."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step as one process took it: which record stood in which row of the global batch, and the loss."""

    process: str
    rows: tuple[tuple[int, int], ...]
    loss: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The records of all processes of a run; `steps` has each step as often as it was taken, in order of a process."""

    directory: Path
    boxes: dict[tuple[str, str], set[str]]  # leaf and box to digests: one, unless replicas differ
    steps: dict[int, list[Step]]


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

    Raises `ValueError` if one of them is incomplete, since finding no difference would then prove nothing.
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
    """The proof in `directory`: `state-<process>.json` and `records-<process>.jsonl` of the same processes."""
    states = {path.stem.removeprefix("state-"): path for path in directory.glob("state-*.json")}
    records = {path.stem.removeprefix("records-"): path for path in directory.glob("records-*.jsonl")}
    if not states or set(states) != set(records):
        raise ValueError(
            f"{directory} is not a complete proof: final states of processes {sorted(states)}, records of "
            f"{sorted(records)}; was a run with --proof cut off?"
        )
    boxes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in states.values():
        for leaf, digests in json.loads(path.read_text()).items():
            for box, digest in digests.items():
                boxes[leaf, box].add(digest)
    steps: dict[int, list[Step]] = defaultdict(list)
    for process, path in sorted(records.items()):
        for number, step in _read_steps(process, path):
            steps[number].append(step)
    if not boxes or not steps:
        raise ValueError(f"{directory} is not a complete proof: {len(boxes)} boxes and {len(steps)} steps")
    return Proof(directory=directory, boxes=boxes, steps=steps)


def _read_steps(process: str, path: Path) -> Iterator[tuple[int, Step]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            noted: dict[str, Any] = json.loads(line)
            rows = tuple((int(row), int(record)) for row, record in noted["rows"])
            yield noted["step"], Step(process=process, rows=rows, loss=noted["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a step: {line[:100]!r}") from error


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
        for what, of_step in (("record ids", _records), ("loss", _losses)):
            wanted, had = set().union(*map(of_step, want)), set().union(*map(of_step, have))
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


def _records(step: Step) -> set[str]:
    return {f"{record} in row {row}" for row, record in step.rows}


def _losses(step: Step) -> set[str]:
    return {f"{float.fromhex(step.loss)!r} ({step.loss})"}


def _words(digests: set[str]) -> str:
    return " and ".join(sorted(digests)) or "missing"
