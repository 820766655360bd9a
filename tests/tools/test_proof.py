"""The judge of a resume: any changed bit, record or loss is a difference, and half a proof proves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.proof import compare


def write_proof(directory: Path, *, steps: list[int]) -> None:
    """Two processes with one leaf split between them and one on both; `steps` in the order they were taken."""
    directory.mkdir()
    for process in (0, 1):
        box = f"{process}:{process + 1}"
        state = {"model/w": {box: f"w{process}"}, "rng/count": {"": "c"}}
        (directory / f"state-{process}.json").write_text(json.dumps(state))
        rows = [{"step": step, "rows": [[process, 100 * step + process]]} for step in steps]
        losses = [{"step": step, "loss": (1.0 / (step + 1)).hex()} for step in steps]
        for kind, lines in (("records", rows), ("losses", losses)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (directory / f"{kind}-{process}.jsonl").write_text(text)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    write_proof(tmp_path / "reference", steps=[0, 1, 2, 3])
    write_proof(tmp_path / "resumed", steps=[0, 1, 2, 1, 2, 3])
    return tmp_path / "reference", tmp_path / "resumed"


def edit_state(directory: Path, process: int, edit: Callable[[Any], None]) -> None:
    path = directory / f"state-{process}.json"
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))


def edit_line(directory: Path, process: int, index: int, kind: str = "records", **changed: Any) -> None:
    path = directory / f"{kind}-{process}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[index] |= changed
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_exact_resume_is_identical_and_counted(pair: tuple[Path, Path]) -> None:
    """Breaks when a repeated step is taken for a difference."""
    verdict = compare(*pair)
    assert verdict.differences == ()
    assert verdict.is_identical
    assert (verdict.leaves, verdict.boxes, verdict.steps, verdict.repeated_steps) == (2, 3, 4, 2)


def test_different_digest_is_named(pair: tuple[Path, Path]) -> None:
    """Breaks when a leaf that came back with other bits goes unseen, or only the first is told."""
    edit_state(pair[1], 1, lambda state: state["model/w"].update({"1:2": "bad"}))
    edit_state(pair[1], 0, lambda state: state.pop("rng/count"))
    edit_state(pair[1], 1, lambda state: state.pop("rng/count"))
    assert compare(*pair).differences == (
        "state: leaf model/w box [1:2] is w1 in the reference, bad in the run",
        "state: leaf rng/count box [] is c in the reference, missing in the run",
    )


def test_differing_replicas_fail_even_if_both_runs_agree(pair: tuple[Path, Path]) -> None:
    """Breaks when processes that hold the same box with other bits look the same because both runs have it."""
    for directory in pair:
        edit_state(directory, 1, lambda state: state["rng/count"].update({"": "d"}))
    (difference,) = compare(*pair).differences
    assert difference == "state: leaf rng/count box [] is c and d in the reference, c and d in the run"


@pytest.mark.parametrize("index", [1, 3])
def test_different_records_in_any_repetition_are_named(pair: tuple[Path, Path], index: int) -> None:
    """Breaks when the lost half or the repeated half of a step may have read other data."""
    edit_line(pair[1], 1, index, rows=[[1, 555]])
    assert compare(*pair).differences == (
        "step 1: record ids 555 in row 1 only in the run",
        "step 1: process 1 read other rows when it took the step again",
    )


@pytest.mark.parametrize("index", [2, 4])
def test_different_loss_bits_in_any_repetition_are_named(pair: tuple[Path, Path], index: int) -> None:
    """Breaks when losses are compared as printed: dropout with a wrong RNG state differs in the last bits."""
    edit_line(pair[1], 0, index, "losses", loss="0x1.5555555555556p-2")
    (difference,) = compare(*pair).differences
    assert difference == "step 2: loss 0.33333333333333337 (0x1.5555555555556p-2) only in the run"


def cut_last(directory: Path, process: int, kind: str) -> None:
    path = directory / f"{kind}-{process}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_process_killed_in_a_step_that_another_saved_is_no_difference(pair: tuple[Path, Path]) -> None:
    """The demo failed once in many runs: a process was killed between a step and its line, and the step was never
    repeated, since the other process had saved it whole."""
    cut_last(pair[1], 1, "losses")
    assert compare(*pair).is_identical
    cut_last(pair[1], 0, "losses")
    assert [str(each) for each in compare(*pair).differences] == [
        "step 3: loss 0.25 (0x1.0000000000000p-2) only in the reference"
    ]


def test_missing_and_surplus_steps_are_named(pair: tuple[Path, Path]) -> None:
    """Breaks when a run that skipped a step, or ran on, passes."""
    for process in (0, 1):
        edit_line(pair[1], process, 5, step=4)
        edit_line(pair[1], process, 5, "losses", step=4)
    assert compare(*pair).differences == ("step 3: missing in the run", "step 4: missing in the reference")


def test_a_row_that_no_process_read_is_named(pair: tuple[Path, Path]) -> None:
    """Breaks when a resumed process drops a row of the global batch."""
    edit_line(pair[1], 1, 5, rows=[])
    assert compare(*pair).differences == ("step 3: record ids 301 in row 1 only in the reference",)


def test_row_missing_in_one_repetition_is_named(pair: tuple[Path, Path]) -> None:
    """Breaks when the other take of a repeated step hides a row that was dropped."""
    edit_line(pair[1], 1, 3, rows=[])
    assert compare(*pair).differences == ("step 1: process 1 read other rows when it took the step again",)


def test_incomplete_proof_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Breaks when a run that never reached its end proves a resume."""
    (pair[1] / "state-1.json").unlink()
    with pytest.raises(ValueError, match=r"final states of processes \['0'\], records of \['0', '1'\], losses"):
        compare(*pair)
    with pytest.raises(ValueError, match="is not a complete proof"):
        compare(pair[0], tmp_path / "nothing")


def test_line_that_is_not_a_step_is_refused_by_name(pair: tuple[Path, Path]) -> None:
    """Breaks when a damaged record is skipped without a message."""
    with (pair[1] / "records-0.jsonl").open("a") as lines:
        lines.write('{"step": 4, "ro')
    with pytest.raises(ValueError, match=r"records-0\.jsonl:7: not a step"):
        compare(*pair)
