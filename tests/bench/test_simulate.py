"""`python -m bench simulate`, on a small job."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from bench.rows import rows_of
from bench.simulate import main


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """If it failed, the time that a large simulation takes would be a claim that nobody can repeat."""
    path = tmp_path / "out" / "simulate.json"
    words = ["--hosts", "100", "--days", "3", "--runs", "4", "--repeats", "1", "--json", str(path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    (sample,) = result["samples"]
    assert sample["policies"] == 6  # the oracle and five
    assert sample["cpu_s"] > 0
    rows = {row.figure: row for row in rows_of([result])}
    assert rows["simulate_s"].ours == sample["wall_s"]
    assert rows["simulate_cpu_s"].case == "100 hosts x 3 days x 4 runs, every policy"
