"""The costs of a run of the trainer, fitted to event logs, and the simulator's prediction for another run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from ckptkit.diagnosis import simulation as sim
from ckptkit.events import Event, Kind
from ckptkit.goodput import Part, goodput_report
from ckptkit.goodput.runs import Attempt, attempts_of, start_s

TIERS = ("ram", "durable")
DISTURBED = 1.25  # times the median of all runs, of a step or of the start: bench/LOG.md
_SURVIVES = {"ram": frozenset({"process"}), "durable": frozenset(sim.FAILURES)}

Logs = Sequence[Sequence[Event]]


@dataclass(frozen=True, slots=True)
class Planned:
    """A failure that is inflicted `at_s` after the launch: a process dies, or a host with its ramdisk."""

    at_s: float
    kind: sim.Failure
    process: int

    def __str__(self) -> str:
        return f"{self.kind} {self.process} at {self.at_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The simulator's input for a run. Intervals are in steps."""

    run_s: float
    ram_every: int
    durable_every: int
    failures: tuple[Planned, ...] = ()

    def __str__(self) -> str:
        lost = ", ".join(map(str, self.failures)) or "none"
        return f"saves every {self.ram_every} and {self.durable_every} steps, failures: {lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """In seconds. `cycle_s`: from step to step, saves left out; `step_s`: the step's own part of it, which is what a
    report counts as productive. `resume_s` by tier: from a failure to the first step after it.
    """

    startup_s: float
    cycle_s: float
    step_s: float
    stall_s: dict[str, float]
    persist_s: dict[str, float]
    resume_s: dict[str, float]


def fit(recorded: Sequence[tuple[RunPlan, Logs]]) -> Costs:
    """The mean costs of these runs. Raises ValueError where they hold no start, no restart or no step."""
    seen: dict[str, list[float]] = defaultdict(list)
    for plan, logs in recorded:
        attempts, launcher = attempts_of(logs)
        begins = {attempt.number: start_s(attempt.steps[0][1]) for attempt in attempts if attempt.steps}
        if 0 in begins:
            seen["startup"].append(begins[0] - min(event.at_s for event in launcher))
        for loss in (event for event in launcher if event.kind == Kind.DISRUPTED):
            number = loss.fields["attempt"] + 1
            source = _source(attempts, number)
            if number in begins and source is not None:
                seen[f"resume {source}"].append(begins[number] - loss.at_s + loss.fields.get("detect_s", 0.0))
        for attempt in attempts:
            _see(attempt, plan, seen)
    resumes = [length for tier in TIERS for length in seen[f"resume {tier}"]]
    if not (seen["startup"] and resumes and seen["cycle"]):
        raise ValueError("the runs to fit have no start, no restart or no two steps: run more, or longer ones")
    ram_s, both_s = _mean(seen["stall ram"]), _mean(seen["stall durable"])
    return Costs(
        startup_s=fmean(seen["startup"]),
        cycle_s=fmean(seen["cycle"]),
        step_s=fmean(seen["step"]),
        stall_s={"ram": ram_s, "durable": max(0.0, both_s - ram_s)},
        persist_s={tier: _mean(seen[f"persist {tier}"]) for tier in TIERS},
        resume_s={tier: fmean(seen[f"resume {tier}"] or resumes) for tier in TIERS},
    )


def _see(attempt: Attempt, plan: RunPlan, seen: dict[str, list[float]]) -> None:
    """Notes the cycles, stalls and commits of one attempt; a step's number is one less than its save's."""
    stalls = {
        span.step: span.fields["duration_s"] for span in attempt.spans if span.fields["span"] == "checkpoint_save"
    }
    for (step, this), (_, after) in pairwise(attempt.steps):
        stall_s = 0.0
        if (step + 1) % plan.ram_every == 0:  # every durable save is one into the ramdisk too
            stall_s = stalls.get(step + 1, 0.0)
            seen["stall durable" if (step + 1) % plan.durable_every == 0 else "stall ram"].append(stall_s)
        seen["cycle"].append(start_s(after) - start_s(this) - stall_s)
        seen["step"].append(this.fields["duration_s"])
    for event in attempt.events:
        if event.kind == Kind.COMMITTED and event.process == 0:
            seen[f"persist {event.tier}"].append(event.fields["duration_s"])


def predict(costs: Costs, plan: RunPlan) -> dict[str, float]:
    """`goodput` (kept steps' time / elapsed) and `lost_steps` of a run with these costs, by the simulator."""
    tiers = tuple(
        sim.TierModel(
            name=tier,
            stall_s=costs.stall_s[tier],
            persist_s=costs.persist_s[tier],
            restore_s=costs.resume_s[tier],  # the whole way back: the simulator adds the two anyway
            survives=_SURVIVES[tier],
        )
        for tier in TIERS
    )
    cluster = sim.Cluster(hosts=2, tiers=tiers, restart_s=0.0, step_s=costs.cycle_s)
    at_s = [max(0.0, failure.at_s - costs.startup_s) for failure in plan.failures]
    failures = sim.Failures(
        np.array([[*at_s, np.inf]]),
        np.array([[*(sim.FAILURES.index(failure.kind) for failure in plan.failures), 0]], np.int8),
        np.zeros((1, len(at_s) + 1)),
    )
    policy = sim.FixedIntervals((plan.ram_every * costs.cycle_s, plan.durable_every * costs.cycle_s))
    outcome = sim.simulate(cluster, failures, policy, horizon_s=max(plan.run_s - costs.startup_s, costs.cycle_s))
    return {
        "goodput": float(outcome.work_s[0]) / costs.cycle_s * costs.step_s / plan.run_s,
        "lost_steps": float(outcome.lost_s[0]) / costs.cycle_s,
    }


def compare(costs: Costs, recorded: Sequence[tuple[RunPlan, Logs]], *, fitted: int) -> dict[str, Any]:
    """Predicted and measured, run by run; the first `fitted` runs count for nothing in the means."""
    rows = []
    for number, (plan, logs) in enumerate(recorded):
        report, expected = goodput_report(logs), predict(costs, plan)
        measured = report.parts_s[Part.PRODUCTIVE] / report.wall_s
        rows.append(
            {
                "run": number,
                "fitted": number < fitted,
                "plan": str(plan),
                "failures": len(plan.failures),
                "measured": measured,
                "predicted": expected["goodput"],
                "difference_points": 100.0 * (expected["goodput"] - measured),
                "lost_steps_measured": sum(loss.lost_steps for loss in report.disruptions),
                "lost_steps_predicted": expected["lost_steps"],
                **_pace_s(plan, logs),
            }
        )
    known, new = rows[:fitted], rows[fitted:]
    usual_s = {name: median(row[name] for row in rows) for name in ("cycle_s", "startup_s")}
    guess = fmean(row["measured"] for row in known)
    return {
        "costs": asdict(costs),
        "rows": rows,
        "disturbed": [row["run"] for row in rows if any(row[name] > DISTURBED * usual_s[name] for name in usual_s)],
        "difference_points_mean": fmean(abs(row["difference_points"]) for row in new),
        "difference_points_max": max(abs(row["difference_points"]) for row in new),
        "bias_points": fmean(row["difference_points"] for row in new),
        # The prediction without a simulator: the mean goodput of the fitted runs.
        "guess_points_mean": fmean(100.0 * abs(guess - row["measured"]) for row in new),
    }


def _pace_s(plan: RunPlan, logs: Logs) -> dict[str, float]:
    """From step to step in this run, saves left out, and from the launch to the first step."""
    seen: dict[str, list[float]] = defaultdict(list)
    attempts, launcher = attempts_of(logs)
    for attempt in attempts:
        _see(attempt, plan, seen)
    begun = [start_s(attempt.steps[0][1]) for attempt in attempts if attempt.number == 0 and attempt.steps]
    return {"cycle_s": _mean(seen["cycle"]), "startup_s": _mean(begun) - min(event.at_s for event in launcher)}


def _source(attempts: Sequence[Attempt], number: int) -> str | None:
    """The slower of the tiers that attempt `number` read; None where it restored nothing."""
    own = (event for attempt in attempts if attempt.number == number for event in attempt.events)
    read = {
        tier for event in own if event.kind == Kind.RESTORED for tier, size in event.fields["sources"].items() if size
    }
    return ("durable" if "durable" in read else "ram") if read else None


def _mean(values: Sequence[float]) -> float:
    return max(0.0, fmean(values)) if values else 0.0
