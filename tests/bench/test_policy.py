"""The judgement of the learned interval: on made-up failures whose best interval is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench import policy
from ckptkit.diagnosis import simulation as sim
from ckptkit.goodput.intervals import daly_s


def test_exponential_failures_are_judged_as_theory_predicts() -> None:
    """If it failed, ratios to the oracle would be ratios to something else."""
    rng = np.random.default_rng(1)
    trace = sim.FailureTrace("made up", rng.exponential(20_000.0, 120), np.zeros(120))
    case = policy.judge(trace, 0.01, policy.Size(runs=12))
    best_s = float(daly_s(0.01 * trace.mtbf_s, trace.mtbf_s))
    assert case.blurred.interval_s is not None
    assert 0.5 * best_s < case.blurred.interval_s < 2.0 * best_s
    assert 0.97 < case.oracle.ratio < 1.01
    assert 0.985 < case.blurred.ratio < 1.005
    assert case.verdicts()["at least 99 % of the oracle"] == (case.oracle.ratio >= 0.99)
    # Of exponential failures only the rate can be known: the best policy for the law is not worse than one that learns.
    law, ours = case.hindsight.law, case.hindsight.ours
    assert 0.97 < ours.ratio <= law.ratio + ours.ci + law.ci
    assert law.ratio < 1.0


@pytest.mark.long
def test_policy_beats_best_fixed_interval_on_clustered_failures() -> None:
    """The claim that growing intervals are for: without it they would be decoration."""
    exponential, clustered = (policy.judge(policy.made_up()[i], 0.01, policy.Size(runs=30)) for i in (0, 2))
    assert clustered.growing.above()
    assert clustered.growing.ratio > 1.004
    assert clustered.blurred.above()
    assert clustered.verdicts()["better than the oracle, where saves are costly, moments blurred"]
    assert exponential.growing.ratio > 0.998
    assert exponential.blurred.ratio > 0.99


def test_command_reports_traces_that_it_left_out(tmp_path: Path) -> None:
    """If it failed, a trace that is too short would be judged by noise, or skipped without a message."""
    counts = ([1] * 7 + [0, 0]) * 40
    for name, data in (("long.json", counts), ("none.json", [1] * 60), ("short.json", counts[:60])):
        (tmp_path / name).write_text(json.dumps({"metadata": {"gap_seconds": 1800}, "data": data}))
    words = [
        "--traces",
        str(tmp_path),
        "--runs",
        "2",
        "--failures",
        "20",
        "--json",
        str(tmp_path / "out" / "found.json"),
    ]
    done = CliRunner().invoke(policy.main, words)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert {case["trace"] for case in found["cases"]} == {"long.json"}
    assert {case["trace"] for case in found["made_up"]} == set(policy.MADE_UP)
    none, short = found["left_out"]
    assert none.startswith("trace none.json has 0 gaps")
    assert short == "short.json: 5 gaps, 30 are needed"
    assert CliRunner().invoke(policy.main, ["--traces", str(tmp_path / "out")]).exit_code == 2
