"""`python -m bench crashpoints`: a crash after every storage operation of a run, and what a restart makes of it.

One run of saves, flushes, prunes, a rollback, a deletion and a repair is recorded as the kernel saw it. For each
operation the tree that a crash would leave is made again, and a new manager restores from it: from all tiers, and
from each alone. Judged by the promises to the run (`crash_oracle`), not by ckptkit's own reports.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.environment import environment, store_result
from ckptkit.testing.crash import (
    CrashState,
    Note,
    Operation,
    Trace,
    can_trace,
    is_operation,
    notes,
    power_failures,
    process_crashes,
    record,
)

SHORT_POINTS = {"direct": 2, "mapping": 1}  # of each tier and operation, without --full
SHORT_STATES = 12  # of a power failure at such a point
MARKED = "mapping"  # of two runs, the one whose durable steps are committed by a mark
METHODS = ("direct", MARKED)  # how a disk slot is written
TIERS = ("ram", "ssd", "durable")
_JUDGED = {"direct": ("ram", "ssd", "durable"), MARKED: ("ssd", "mount")}  # rows of each run
IN_WORKER = "CKPTKIT_BENCH_WORKER"
_PRUNED = re.compile(r"(ram|ssd)/.*/step-[^/]*\.json|durable/([0-9]+|_ckptkit/leaving)/.*")


@click.command(context_settings={"max_content_width": 120})
@click.option("--full", is_flag=True, help="Every point; without it a few of each tier and operation.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of samples, where there are too many subsets.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Counts and violations.")
def main(full: bool, seed: int, json_path: Path | None) -> None:
    """Crashes a run after each of its storage operations, and restarts it."""
    if not can_trace():
        raise click.ClickException("strace is not there or may not trace; install it (make setup-system)")
    if IN_WORKER not in os.environ:
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", IN_WORKER: "1"}
        command = [sys.executable, "-m", "bench", "crashpoints", "--seed", str(seed), *(["--full"] if full else [])]
        if json_path is not None:
            command += ["--json", str(json_path.absolute())]
        raise SystemExit(subprocess.run(command, env=environ, cwd=Path(__file__).parent.parent).returncode)
    from bench.crash_job import small_leaves_shared

    logging.disable(logging.CRITICAL)  # what a restart finds is an error to those who log
    with tempfile.TemporaryDirectory(prefix="ckptkit-crashpoints-") as home, small_leaves_shared():
        result = {"benchmark": "crashpoints", "environment": environment(), "seed": seed, "full": full}
        result |= campaign(Path(home), full, seed)
    show(result, Console())
    store_result(result, json_path)
    raise SystemExit(0 if held(result) else 1)


def campaign(home: Path, full: bool, seed: int) -> dict[str, Any]:
    """Every point (or a few of each kind) of one run per method; rows are `tier operation`."""
    from bench.crash_job import committed_by_marks
    from bench.crash_judge import Judge
    from bench.crash_pair_judge import checked, controls_found, record_pair

    rows: dict[str, Counter[str]] = {}
    violations: list[dict[str, Any]] = []
    control = 0
    for method in METHODS:
        root = home / method / "run"
        trace = record_run(root, method)
        judge = Judge(root, trace)
        control += len(without_syncs(root, trace)) if method == METHODS[0] else 0
        chance = random.Random(seed)
        labels = {number: label for number, label in points(trace, method) if label.startswith(_JUDGED[method])}
        chosen = list(labels) if full else few(labels, SHORT_POINTS[method], chance)
        with committed_by_marks(method == MARKED):
            for done, number in enumerate(chosen):
                row = rows.setdefault(labels[number], Counter())
                row["points"] += 1
                for state, views in states(trace, number, labels[number], full, chance):
                    row["states"] += 1
                    before = judge.restarts
                    for wrong in judge.check(state, views):
                        row["violations"] += 1
                        operation = trace.operations[number]
                        after = f"{method}: {number} {operation.call} {operation.path}"
                        violations.append({"after": after, "state": str(state), "violation": wrong})
                    row["restarts"] += judge.restarts - before
                _say(method, done + 1, len(chosen))
    for name, after, wrong, restarts in bucket_points(home / "bucket", full, random.Random(seed)):
        rows.setdefault(name, Counter()).update(points=1, states=1, restarts=restarts, violations=len(wrong))
        violations += [{"after": after, "state": "", "violation": each} for each in wrong]
    trace = record_pair(home / "pair" / "run")
    for name, number, found, restarts in checked(trace, home / "pair" / "at", full=full, chance=random.Random(seed)):
        wrong_in = [(str(state), each) for state, every in found for each in every]
        rows.setdefault(name, Counter()).update(
            points=1, states=len(found), restarts=restarts, violations=len(wrong_in)
        )
        after = f"pair: {number} {trace.operations[number].call} {trace.operations[number].path}"
        violations += [{"after": after, "state": state, "violation": each} for state, each in wrong_in]
        _say("pair", number + 1, len(trace.operations))
    return {
        "rows": {name: dict(row) for name, row in sorted(rows.items())},
        "violations": violations,
        "control": control,
        "pair_controls": controls_found(trace, home / "pair" / "at"),
    }


def record_run(root: Path, method: str) -> Trace:
    """The run of `crash_job`, recorded."""
    for tier in TIERS:
        (root / tier).mkdir(parents=True)
    return record([sys.executable, "-m", "bench.crash_job", str(root), method], root)


def without_syncs(root: Path, trace: Trace) -> list[str]:
    """The control: what is wrong when nothing of the newest flush to the disk was synced. Something has to be."""
    from bench.crash_judge import Judge

    newest = [number for number, text in notes(trace) if json.loads(text).get("committed", [""])[0] == "ssd"][-1]
    lost = frozenset(number for number in range(newest) if trace.operations[number].path.startswith("ssd/"))
    return Judge(root, trace).check(CrashState(count=newest + 1, dropped=lost), ("ssd",))


def points(trace: Trace, method: str) -> Iterator[tuple[int, str]]:
    """Every storage operation of the run, by `tier operation`; damage that the run did to itself is none. The durable
    tier of a run with marks is the tier `mount`."""
    scene, durable = "", "mount" if method == MARKED else "durable"
    for number, operation in enumerate(trace.operations):
        if isinstance(operation.effect, Note):
            scene = json.loads(operation.effect.text).get("scene", scene)
            if "committed" not in operation.effect.text:
                continue
            tier = json.loads(operation.effect.text)["committed"][0]  # right after a promise, before what follows it
            what = "save" if tier == "ram" and scene == "save" else "flush" if scene == "save" else scene
            yield number, f"{durable if tier == 'durable' else tier} {what}"
        elif is_operation(operation) and scene != "damage":
            tier = operation.path.partition("/")[0]
            yield number, f"{durable if tier == 'durable' else tier} {_what(operation, tier, scene)}"


def bucket_points(home: Path, full: bool, chance: random.Random) -> Iterator[tuple[str, str, list[str], int]]:
    """Each request that changed the bucket: its row, its name, what is wrong after it, and how many were asked."""
    from bench.crash_bucket import BucketJudge, bucket, label, record_bucket, scene_at

    home.mkdir(parents=True)
    with bucket(home):
        history = record_bucket(home / "run")
        judge = BucketJudge(home, history)
        scenes = {number: scene_at(history.notes, number) for number in range(len(history.states))}
        labels = {n: label(history.states[n][0], scene) for n, scene in scenes.items() if scene != "damage"}
        chosen = list(labels) if full else few(labels, 1, chance)
        for done, number in enumerate(chosen):
            wrong, asked = judge.check(number, repairs=scenes[number] == "repair")
            yield labels[number], f"request {number}: {history.states[number][0]}", wrong, asked
            _say("bucket", done + 1, len(chosen))


def few(labels: Mapping[int, str], count: int, chance: random.Random) -> list[int]:
    """So many of each kind: the last, and some before it."""
    by_label: dict[str, list[int]] = {}
    for number, label in labels.items():
        by_label.setdefault(label, []).append(number)
    few: set[int] = set()
    for numbers in by_label.values():
        few |= {numbers[-1], *chance.sample(numbers, min(len(numbers), count - 1))}
    return sorted(few)


def states(
    trace: Trace, number: int, label: str, full: bool, chance: random.Random
) -> Iterator[tuple[CrashState, tuple[str, ...]]]:
    """The possible leftovers of a crash at a point, and the tiers to test. A ramdisk does not outlive its host's power,
    and Orbax's files are not synced, so a power failure is tested for the disk tier alone."""
    own = label.partition(" ")[0].replace("mount", "durable")
    for state in process_crashes(trace, number):
        yield state, ("all", *TIERS) if full else ("all", own)
    if label.startswith("ssd"):
        lost = list(power_failures(trace, number, lambda each: each.path.startswith("ssd/"), chance))
        if not full:  # everything unsynced lost, and some others
            most = max(lost, key=lambda state: len(state.dropped))
            lost = [most, *chance.sample(lost, min(len(lost), SHORT_STATES - 1))]
        yield from ((state, ("ssd",)) for state in lost)


def _what(operation: Operation, tier: str, scene: str) -> str:
    if scene == "save" and operation.call in ("unlink", "rmdir") and _PRUNED.fullmatch(operation.path):
        return "prune"
    if scene == "save":
        return "save" if tier == "ram" else "flush"
    return scene


def _say(what: str, done: int, count: int) -> None:
    if done % 50 == 0 or done == count:
        print(f"{what}: {done} of {count} points", file=sys.stderr)


def _outcomes(result: dict[str, Any]) -> str:
    controls = result.get("pair_controls", {}).items()
    return ", ".join(f"{name} ({'found' if found else 'NOT FOUND'})" for name, found in controls)


def held(result: dict[str, Any]) -> bool:
    """Whether nothing was violated, by a campaign that can find violations."""
    found = result["control"] > 0 and all(result.get("pair_controls", {}).values())
    return not result["violations"] and found


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the table."""
    if not console.is_terminal:
        console.width = 150
    table = Table(title=f"a crash after each storage operation, seed {result['seed']}")
    columns = ("points", "states", "restarts", "violations")
    for name in ("tier", "operation"):
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    total: Counter[str] = Counter()
    for label, row in result["rows"].items():
        total.update(row)
        table.add_row(*label.split(" ", 1), *(str(row.get(name, 0)) for name in columns))
    table.add_section()
    table.add_row("all", "", *(str(total[name]) for name in columns))
    console.print(table)
    console.print(
        "points: operations of the run (write, sync, create, link, rename, unlink, ...). states: what a crash there "
        "may leave: the last write torn, on the disk tier any of what was not synced missing.\n"
        "restarts: new managers that were asked, once for each different tree. violation: a committed step lost, other "
        "bits, or a commit that names what is not there.\n"
        f"control: without the syncs of the disk tier {result['control']} violations are found, and some have to be.\n"
        f"pair: a job of two processes. Rules that it broke, each of which has to be found: {_outcomes(result)}."
    )
    for each in result["violations"][:20]:
        console.print(f"violation after {each['after']}: {each['violation']}\n  {each['state']}", markup=False)
