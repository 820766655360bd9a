"""The crash-point campaign end to end, a few points of each kind: its table, its JSON, and the bar itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.crash_oracle import promised
from bench.crashpoints import IN_WORKER, Tally, held
from tests.strace import needs_strace

ROOT = Path(__file__).parent.parent.parent
TIERS = ("ram", "ssd", "durable", "mount", "bucket")


@pytest.mark.long
@needs_strace
def test_short_crashpoint_campaign_passes(tmp_path: Path) -> None:
    """A crash after some storage operation could lose a committed step."""
    out = tmp_path / "out" / "result.json"
    command = [sys.executable, "-m", "bench", "crashpoints", "--json", str(out)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environ |= {"TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu", IN_WORKER: "1"}  # which `bench` would begin for it
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=175)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "a campaign leaves nothing behind"
    result = json.loads(out.read_text())
    assert result["violations"] == []
    assert result["control"] > 0, "a campaign that finds nothing without any sync tests nothing"
    kinds = {tuple(row.split(" ")) for row in result["rows"]}
    assert {tier for tier, _ in kinds} == set(TIERS)
    assert {what for _, what in kinds} >= {"start", "save", "flush", "prune", "delete", "rollback", "repair"}
    assert all(row["restarts"] >= row["points"] for row in result["rows"].values())


def test_violation_fails_the_campaign() -> None:
    """A campaign could end well whatever it found."""
    assert held({"violations": [], "control": 1})
    assert not held({"violations": [{}], "control": 1})
    assert not held({"violations": [], "control": 0})
    assert held({"violations": [], "control": 1, "pair_controls": {"late": True}})
    assert not held({"violations": [], "control": 1, "pair_controls": {"late": True, "deleted": False}})


def test_tally_counts_points_states_and_violations() -> None:
    """A violation that is not in the table would not fail the campaign."""
    tally = Tally()
    tally.add("pair commit", "after 7", [("whole", []), ("torn", ["lost", "other bits"])], 2)
    tally.add("pair commit", "after 8", [("whole", [])], 0)
    assert tally.rows == {"pair commit": {"points": 2, "states": 3, "restarts": 2, "violations": 2}}
    assert [(each["state"], each["violation"]) for each in tally.violations] == [
        ("torn", "lost"),
        ("torn", "other bits"),
    ]


def said(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def test_oracle_tracks_commits_rollbacks_and_deletions() -> None:
    """An oracle that forgets a promise finds no violation of it."""
    run = said(*({"committed": ["durable", 0, step]} for step in (2, 4, 6)), {"committed": ["ram", 0, 7]})
    assert promised(run).kept == {"ram": [(0, 7)], "ssd": [], "durable": [(0, 4), (0, 6)]}
    assert promised(run).floor == (0, 7)
    back = [*run, *said({"rolled_back": 4})]
    assert promised(back).floor == (0, 4)
    assert promised(back).forbids((0, 6)) is None, "until a save of the new branch is committed"
    again = promised([*back, *said({"committed": ["durable", 1, 6]})])
    assert again.kept["durable"] == [(0, 4), (1, 6)]
    assert again.forbids((0, 6)) == "step 6 of branch 0 was abandoned"
    gone = promised([*back, *said({"committed": ["durable", 1, 6]}, {"deleting": 6}, {"deleted": 6})])
    assert gone.floor == (0, 4)
    assert gone.forbids((1, 6)) == "step 6 was deleted"
