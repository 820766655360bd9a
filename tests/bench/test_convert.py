"""`python -m bench convert` end to end on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
def test_benchmark_measures_and_removes_its_files(tmp_path: Path) -> None:
    """Rates and memory would be claimed, and not be known."""
    out = tmp_path / "result.json"
    words = ["--size", "20MB", "--repeats", "1", "--obvious-repeats", "1", "--job", "reshard"]
    words += ["--disk", str(tmp_path), "--json", str(out)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "convert", *words],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    jobs = json.loads(out.read_text())["jobs"]
    ours = {"reshard to x=8", "reshard (8,) to (2,4)", "reshard rows to rows and columns"}
    assert set(jobs) == {*ours, "obvious: reshard (8,) to (2,4)"}
    for (sample,) in jobs.values():
        assert sample["bytes"] > 20 << 20
        assert min(sample.values()) > 0
