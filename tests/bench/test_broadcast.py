"""`python -m bench broadcast` end to end on a tiny state, and its bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.broadcast import judge
from bench.replica_states import DTYPES

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
def test_benchmark_measures_and_removes_its_files(tmp_path: Path) -> None:
    """A broadcast could read the bucket twice, or change a dtype, and nobody would see it."""
    out = tmp_path / "out" / "result.json"
    command = [sys.executable, "-m", "bench", "broadcast", "--replicas", "2", "--megabytes", "8", "--rate", "1000"]
    command += ["--repeats", "1", "--json", str(out), "--place", str(tmp_path)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = json.loads(out.read_text())["replicas"]["2"]
    bars, matrix = found["bars"], found["matrix"]
    assert bars["exact_met"]
    assert len(matrix["broadcast"]) == 3 * len(DTYPES) + 2
    assert bars["broadcast_bytes"] < 1.01, "some metadata in addition to so small a state"
    assert bars["orbax_bytes"] > 1.9
    changed = {leaf[2:-2] for leaf, what in matrix["orbax_broadcast"].items() if what != "exact"}
    assert {"bool_split", "int8_split", "int16_whole", "uint8_scalar", "float32_split", "key_split"} <= changed
    assert set(matrix["orbax"].values()) == {"exact"}
    assert {name: len(samples) for name, samples in found["samples"]["1000"].items()} == dict.fromkeys(
        ("read", "broadcast", "auto", "orbax", "orbax_broadcast"), 1
    )


def test_bars_fail_on_extra_reads_and_on_the_slower_choice() -> None:
    """A choice of the slower side, or a byte that was read twice, would be called met."""

    def result(chosen: bool, bytes_read: int = 100) -> dict[str, Any]:
        def sample(seconds: float, broadcast: bool) -> list[dict[str, Any]]:
            return [{"s": seconds, "bytes_read": bytes_read, "broadcast": broadcast}]

        by_name = {"read": sample(2.0, False), "broadcast": sample(1.0, True), "auto": sample(1.5, chosen)}
        by_name |= {"orbax": sample(3.0, False), "orbax_broadcast": sample(3.0, True)}
        return {"state_bytes": 100, "samples": {"25": by_name}, "matrix": {"broadcast": {"w": "exact"}}}

    good, bad = judge(result(chosen=True), 2), judge(result(chosen=False, bytes_read=101), 2)
    assert (good["bytes_met"], good["exact_met"], good["choice_at_25"]["met"]) == (True, True, True)
    assert (bad["bytes_met"], bad["choice_at_25"]["met"]) == (False, False)
    assert bad["choice_at_25"]["ratio"] == 2.0
    assert good["choice_at_25"]["auto_ratio"] == 1.5
