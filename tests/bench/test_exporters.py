"""`python -m bench exporters`: the loop with every exporter runs and is measured, and its files are removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.exporters import ratio_of

ROOT = Path(__file__).parents[2]


def test_ratio_is_that_of_the_rounds() -> None:
    """A slow stretch of the machine, which is in both loops of a round, would count as the exporters' cost."""
    assert ratio_of({"with": [6.0, 12.0, 7.0], "without": [6.0, 12.0, 7.0]}) == 1.0
    assert ratio_of({"with": [6.6, 6.0, 6.3], "without": [6.0, 6.0, 6.0]}) == pytest.approx(1.05)


@pytest.mark.long
def test_benchmark_measures_and_removes_its_files(tmp_path: Path) -> None:
    """The cost of live metrics would be claimed, and not be known."""
    pytest.importorskip("prometheus_client", reason="pip install '.[telemetry-test]'")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install '.[telemetry-test]'")
    out = tmp_path / "out" / "result.json"
    command = [sys.executable, "-m", "bench", "exporters", "--rounds", "1", "--steps", "20", "--json", str(out)]
    done = subprocess.run([*command, "--place", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = json.loads(out.read_text())
    assert found["ratio"] == ratio_of(found["step_ms"])
    assert min(found["step_ms"]["with"] + found["step_ms"]["without"]) > 5.0
    assert min(found["cpu_ms"]["with"] + found["cpu_ms"]["without"]) > 0.0
