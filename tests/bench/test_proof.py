"""`python -m bench proof` end to end on a tiny state, and its bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.proof import SETTINGS, judge

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
def test_benchmark_measures_and_removes_its_files(tmp_path: Path) -> None:
    """The cost of digests would be claimed, and not be known."""
    out = tmp_path / "out" / "result.json"
    command = [sys.executable, "-m", "bench", "proof", "--pairs", "2", "--megabytes", "2", "--json", str(out)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [*command, "--place", str(tmp_path)], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = json.loads(out.read_text())
    assert set(found["settings"]) == set(SETTINGS)
    for samples in found["settings"].values():
        assert {how: len(samples[how]["s"]) for how in ("with", "without")} == {"with": 2, "without": 2}
        assert samples["verdict"] == judge(samples)
    assert done.stdout.count("CPU s per GB") == len(SETTINGS)


def test_bars_fail_only_when_both_are_missed() -> None:
    """A run that misses both would be called met."""

    def samples(with_s: float, cpu_s: float) -> dict[str, dict[str, list[float]]]:
        return {"with": {"s": [with_s], "cpu_s_per_gb": [cpu_s]}, "without": {"s": [1.0], "cpu_s_per_gb": [1.0]}}

    assert judge(samples(1.1, 2.0))["met"]
    assert judge(samples(1.3, 1.1))["met"]
    assert not judge(samples(1.3, 1.2))["met"]
