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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

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


@final
class Tally:
    """The counts of each row (`tier operation`), and every violation."""

    def __init__(self) -> None:
        self.rows: dict[str, Counter[str]] = {}
        self.violations: list[dict[str, Any]] = []

    def add(self, row: str, after: str, found: Iterable[tuple[object, list[str]]], restarts: int) -> None:
        """One point: what is wrong in each of its states."""
        self.rows.setdefault(row, Counter()).update(points=1, restarts=restarts, states=0, violations=0)
        for state, wrong in found:
            self.rows[row].update(states=1, violations=len(wrong))
            self.violations += [{"after": after, "state": str(state), "violation": each} for each in wrong]


def campaign(home: Path, full: bool, seed: int) -> dict[str, Any]:
    """Every point (or a few of each kind) of one run per method; if `full`, of a job of two processes too, whose short
    version is `tests/durable/test_joined_crash.py`."""
    tally, control = Tally(), 0
    for method in METHODS:
        control += _run(home, method, full, seed, tally)
    for row, after, wrong, restarts in bucket_points(home / "bucket", full, random.Random(seed)):
        tally.add(row, after, [("", wrong)], restarts)
    pair_controls = pair_campaign(home / "pair", seed, tally) if full else {}
    return {
        "rows": {name: dict(row) for name, row in sorted(tally.rows.items())},
        "violations": tally.violations,
        "control": control,
        "pair_controls": {name: bool(wrong) for name, wrong in pair_controls.items()},
    }


def _run(home: Path, method: str, full: bool, seed: int, tally: Tally) -> int:
    """The run of one method. Returns how much its control has found: the first method has one."""
    from bench.crash_job import committed_by_marks
    from bench.crash_judge import Judge

    root, chance = home / method / "run", random.Random(seed)
    trace = record_run(root, method)
    judge = Judge(root, trace)
    control = len(without_syncs(root, trace)) if method == METHODS[0] else 0
    labels = {number: label for number, label in points(trace, method) if label.startswith(_JUDGED[method])}
    chosen = list(labels) if full else few(labels, SHORT_POINTS[method], chance)
    with committed_by_marks(method == MARKED):
        for done, number in enumerate(chosen):
            before = judge.restarts
            each_state = states(trace, number, labels[number], full, chance)
            found = [(state, judge.check(state, views)) for state, views in each_state]
            tally.add(labels[number], _name(method, trace, number), found, judge.restarts - before)
            _say(method, done + 1, len(chosen))
    return control


def pair_campaign(home: Path, seed: int, tally: Tally) -> dict[str, str]:
    """Every point of a job of two processes, on a disk and in a bucket. Returns the violation that each control has
    found."""
    from bench.crash_bucket import bucket
    from bench.crash_pair_bucket import checked_in_bucket, controls_found_in_bucket, record_pair_in_bucket
    from bench.crash_pair_disk import checked, controls_found, record_pair

    trace = record_pair(home / "run")
    for row, number, found, restarts in checked(trace, home / "at", full=True, chance=random.Random(seed)):
        tally.add(row, _name("pair", trace, number), found, restarts)
        _say("pair", number + 1, len(trace.operations))
    controls = controls_found(trace, home / "at")
    with bucket(home):
        history = record_pair_in_bucket()
        for row, after, wrong, restarts in checked_in_bucket(history, full=True, chance=random.Random(seed)):
            tally.add(row, after, [("", wrong)], restarts)
        return controls | controls_found_in_bucket(history)


def _name(run: str, trace: Trace, number: int) -> str:
    return f"{run}: {number} {trace.operations[number].call} {trace.operations[number].path}"


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
    return ", ".join(f"{name} ({'found' if found else 'NOT FOUND'})" for name, found in result["pair_controls"].items())


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
        f"control: without the syncs of the disk tier {result['control']} violations are found, and some have to be."
    )
    if result.get("pair_controls"):
        console.print(f"pair: a job of two processes. Each rule that it broke has to be found: {_outcomes(result)}.")
    for each in result["violations"][:20]:
        console.print(f"violation after {each['after']}: {each['violation']}\n  {each['state']}", markup=False)
