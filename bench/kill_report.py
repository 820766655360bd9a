"""The verdict on a kill campaign, from what its processes noted, and the table of it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kill_oracle import Save
from bench.kill_worker import RAM_EVERY
from bench.resume_phases import Phase, resumes
from ckptkit.events import Event, Kind, read_events
from ckptkit.goodput import goodput_report

LOST_BAR = RAM_EVERY + 1


def judge(home: Path, kills: Sequence[Any], expected: Sequence[Save | None]) -> dict[str, Any]:
    """The outcome of each kill: `expected[k]` is the newest save that the files covered after kill k.

    A kill is recovered when the next life that restored anything gave exactly that save, on all processes, and
    every step of that life has the digests of the undisturbed run.
    """
    # By the files' names: a full disk may have cost a log its first events.
    lives: dict[int, list[Event]] = defaultdict(list)
    logs = []
    for path in sorted(home.glob("host-*/events/attempt-[0-9]*.jsonl")):
        logs.append(read_events(path))
        lives[int(path.name.split("-")[1])].extend(logs[-1])
    exact = _exact_lives(home)
    done = _steps_done(home)
    rows = []
    for number, kill in enumerate(kills[: len(expected)]):
        came_back = next((life for life in sorted(lives) if life > number and _began(lives[life])), None)
        row = {"kill": str(kill), "moment": kill.moment, "covered": str(expected[number]), "restored": None}
        rows.append(row)
        if came_back is None:
            row["why"] = "the job never came back"
            continue
        wanted = expected[came_back - 1]  # a later kill, in mid-restore, may have taken more files
        restored, begun = _restored(lives[came_back]), _began(lives[came_back])
        row |= {"life": came_back, "restored": restored[0] if restored else None, "covered": str(wanted)}
        row["lost_steps"] = max((done[life] for life in range(came_back) if life in done), default=0) - begun[0]
        row["newest_covered"] = wanted is not None and wanted.step >= _committed(lives, came_back)
        row["why"] = _why_not(wanted, restored, begun, exact.get(came_back, "it took no step"))
    logs.append(read_events(home / "launcher.jsonl"))
    came = _resumes(logs, lives)
    account = goodput_report(logs)
    return {
        "kills": len(kills),
        "recovered": sum(row["why"] is None for row in rows),
        "lost_steps": _p50_max([row["lost_steps"] for row in rows if "lost_steps" in row]),
        "lost_steps_where_the_newest_was_covered": _p50_max(
            [row["lost_steps"] for row in rows if row.get("newest_covered")]
        ),
        "resume_s": {phase: _p50_p99([each[phase] for each in came]) for phase in ("total", *Phase)},
        "resumes": len(came),
        "tiers": _tiers(lives),
        "time": {str(part): seconds / account.wall_s for part, seconds in account.parts_s.items()},
        "rows": rows,
    }


def _restored(life: Sequence[Event]) -> list[str]:
    return sorted({event.fields["save_id"] for event in life if event.kind == Kind.RESTORED})


def _began(life: Sequence[Event]) -> list[int]:
    return sorted({event.step for event in life if event.kind == Kind.RESUMED and event.step is not None})


def _why_not(wanted: Save | None, restored: list[str], begun: list[int], exact: str | None) -> str | None:
    """Why a resume is wrong; None where it is right."""
    if restored != ([] if wanted is None else [str(wanted)]):
        return f"restored {' and '.join(restored) or 'nothing'}, the files covered {wanted}"
    if begun != [0 if wanted is None else wanted.step]:
        return f"went on from steps {begun}"
    return exact


def _exact_lives(home: Path) -> dict[int, str | None]:
    """Life to None where every step that it took has the reference's digest on every process, else what differs."""
    found: dict[int, str | None] = {}
    for own in home.glob("host-*"):
        reference = dict(_proof(own / "proof--1.jsonl"))
        for path in own.glob("proof-[0-9]*.jsonl"):
            life = int(path.stem.removeprefix("proof-"))
            wrong = [step for step, digest in _proof(path) if reference.get(step) != digest]
            found[life] = found.get(life) or (f"{own.name}: other bits at step {wrong[0]}" if wrong else None)
    return found


def _proof(path: Path) -> list[tuple[int, str]]:
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # what has no newline was being written
    return [(step, digest) for step, digest in map(json.loads, lines)]


def _steps_done(home: Path) -> dict[int, int]:
    done: dict[int, int] = {}
    for path in home.glob("host-*/proof-[0-9]*.jsonl"):
        life = int(path.stem.removeprefix("proof-"))
        done[life] = max([done.get(life, 0), *(step for step, _ in _proof(path))])
    # A life that went back to an older step: what lay above it was lost to the kill before.
    return done


def _committed(lives: dict[int, list[Event]], came_back: int) -> int:
    """The newest step that was reported as committed by all, in the life before or at its start."""
    before = [life for life in sorted(lives) if life < came_back and _began(lives[life])]
    if not before:
        return 0
    steps = [e.step for e in lives[before[-1]] if e.kind == Kind.COMMITTED and e.step is not None]
    return max([*steps, *_began(lives[before[-1]])])


def _resumes(logs: Sequence[Sequence[Event]], lives: dict[int, list[Event]]) -> list[dict[str, float]]:
    """Seconds by phase of every resume whose very next life took a step."""
    first = {life for life, events in lives.items() if _began(events)}
    return [
        {"total": resume.total_s, **{str(phase): seconds for phase, seconds in resume.phases_s.items()}}
        for resume in resumes(logs)
        if resume.attempt + 1 in first
    ]


def _tiers(lives: dict[int, list[Event]]) -> dict[str, int]:
    """How many bytes each tier gave, over all restores and processes."""
    served: Counter[str] = Counter()
    for life in lives.values():
        for event in life:
            if event.kind == Kind.RESTORED:
                served.update(event.fields["sources"])
    return dict(sorted(served.items()))


def _p50_max(values: Sequence[float]) -> dict[str, float] | None:
    return {"p50": float(np.median(values)), "max": float(max(values)), "count": len(values)} if values else None


def _p50_p99(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"p50": round(float(np.percentile(values, 50)), 3), "p99": round(float(np.percentile(values, 99)), 3)}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the account."""
    where = "in networks and mounts of their own" if result["apart"] else "on one shared machine"
    console.print(f"{result['processes']} processes {where}, seed {result['seed']}", markup=False)
    console.print(f"recovered {result['recovered']}/{result['kills']}", markup=False)
    for name in ("lost_steps", "lost_steps_where_the_newest_was_covered"):
        if result[name]:
            p50, most, count = (result[name][key] for key in ("p50", "max", "count"))
            console.print(f"{name.replace('_', ' ')}: p50 {p50:g}, max {most:g} ({count} kills)", markup=False)
    console.print(f"(the bar where the newest committed step was covered: {LOST_BAR})", markup=False)
    table = Table("phase", "p50 s", "p99 s", title=f"{result['resumes']} resumes, kill to first step")
    for phase, seconds in result["resume_s"].items():
        if seconds is not None:
            table.add_row(phase, f"{seconds['p50']:.3f}", f"{seconds['p99']:.3f}")
    console.print(table)
    total = sum(result["tiers"].values()) or 1
    tiers = ", ".join(f"{tier} {size / 1e6:.1f} MB ({size / total:.0%})" for tier, size in result["tiers"].items())
    console.print(f"restored from: {tiers}", markup=False)
    shares = ", ".join(f"{part} {share:.1%}" for part, share in result["time"].items() if share >= 0.001)
    console.print(f"time: {shares}", markup=False)
    for row in result["rows"]:
        if row["why"] is not None:
            console.print(f"NOT RECOVERED {row['kill']}: {row['why']}", markup=False)
    for line in result["unplanned"]:
        console.print(f"UNPLANNED {line}", markup=False)
