"""The comparison of simulator and reality: on runs whose costs are known, played second by second."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import simulator
from bench.simulator import plan_run
from bench.simulator_fit import Costs, Planned, RunPlan, compare, fit, predict
from bench.simulator_report import plot, show
from ckptkit.events import Event, Kind

TRUE = Costs(
    startup_s=8.0,
    cycle_s=0.21,
    step_s=0.2,
    stall_s={"ram": 0.05, "durable": 0.4},
    persist_s={"ram": 0.03, "durable": 1.0},
    resume_s={"ram": 6.0, "durable": 7.5},
)


def played(plan: RunPlan, costs: Costs = TRUE) -> list[list[Event]]:
    """The logs of a run that costs exactly so, told step by step: no formula of the simulator is used."""
    logs: list[list[Event]] = [[Event(kind=Kind.STARTED, at_s=0.0, process=-1, fields={"attempt": 0})]]
    newest, now, step, source = {"ram": 0, "durable": 0}, costs.startup_s, 0, None
    for attempt, failure in enumerate([*plan.failures, Planned(plan.run_s, "host", 0)]):
        log = [Event(kind=Kind.STARTED, at_s=now - 1.0, process=0, fields={"attempt": attempt})]
        logs.append(log)
        if source:
            fields = {"sources": {source: 10, "peer": 0}, "duration_s": 0.5}
            log.append(Event(kind=Kind.RESTORED, at_s=now - 0.5, process=0, step=step, fields=fields))
        flight: list[tuple[float, str, int]] = []
        while now + costs.cycle_s <= failure.at_s:
            now += costs.cycle_s
            fields = {"span": "step", "duration_s": costs.step_s}
            log.append(
                Event(kind=Kind.SPAN, at_s=now - costs.cycle_s + costs.step_s, process=0, step=step, fields=fields)
            )
            step, begin_s = step + 1, now
            for tier, every in (("ram", plan.ram_every), ("durable", plan.durable_every)):
                if step % every == 0:
                    now += costs.stall_s[tier]
                    flight.append((now + costs.persist_s[tier], tier, step))
            fields = {"span": "checkpoint_save", "duration_s": now - begin_s}
            log.append(Event(kind=Kind.SPAN, at_s=now, process=0, step=step, fields=fields))
        for at_s, tier, saved in flight:
            if at_s <= failure.at_s:
                newest[tier] = saved
                fields = {"duration_s": costs.persist_s[tier]}
                log.append(Event(kind=Kind.COMMITTED, at_s=at_s, process=0, step=saved, tier=tier, fields=fields))
        if failure.at_s < plan.run_s:
            if failure.kind == "host":
                newest["ram"] = 0
            lost = {"attempt": attempt, "lost": failure.process, "cause": "SIGKILL", "wiped": ()}
            logs[0].append(Event(kind=Kind.DISRUPTED, at_s=failure.at_s, process=-1, fields=lost))
            step = max(newest.values())
            source = ("ram" if newest["ram"] == step else "durable") if step else None
            now = failure.at_s + costs.resume_s[source or "ram"]
    logs[0].append(Event(kind=Kind.FINISHED, at_s=plan.run_s, process=-1, fields={"code": 130}))
    return logs


PLANS = [plan_run(number, 300.0) for number in range(10)]


def test_fit_recovers_costs_from_logs() -> None:
    """If it failed, the comparison would blame the simulator for what the fit has got wrong."""
    found = fit([(plan, played(plan)) for plan in PLANS[:3]])
    assert (found.startup_s, found.cycle_s, found.step_s) == pytest.approx((8.0, 0.21, 0.2), abs=1e-3)
    assert found.stall_s == pytest.approx(TRUE.stall_s, abs=1e-3)
    assert found.persist_s == pytest.approx(TRUE.persist_s)
    assert found.resume_s == pytest.approx(TRUE.resume_s, abs=1e-3)


@pytest.mark.long
def test_prediction_is_close_and_a_wrong_one_is_detected(tmp_path: Path) -> None:
    """If it failed, either every prediction would pass, or none that is right."""
    recorded = [(plan, played(plan)) for plan in PLANS]
    costs = fit(recorded[:3])
    result = compare(costs, recorded, fitted=3)
    assert len(result["rows"]) == len(PLANS)
    assert result["difference_points_mean"] < 1.5
    assert result["guess_points_mean"] > 2 * result["difference_points_mean"], (
        "the runs are too alike to prove anything"
    )
    slower = replace(costs, resume_s={tier: 3.0 * seconds for tier, seconds in costs.resume_s.items()})
    assert compare(slower, recorded, fitted=3)["difference_points_mean"] > 3.0
    assert result["disturbed"] == []
    plot(tmp_path / "plot.png", result)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_run_slowed_by_outside_load_is_reported() -> None:
    """If it failed, a neighbour's load would be blamed on the simulator, or left out without a rule."""
    slow = replace(TRUE, cycle_s=1.4 * TRUE.cycle_s, step_s=1.4 * TRUE.step_s)
    recorded = [(plan, played(plan, slow if number == 5 else TRUE)) for number, plan in enumerate(PLANS)]
    result = compare(TRUE, recorded, fitted=3)
    assert result["disturbed"] == [5]
    console = Console(record=True, width=120)
    show(result, console)
    assert "run 5: steps or the start took 1.25 times the median of all runs or more" in console.export_text()


def test_run_without_failures_loses_only_startup_and_saves() -> None:
    """If it failed, an offset would hide in every prediction."""
    plan = RunPlan(run_s=100.0, ram_every=10, durable_every=1000)
    saves = (100.0 - 8.0) / (10 * 0.21 + 0.05)
    expected = (100.0 - 8.0 - 0.05 * saves) / 0.21 * 0.2 / 100.0
    assert predict(TRUE, plan)["goodput"] == pytest.approx(expected, abs=0.002)


def test_runs_that_cannot_be_fitted_are_refused() -> None:
    """If it failed, a division by nothing would be all that a person learns."""
    plan = RunPlan(run_s=30.0, ram_every=1, durable_every=2)
    with pytest.raises(ValueError, match="no start, no restart or no two steps"):
        fit([(plan, played(plan))])


def test_command_reuses_recorded_runs(tmp_path: Path) -> None:
    """If it failed, a campaign that was cut off would begin again."""
    (tmp_path / "cache").mkdir()
    for number in range(5):
        directory = tmp_path / f"run-{number}-60s"
        directory.mkdir()
        for log in played(plan_run(number, 60.0)):
            attempt = log[0].fields["attempt"]
            name = "launcher" if log[0].process < 0 else f"attempt-{attempt}-process-0"
            (directory / f"{name}.jsonl").write_text("".join(event.to_json() + "\n" for event in log))
    words = ["--runs", "5", "--run-s", "60", "--logs", str(tmp_path), "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(simulator.main, words)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["fitted"] for row in rows] == [True, True, True, False, False]


@pytest.mark.slow
def test_simulator_prediction_is_close_to_trainer_runs(tmp_path: Path) -> None:
    """If it failed, the campaign could not run at all; how close it comes depends on the machine."""
    done = CliRunner().invoke(simulator.main, ["--runs", "4", "--run-s", "40", "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["difference_points_mean"] < 15.0
