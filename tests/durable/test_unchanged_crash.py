"""Every crash point of saves whose steps share data files, and of the deletion of the steps before them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from bench.crash_bucket import History, Replayed
from ckptkit.durable.cells import unchanged
from ckptkit.testing.bucket import BucketServer
from ckptkit.testing.crash import CrashState, Notes, is_operation, notes, record, unsynced
from tests.strace import needs_strace

_ATTEMPTS = ((1, 2), (3, 4))  # the first two saves write everything; 3 takes over what another process has recorded
_FROM = 2  # crashes after this step
_RESTORED_EVERY = 12  # states: the others are only proven
_CONTINUED = 9


def _state(step: int) -> dict[str, Any]:
    frozen = np.random.default_rng(1).standard_normal(700)
    return {"frozen": jnp.asarray(frozen, jnp.float32), "adapter": jnp.full(300, float(step))}


def _open(root: str) -> Any:
    options = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=1)
    return ckptkit.CheckpointManager(root, options=options)


def run(root: str, report: Callable[[int], None]) -> None:
    """Saves, with a manager for each attempt; `report` gets each step once it is committed."""
    for steps in _ATTEMPTS:
        with _open(root) as manager:
            for step in steps:
                manager.save(step, args=ocp.args.StandardSave(_state(step)))  # pyright: ignore[reportCallIssue]
                manager.wait_until_finished()
                report(step)


@pytest.fixture(autouse=True)
def small_leaves_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen leaf of 3 kB is in a data file of its own."""
    monkeypatch.setattr(unchanged, "LEAF_BYTES_MIN", 1)
    monkeypatch.setattr(unchanged, "GROUP_BYTES_MIN", 1)


class Judge:
    """The files after a crash are proven, and as new as promised. Some states are restored, and the run continues."""

    def __init__(self) -> None:
        self.states = self.restored = 0

    def check(self, root: str, promised: int, where: str) -> None:
        """Asserts it of the files, or objects, that are below `root` now."""
        steps = {each.step: each.state for each in ckptkit.verify(root).steps if each.state != "incomplete"}
        assert set(steps.values()) == {"proven"}, (where, steps)
        assert max(steps) >= promised, (where, steps)
        self.states += 1
        if self.states % _RESTORED_EVERY:
            return
        self.restored += 1
        with _open(root) as manager:
            found = manager.restore(None)
            assert found["adapter"].tobytes() == _state(max(steps))["adapter"].tobytes(), where
            assert found["frozen"].tobytes() == _state(max(steps))["frozen"].tobytes(), where
            manager.save(_CONTINUED, args=ocp.args.StandardSave(_state(_CONTINUED)))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
        assert {each.state for each in ckptkit.verify(root).steps} == {"proven"}, where


@pytest.mark.long
@needs_strace
def test_crash_on_a_disk_keeps_every_promised_step(tmp_path: Path) -> None:
    """A link, a sidecar or a root whose name is not synced, or a deletion that takes a shared file along, would lose a
    committed step."""
    root = tmp_path / "run"
    root.mkdir()
    trace = record([sys.executable, "-m", __name__, str(root)], root)
    said = [(number, int(text)) for number, text in notes(trace)]
    begins = next(number for number, step in said if step == _FROM)
    linked = [each for each in trace.operations[begins:] if each.call.startswith("link") and "unchanged." in each.path]
    assert len(linked) == 2, "both later steps take a file over"
    judge, seen, at = Judge(), set[tuple[str, int]](), tmp_path / "at"
    for number in range(begins, len(trace.operations)):
        if not is_operation(trace.operations[number]):
            continue
        promised = max(step for before, step in said if before <= number)
        lost = frozenset(unsynced(trace, number + 1, lambda _: True))
        for state in (CrashState(count=number + 1), CrashState(count=number + 1, dropped=lost)):
            disk = state.disk(trace)
            if (key := (disk.digest(), promised)) not in seen:
                seen.add(key)
                disk.materialise(at)
                judge.check(str(at / "durable"), promised, f"{trace.operations[number]} {state}")
    assert judge.restored >= 2, judge.states


@pytest.mark.long
def test_crash_in_a_bucket_keeps_every_promised_step(server: BucketServer) -> None:
    """A step whose objects are not all copied yet would count as committed, or a deletion take a copy along."""
    history = History()
    with history.watch():
        run("gs://runs/run", lambda step: history.say(str(step)))
    said = [(count, int(text)) for count, text in history.notes]
    begins = next(count for count, step in said if step == _FROM)
    copied = [name for name, _ in history.states[begins:] if name.startswith("copy ") and "/unchanged." in name]
    assert len(copied) == 2, "both later steps take an object over"
    judge, replayed = Judge(), Replayed()
    assert any(name.startswith("delete run/2/") for name, _ in history.states[begins:])
    for number in range(begins, len(history.states)):
        promised = max(step for count, step in said if count <= number + 1)
        replayed.set_to(history.states[number][1])
        judge.check("gs://runs/run", promised, history.states[number][0])
    assert judge.restored >= 2, judge.states


if __name__ == "__main__":
    unchanged.LEAF_BYTES_MIN = unchanged.GROUP_BYTES_MIN = 1
    told = Notes(Path(sys.argv[1]).resolve())
    run(f"{sys.argv[1]}/durable", lambda step: told.say(str(step)))
