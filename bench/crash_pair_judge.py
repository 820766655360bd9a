"""The crash points of the job of two processes (`crash_pair`): every state of them, and what a restart makes of each.

The restart is one process. It has only the files of the state, and is judged by what process 0 had noted as committed.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from bench.crash_pair import OTHER_RECORD, RIGHT, SCENES, make_values, open_manager, save_args
from bench.crashpoints import few
from ckptkit.durable.read_step import DurableReader
from ckptkit.durable.sidecars import split_sidecars
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest
from ckptkit.store import open_store
from ckptkit.testing.crash import (
    CrashState,
    Disk,
    Note,
    Trace,
    is_operation,
    notes,
    power_failures,
    process_crashes,
    record,
    unsynced,
)

SHORT_POINTS = 10  # of each row
CONTINUED_EVERY = 20  # distinct states: the run goes on from them, and stock Orbax reads them
_CONTINUED = 9


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


def two_states(trace: Trace, scene: str, number: int) -> Iterator[CrashState]:
    """After a point: everything is there, or nothing that was not synced."""
    lost = unsynced(trace, number + 1, lambda each: each.path.partition("/")[0] == scene)
    yield CrashState(count=number + 1)
    yield CrashState(count=number + 1, dropped=frozenset(lost))


def all_states(trace: Trace, scene: str, number: int, chance: random.Random) -> Iterator[CrashState]:
    """After a point: every state of processes that die there, and of a power failure."""
    yield from process_crashes(trace, number)
    yield from power_failures(trace, number, lambda each: each.path.partition("/")[0] == scene, chance)


def checked(
    trace: Trace, at: Path, *, full: bool, chance: random.Random
) -> Iterator[tuple[str, int, list[tuple[CrashState, list[str]]], int]]:
    """Each point that has to hold: its row, its number, what is wrong in each state, and how many restarts were asked.
    Without `full`, a few points of each row, and two states of each."""
    others = dict.fromkeys(points_of(trace, OTHER_RECORD), "other record")
    for scene, labels in ((RIGHT, stages(trace)), (OTHER_RECORD, others)):
        judge = PairJudge(trace, scene, at)
        for number in labels if full else few(labels, SHORT_POINTS, chance):
            before = judge.restarts
            every = full and scene == RIGHT
            states = all_states(trace, scene, number, chance) if every else two_states(trace, scene, number)
            found = [(state, judge.check(state)) for state in states]
            yield f"pair {labels[number]}", number, found, judge.restarts - before


def controls_found(trace: Trace, at: Path) -> dict[str, bool]:
    """Whether the enumeration finds each broken rule: the last one is a rule of the reader."""
    found = {scene: _is_found(trace, scene, at) for scene in SCENES if scene not in (RIGHT, OTHER_RECORD)}
    with mock.patch.object(DurableReader, "_joined", _believed):
        found[f"{OTHER_RECORD}-believed"] = _is_found(trace, OTHER_RECORD, at)
    return found


def _is_found(trace: Trace, scene: str, at: Path) -> bool:
    judge = PairJudge(trace, scene, at)
    newest_first = reversed(points_of(trace, scene))
    states = (state for number in newest_first for state in two_states(trace, scene, number))
    return any(judge.check(state) for state in states)


def _believed(self: DurableReader, item: str, first: Manifest) -> dict[int, Manifest]:
    """The joined record, of whatever save."""
    del first
    texts = split_sidecars(open_store(self.url).get(f"{item}/{paths.JOINED_SIDECARS}"))
    return {process: Manifest.from_bytes(text, path=item) for process, text in enumerate(texts)}


@final
class PairJudge:
    """Asks a restart about each distinct state of a scene, once."""

    def __init__(self, trace: Trace, scene: str, at: Path):
        self._trace, self._scene, self._at = trace, scene, at
        said = [(number, json.loads(text)) for number, text in notes(trace)]
        self._promises = [(number, note["committed"]) for number, note in said if note["scene"] == scene]
        self._known: dict[tuple[str, int], list[str]] = {}
        self._right = set[str]()  # digests of steps that were restored
        self.restarts = self.continued = 0

    def check(self, state: CrashState) -> list[str]:
        """The violations of this state: each listed step has to be whole, and each promised step listed."""
        promised = {step for number, step in self._promises if number < state.count}
        disk = state.disk(self._trace)
        key = disk.digest([self._scene]), len(promised)
        if key not in self._known:
            disk.materialise(self._at, [self._scene])
            self.restarts += 1
            try:
                self._known[key] = list(self._ask(disk, promised))
            except Exception as error:  # noqa: BLE001  whatever a restart dies of is a violation, and is printed
                self._known[key] = [f"{type(error).__name__}: {error}"]
        return self._known[key]

    def _ask(self, disk: Disk, promised: set[int]) -> Iterator[str]:
        root = str(self._at / self._scene)
        proofs = _listed(root)
        yield from (f"step {step} is {each.state}: {each}" for step, each in proofs.items() if each.state != "proven")
        if lost := promised - proofs.keys():
            yield f"promised and not there: {sorted(lost)}"
        with open_manager(root) as manager:
            if sorted(manager.all_steps()) != sorted(proofs):
                yield f"the manager lists {sorted(manager.all_steps())}, verify {sorted(proofs)}"
            for step in sorted(proofs):
                yield from self._restored(manager, disk, step)
            if proofs and not self.restarts % CONTINUED_EVERY:
                self.continued += 1
                yield from _by_orbax(root, proofs)
                manager.save(_CONTINUED, args=save_args(jax.tree.map(jnp.asarray, make_values(_CONTINUED))))
                manager.wait_until_finished()
                yield from _differences(manager.restore(None, args=_restore_args()), _CONTINUED)

    def _restored(self, manager: ckptkit.CheckpointManager, disk: Disk, step: int) -> Iterator[str]:
        """A step that was restored in another state, with the same files, is not restored again."""
        if (digest := disk.digest([f"{self._scene}/{step}"])) not in self._right:
            wrong = list(_differences(manager.restore(step, args=_restore_args()), step))
            yield from wrong
            self._right.update(() if wrong else (digest,))


def _listed(root: str) -> dict[int, Any]:
    """The verdict on each step that is listed; `verify` raises where there is nothing at all."""
    with suppress(ckptkit.StepNotFoundError):
        return {each.step: each for each in ckptkit.verify(root).steps if each.state != "incomplete"}
    return {}


def _by_orbax(root: str, steps: Iterable[int]) -> Iterator[str]:
    args = _restore_args(restore_args=ocp.checkpoint_utils.construct_restore_args(_target()))
    with ocp.CheckpointManager(root) as stock:
        for step in sorted(steps):
            found = stock.restore(step, args=args)
            yield from (f"by stock Orbax: {each}" for each in _differences(found, step))


def _restore_args(**more: Any) -> Any:
    return ocp.args.PyTreeRestore(_target(), **more)  # pyright: ignore[reportCallIssue]


def _target() -> dict[str, jax.ShapeDtypeStruct]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    values = make_values(0).items()
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=here) for name, value in values}


def _differences(found: Any, step: int) -> Iterator[str]:
    for name, value in make_values(step).items():
        if np.asarray(found[name]).tobytes() != value.tobytes():
            yield f"step {step}: {name} was restored with other bits"
