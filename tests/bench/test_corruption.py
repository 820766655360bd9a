"""The corruption campaign end to end, short: its table, its JSON, and the bars themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.corruption import PLACES, SHORT, held, plan
from ckptkit.testing.damage import DAMAGE_KINDS, inflict

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
def test_short_corruption_campaign_passes(tmp_path: Path) -> None:
    """A damaged file could be restored as a checkpoint, silently; or the campaign not notice."""
    out = tmp_path / "out" / "result.json"
    command = [sys.executable, "-m", "bench", "corruption", "--json", str(out)]
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environ["TMPDIR"] = str(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "wrong" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "a campaign leaves nothing behind"
    result = json.loads(out.read_text())
    assert (result["faults"], result["seed"], result["misses"]) == (SHORT, 0, [])
    ours, stock = (sum(map(Counter, result[who].values()), Counter()) for who in ("ckptkit", "orbax"))
    assert ours["faults"] == stock["faults"] == SHORT
    assert ours["wrong"] == 0
    assert ours["older"] == 0, "the newest step was lost without a report"
    assert ours["detected"] + ours["harmless"] == SHORT
    assert set(result["ckptkit"]) == {" ".join(place) for place in PLACES}
    assert all(row["recovered"] == row["faults"] for row in result["ckptkit"].values())
    assert stock["wrong"] > 0, "a campaign that stock Orbax survives tests nothing"


def test_wrong_restore_fails_the_campaign() -> None:
    """A campaign could end well whatever it found."""
    assert held({"misses": [], "ckptkit": {"ram data": {"faults": 1, "detected": 1}}})
    assert not held({"misses": [], "ckptkit": {"ram data": {"faults": 1, "wrong": 1}}})
    assert not held({"misses": [{}], "ckptkit": {}})


def test_seed_repeats_the_plan_with_every_kind_in_every_place() -> None:
    """A failure could not be repeated, or a kind never be tried."""
    found = plan(PLACES, 102, 7)
    assert found == plan(PLACES, 102, 7) != plan(PLACES, 102, 8)
    assert set(Counter((place, kind) for place, kind, _ in found).values()) == {2}
    assert {kind for _, kind, _ in found} == set(DAMAGE_KINDS)


@pytest.mark.parametrize("kind", DAMAGE_KINDS)
def test_each_damage_kind_is_repeatable_by_seed(tmp_path: Path, kind: str) -> None:
    """A fault that changes nothing would be counted as survived."""

    def damaged() -> dict[str, bytes]:
        for name in ("a", "b", "old"):
            (tmp_path / name).write_bytes(name.encode() * 5000)
        (tmp_path / "old").write_bytes(b"old")
        said = inflict(kind, [tmp_path / "a", tmp_path / "b"], [tmp_path / "old"], 3)  # pyright: ignore[reportArgumentType]
        assert str(tmp_path) in said
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    first = damaged()
    assert first != {"a": b"a" * 5000, "b": b"b" * 5000, "old": b"old"}
    assert damaged() == first
    with pytest.raises(ValueError, match="needs files, found 0"):
        inflict(kind, [], [], 3)  # pyright: ignore[reportArgumentType]
