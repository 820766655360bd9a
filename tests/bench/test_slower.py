"""Figures that became worse: against stored results of the same kind of machine, and against older code in turns."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import slower as module
from bench.row import Range, Row
from bench.rows import newest_results
from bench.slower import compared, in_turns, main, slower

ROOT = Path(__file__).parents[2]


def result(at: str, samples: list[float], *, cpu: str = "EPYC", figure: str = "commit_gbps") -> dict[str, Any]:
    where = {"at": at, "cpu": cpu, "cores": 2, "commit": "abc1234", "load": [0.1]}
    state = {"samples": {figure: {"ckptkit": samples}}, "details": {}}
    return {"benchmark": "commit", "environment": where, "states": {"125m@1": state}}


def row(figure: str, ours: float, ends: Range | None = None) -> Row:
    return Row(benchmark="first", case="4 GB", figure=figure, meaning="", ours=ours, ends=ends)


def test_figures_that_are_worse_by_more_than_both_ranges_are_named() -> None:
    """A change that costs a third would land, and be found weeks later by a user."""
    stored = [result("2026-11-20", [9.0, 9.1]), result("2026-11-21", [6.0, 6.4, 6.2])]
    (line,) = compared(result("2026-11-22", [4.1, 4.3, 4.2]), stored)
    assert line == (
        "worse: commit 125m@1 commit_gbps: 4.2 (4.1 to 4.3), before 6.2 (6 to 6.4; 2026-11-21 at abc1234, load 0.1)"
    )
    assert compared(result("2026-11-22", [5.9, 6.3]), stored) == [
        "commit: nothing is worse than 2026-11-21 at abc1234, load 0.1"
    ]
    less_is_better = [result("2026-11-21", [0.20, 0.21], figure="cpu_s_per_gb")]
    assert "worse: " in compared(result("2026-11-22", [0.30, 0.31], figure="cpu_s_per_gb"), less_is_better)[0]
    assert "nothing" in compared(result("2026-11-22", [0.10, 0.11], figure="cpu_s_per_gb"), less_is_better)[0]


def test_other_machines_and_later_results_are_no_measure() -> None:
    """A laptop would be slower than a server each day."""
    stored = [result("2026-11-20", [9.0, 9.1], cpu="Xeon"), result("2026-11-23", [9.0, 9.1])]
    assert compared(result("2026-11-22", [4.0, 4.1]), stored) == [
        "commit: no earlier result of this kind of machine is stored"
    ]


def test_differences_within_the_noise_are_not_named() -> None:
    """Each run would name something, and nobody would read it."""
    before = [row("commit_gbps", 6.0, (5.0, 7.0)), row("first_save_ms", 10.0)]
    assert slower(before, [row("commit_gbps", 4.9, (4.7, 4.9))]) == []
    assert slower(before, [row("first_save_ms", 10.4)]) == []
    assert len(slower(before, [row("first_save_ms", 10.6)])) == 1
    assert slower(before, [row("stall_ms_per_save", 99.0)]) == [], "measured now for the first time"


def test_stored_results_are_compared() -> None:
    """The command would fail at the oldest of them, which store less."""
    done = CliRunner().invoke(main)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    kinds = {
        (each["benchmark"], each["environment"].get("cpu"))
        for each in newest_results()
        if each["environment"].get("cores")
    }
    assert len(lines) >= len(kinds)


@pytest.mark.long
def test_older_code_and_this_code_measure_in_turns() -> None:
    """Both would be the code of this directory, and nothing would ever be slower."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    places: list[Path] = []

    def noted(place: Path, benchmark: str, words: list[str]) -> list[Any]:
        places.append(place)
        return measured(place, benchmark, words)

    with pytest.MonkeyPatch.context() as at:
        measured = module._measured_in
        at.setattr(module, "_measured_in", noted)
        in_turns(head.stdout.strip(), ["commit"], 2, ["--repeats", "1", "--scale", "0.002"])
    assert [place == ROOT for place in places] == [False, True, True, False]
    assert not any(place.exists() for place in places if place != ROOT)
