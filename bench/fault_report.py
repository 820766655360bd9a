"""The outcome of a run under faults, from its processes' records, and the table of all runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fault_places import CONTENDERS, OURS, Places
from bench.fault_run import Outcome
from bench.fault_schedule import gap_closed
from bench.resume_phases import Phase, resumes
from ckptkit.events import Event, Kind
from ckptkit.goodput import goodput_report, load_run
from ckptkit.launch import ExitCode

FIGURES: Mapping[str, str] = {
    "goodput": "kept steps x undisturbed step time / elapsed time; the ceiling is of the same kind",
    "ml_goodput": "Google's ml-goodput-measurement",
    "effective_training_time": "ETTR (Kokolis et al., 2025)",
    "new_steps": "kept steps x this run's own median step / elapsed (Gemini, 2023)",
    "elapsed_s": "from launch to end, or until the run was stopped",
    "lost_work_s": "steps that had to be taken again x undisturbed step time",
    "lost_steps": "the same in steps",
    "saves": "saves that were taken",
    "stall_ms": "how long a save held the loop, median of the run's saves",
    "resume_s": "from a kill to the end of the next step, mean of the run's resumes",
    "disruptions": "losses that the launcher saw, planned or not",
}
_RESUME = ("total", *map(str, Phase))
CLOSED_BAR, LOST_BAR = 1 / 2, {True: 1 / 3, False: 1 / 2}
RESUME_BAR = 0.6  # of the time of stock Orbax, whose processes start cold
SMALL_STEP_S = 0.2  # a step that is shorter belongs to a small state


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The run that nothing happened to."""

    steps: int
    start_s: float  # from launch to the first step
    compile_s: float  # of that: short where the programs were compiled by an earlier run
    step_s: float  # of the loop, data included
    losses: Mapping[int, str]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, places: Places) -> Reference:
        """Reads what it left. Raises ValueError where it did not train to its end."""
        losses, state = _proof(places.proof)
        logs = load_run(places.events)
        spans = [e for log in logs for e in log if e.kind == Kind.SPAN and e.process == 0]
        steps = sorted((e.at_s, e.fields["duration_s"]) for e in spans if e.fields["span"] == "step")
        compiled_s = sum(e.fields["duration_s"] for e in spans if e.fields["span"] == "compile")
        launched_s = min(e.at_s for log in logs for e in log if e.kind == Kind.STARTED and e.process < 0)
        if len(steps) < 2 or not state:
            raise ValueError(f"the undisturbed run came to {len(steps)} steps: there is nothing to compare with")
        return cls(
            steps=len(steps),
            start_s=steps[0][0] - steps[0][1] - launched_s,
            compile_s=compiled_s,
            step_s=(steps[-1][0] - steps[0][0]) / (len(steps) - 1),
            losses=losses,
            state=state,
        )


def judge(places: Places, outcome: Outcome, reference: Reference, steps: int) -> dict[str, Any]:
    """Every figure of one run, as plain values. `wrong`: a kept step's loss, or the final state, has other bits than in
    the undisturbed run, without an error.
    """
    logs = load_run(places.events)
    if not any(event.process >= 0 for log in logs for event in log):
        return _never_came_up(logs, outcome)
    report = goodput_report(logs)
    losses, state = _proof(places.proof)
    wrong_steps = sum(loss != reference.losses[step] for step, loss in losses.items() if step in reference.losses)
    finished = outcome.code == ExitCode.OK
    other_end = finished and steps == reference.steps and state != reference.state
    lost_steps = sum(loss.lost_steps for loss in report.disruptions)
    came = resumes(logs)
    return {
        "finished": finished,
        "wrong": bool(wrong_steps or other_end),
        "wrong_steps": wrong_steps,
        "goodput": report.goodput.distinct_steps * reference.step_s / report.wall_s,
        "ml_goodput": report.goodput.ml_goodput or 0.0,
        "effective_training_time": report.goodput.effective_training_time or 0.0,
        "new_steps": report.goodput.new_steps or 0.0,
        "kept_steps": report.goodput.distinct_steps,
        "elapsed_s": report.wall_s,
        "parts_s": {str(part): round(seconds, 3) for part, seconds in report.parts_s.items()},
        "lost_steps": lost_steps,
        "lost_work_s": lost_steps * reference.step_s,
        "saves": report.saves.saves,
        "stall_ms": report.saves.stall_ms_p50,
        "resume_s": fmean(each.total_s for each in came) if came else None,
        "resumes": len(came),
        "resume_phases_s": {str(p): fmean(each.phases_s[p] for each in came) for p in Phase} if came else {},
        "disruptions": len(report.disruptions),
        "restored_from": _sum(event.fields["sources"] for event in _of(logs, Kind.RESTORED)),
        "written_bytes": _sum({e.tier or "": e.fields["bytes"]} for e in _of(logs, Kind.COMMITTED)),
        "flips": outcome.flips,
        "rejected": sum(event.process == 0 for event in _of(logs, Kind.REJECTED)),
        "died_by_itself": outcome.unplanned,
        "happened": outcome.happened,
        "last_lines": [] if finished else list(outcome.last_lines),
    }


def _never_came_up(logs: Sequence[Sequence[Event]], outcome: Outcome) -> dict[str, Any]:
    """Every life ended before its process wrote a record: no goodput, and nothing that could be wrong."""
    moments_s = [event.at_s for log in logs for event in log]
    goodputs = dict.fromkeys(("goodput", "ml_goodput", "effective_training_time", "new_steps"), 0.0)
    counts = dict.fromkeys(
        ("kept_steps", "lost_steps", "lost_work_s", "saves", "wrong_steps", "rejected", "resumes"), 0
    )
    return {
        "finished": False,
        "wrong": False,
        **goodputs,
        **counts,
        "elapsed_s": max(moments_s) - min(moments_s),
        "parts_s": {},
        "stall_ms": None,
        "resume_s": None,
        "resume_phases_s": {},
        "disruptions": sum(event.kind == Kind.DISRUPTED for log in logs for event in log),
        "restored_from": {},
        "written_bytes": {},
        "flips": outcome.flips,
        "died_by_itself": outcome.unplanned,
        "happened": outcome.happened,
        "last_lines": list(outcome.last_lines),
    }


def _proof(directory: Path) -> tuple[dict[int, str], dict[str, Any]]:
    """Loss of each step, the last time that it was taken, and the digests of the end (empty: it never came).

    All processes note the same loss; one that is killed in a step that another saves notes none of it.
    """
    losses: dict[int, str] = {}
    for path in sorted(directory.glob("losses-*.jsonl")):
        lines = path.read_text().split("\n")[:-1]  # what has no newline was being written
        losses = {noted["step"]: noted["loss"] for noted in map(json.loads, lines)} | losses
    ends = {path.name: json.loads(path.read_text()) for path in directory.glob("state-*.json")}
    return losses, ends


def _of(logs: Sequence[Sequence[Event]], kind: Kind) -> list[Event]:
    return [event for log in logs for event in log if event.kind == kind]


def _sum(sizes: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in sizes:
        total.update(each)
    return dict(sorted(total.items()))


def summary(runs: Sequence[Mapping[str, Any]], ceilings: Sequence[float], step_s: float) -> dict[str, Any]:
    """Medians and extremes by contender, and ours against the best of stock Orbax. `runs` name `contender` and
    `repeat`, `ceilings` has a goodput for each repeat. A share of the gap is of one repeat: the same schedule.
    """
    names = [name for name in CONTENDERS if any(run["contender"] == name for run in runs)]
    by_name = {name: [run for run in runs if run["contender"] == name] for name in names}
    found: dict[str, Any] = {
        "ceiling": _spread(ceilings),
        "contenders": {
            name: {
                **{figure: _spread([run[figure] for run in own]) for figure in FIGURES},
                **{f"resume_{p}_s": _spread([run["resume_phases_s"].get(p) for run in own]) for p in _RESUME[1:]},
                "written_bytes": {
                    tier: median(run["written_bytes"].get(tier, 0) for run in own)
                    for tier in sorted({tier for run in own for tier in run["written_bytes"]})
                },
                "wrong": sum(run["wrong"] for run in own),
                "unfinished": sum(not run["finished"] for run in own),
                "flips": sum(run["flips"] for run in own),
                "runs": len(own),
            }
            for name, own in by_name.items()
        },
    }
    stock = [name for name in names if name.startswith("orbax")]
    if OURS in names and stock:
        best = max(stock, key=lambda name: found["contenders"][name]["goodput"]["median"])
        found["against"] = _against(by_name[OURS], by_name[best], ceilings, step_s) | {"peer": best}
    return found


def _against(ours: Sequence[Any], peer: Sequence[Any], ceilings: Sequence[float], step_s: float) -> dict[str, Any]:
    pairs = {run["repeat"]: run for run in peer}
    closed = [
        gap_closed(run["goodput"], pairs[run["repeat"]]["goodput"], ceilings[run["repeat"]])
        for run in ours
        if run["repeat"] in pairs
    ]
    lost, peer_lost = (median(run["lost_work_s"] for run in each) for each in (ours, peer))
    small = step_s < SMALL_STEP_S
    back, peer_back = ([run["resume_s"] for run in each if run["resume_s"] is not None] for each in (ours, peer))
    return {
        "gap_closed": _spread(closed),
        "lost_work_ratio": lost / peer_lost if peer_lost else None,
        "lost_work_bar": LOST_BAR[small],
        "resume_ratio": median(back) / median(peer_back) if back and peer_back else None,
        "wrong": sum(run["wrong"] for run in ours),
        "unfinished": sum(not run["finished"] for run in ours),
    }


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known), "n": len(known)} if known else None


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints a whole result."""
    settings, found = result["settings"], result["summary"]
    console.print(
        f"bench faults: {settings['state']}, {settings['processes']} process(es), {settings['steps']} steps of "
        f"{settings['step_s']:.3f} s, started in {settings['start_s']:.1f} s; a fault every {settings['mtbf_s']:g} s",
        markup=False,
    )
    names = list(found["contenders"])
    table = Table("figure", *names, title="median (least, most) of the repeats")
    rows = [*FIGURES, *(f"resume_{phase}_s" for phase in _RESUME[1:])]
    for figure in rows:
        table.add_row(figure, *(_cell(found["contenders"][name][figure]) for name in names))
    for tier in ("ram", "ssd", "durable"):
        cells = [found["contenders"][name]["written_bytes"].get(tier) for name in names]
        table.add_row(f"written to {tier}, MB", *("-" if size is None else f"{size / 1e6:,.0f}" for size in cells))
    for figure in ("wrong", "unfinished"):
        of = [found["contenders"][name] for name in names]
        table.add_row(f"{figure} runs", *(f"{each[figure]} of {each['runs']}" for each in of))
    table.add_row("bits flipped", *(str(found["contenders"][name]["flips"]) for name in names))
    table.add_row("steps between saves", *(settings["every"][name] for name in names))
    console.print(table)
    console.print(f"ceiling of a checkpoint that costs nothing: goodput {_cell(found['ceiling'])}", markup=False)
    for run in result["runs"]:
        if not run["finished"] or run["wrong"]:
            what = "wrong bits" if run["finished"] else "never finished"
            last = f"; {run['last_lines'][-1]}" if run["last_lines"] else ""
            console.print(f"{run['contender']}, repeat {run['repeat']}: {what}{last}", markup=False)
    if "against" in found:
        _show_bars(found["against"], console)


def _show_bars(against: Mapping[str, Any], console: Console) -> None:
    closed, ratio, resume = against["gap_closed"], against["lost_work_ratio"], against["resume_ratio"]
    met = {True: "met", False: "NOT MET", None: "no ratio"}
    lines = [
        (f"share of the gap closed {_cell(closed)}, at least 0.5", closed and closed["median"] >= CLOSED_BAR),
        (
            f"lost work {'-' if ratio is None else f'{ratio:.2f}'} of theirs, at most {against['lost_work_bar']:.2f}",
            None if ratio is None else ratio <= against["lost_work_bar"],
        ),
        (
            f"resume {'-' if resume is None else f'{resume:.2f}'} of theirs, at most {RESUME_BAR:g}",
            None if resume is None else resume <= RESUME_BAR,
        ),
        (f"runs with wrong bits {against['wrong']}, at most 0", against["wrong"] == 0),
        (f"runs that never finished {against['unfinished']}, at most 0", against["unfinished"] == 0),
    ]
    console.print(f"ckptkit against {against['peer']}:", markup=False)
    for text, is_met in lines:
        console.print(f"  {text}: {met[is_met]}", markup=False)


def _cell(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    texts = [
        f"{spread[key]:.0f}" if abs(spread[key]) >= 100 else f"{spread[key]:.3g}" for key in ("median", "min", "max")
    ]
    return texts[0] if spread["n"] == 1 else f"{texts[0]} ({texts[1]}, {texts[2]})"
