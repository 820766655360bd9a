"""The crash points of the job of two processes (`crash_pair`) on a disk: every state of them, and the broken rules."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import final, get_args

from bench.crash_pair import OTHER_RECORD, RIGHT, SCENES
from bench.crash_pair_judge import Restarts, any_record_believed
from bench.crashpoints import few
from ckptkit.model import paths
from ckptkit.testing.crash import (
    CrashState,
    Note,
    Syncs,
    Trace,
    is_operation,
    notes,
    power_failures,
    process_crashes,
    record,
    unsynced,
)

SHORT_POINTS = 10  # of each row


def record_pair(root: Path) -> Trace:
    """Every scene of the job, recorded: both processes in one trace."""
    root.mkdir(parents=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return record([sys.executable, "-m", "bench.crash_pair", str(root)], root, env=environment)


def points_of(trace: Trace, scene: str) -> list[int]:
    """The storage operations of both processes in a scene, and its promises: a restart has to find more after one."""
    found = []
    for number, operation in enumerate(trace.operations):
        if isinstance(operation.effect, Note):
            if json.loads(operation.effect.text)["scene"] == scene:
                found.append(number)
        elif is_operation(operation) and operation.path.partition("/")[0] == scene:
            found.append(number)
    return found


def stages(trace: Trace) -> dict[int, str]:
    """The points of the scene `right`, each with its stage: before the first save, while both processes write their
    parts, or from the merge of these to the promise."""
    stage, found = "start", dict[int, str]()
    for number in points_of(trace, RIGHT):
        call, path = trace.operations[number].call, trace.operations[number].path
        if call == "mkdir" and paths.TEMPORARY in path.rpartition("/")[2]:
            stage = "parts"
        elif call == "mkdir" and path.endswith("/default/d"):
            stage = "commit"
        found[number] = stage
    return found


def main_states(trace: Trace, scene: str, number: int) -> Iterator[CrashState]:
    """After a point: everything is there, or nothing that was not synced; or not by the process that did it."""
    yield CrashState(count=number + 1)
    for syncs in get_args(Syncs):
        lost = unsynced(trace, number + 1, lambda each: each.path.partition("/")[0] == scene, syncs=syncs)
        yield CrashState(count=number + 1, dropped=frozenset(lost))


def all_states(trace: Trace, scene: str, number: int, chance: random.Random) -> Iterator[CrashState]:
    """After a point: every state of processes that die there, and of a power failure, of one host or of two."""
    yield from process_crashes(trace, number)
    for syncs in get_args(Syncs):
        yield from power_failures(trace, number, lambda each: each.path.partition("/")[0] == scene, chance, syncs=syncs)


def checked(
    trace: Trace, at: Path, *, full: bool, chance: random.Random
) -> Iterator[tuple[str, int, list[tuple[CrashState, list[str]]], int]]:
    """Each point that has to hold: its row, its number, what is wrong in each state, and how many restarts were asked.
    Without `full`, a few points of each row, and the main states of each."""
    others = dict.fromkeys(points_of(trace, OTHER_RECORD), "other record")
    for scene, labels in ((RIGHT, stages(trace)), (OTHER_RECORD, others)):
        judge = PairJudge(trace, scene, at)
        for number in labels if full else few(labels, SHORT_POINTS, chance):
            before = judge.restarts
            every = full and scene == RIGHT
            states = all_states(trace, scene, number, chance) if every else main_states(trace, scene, number)
            found = [(state, judge.check(state)) for state in states]
            yield f"pair {labels[number]}", number, found, judge.restarts - before


def controls_found(trace: Trace, at: Path) -> dict[str, str]:
    """The violation that shows each broken rule, or nothing. The last one is a rule of the reader."""
    found = {scene: _violation(trace, scene, at) for scene in SCENES if scene not in (RIGHT, OTHER_RECORD)}
    with any_record_believed():
        found[f"{OTHER_RECORD}-believed"] = _violation(trace, OTHER_RECORD, at)
    return found


def _violation(trace: Trace, scene: str, at: Path) -> str:
    judge = PairJudge(trace, scene, at)
    newest_first = reversed(points_of(trace, scene))
    states = (state for number in newest_first for state in main_states(trace, scene, number))
    return next((wrong for state in states for wrong in judge.check(state)), "")


@final
class PairJudge:
    """Puts states of a scene back below `at`, and asks restarts."""

    def __init__(self, trace: Trace, scene: str, at: Path):
        self._trace, self._scene, self._at = trace, scene, at
        said = [(number, json.loads(text)) for number, text in notes(trace)]
        self._promises = [(number, note["committed"]) for number, note in said if note["scene"] == scene]
        self._restarts = Restarts(str(at / scene))

    @property
    def restarts(self) -> int:
        """How many were asked."""
        return self._restarts.count

    def check(self, state: CrashState) -> list[str]:
        """The violations of this state."""
        promised = {step for number, step in self._promises if number < state.count}
        disk = state.disk(self._trace)
        return self._restarts.check(
            disk.digest([self._scene]),
            promised,
            lambda: disk.materialise(self._at, [self._scene]),
            lambda step: disk.digest([f"{self._scene}/{step}"]),
        )
