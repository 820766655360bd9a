"""The job of two processes whose crash points are enumerated: durable saves with a joined record of the sidecars.

    python -m bench.crash_pair HOME

starts the job and waits for it, so that one recording has the operations of both processes in their order. HOME is a
directory, or in a bucket. Each scene saves below HOME/<scene>. The scene `right` is the code as it is; in the others
one rule of the commit is broken, and the enumeration has to find that. Process 0 notes each step once it is committed:
in a bucket by an object, which all later states have.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp

import ckptkit
from bench.crash_job import small_leaves_shared
from ckptkit.durable import write_part
from ckptkit.durable.sidecars import join_sidecars
from ckptkit.durable.write_part import PartWriter
from ckptkit.durable.write_step import StepWriter
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, WarmStart, Workers
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest
from ckptkit.store import open_store
from ckptkit.store.backends import properties_of
from ckptkit.testing.crash import Notes

PROCESSES = 2
NOTES = "notes"  # in a bucket
RIGHT = "right"
OTHER_RECORD = "other-record"
STEPS = {
    RIGHT: (1, 2, 3),  # the frozen leaf gets files of its own with the second, and the third takes them over
    OTHER_RECORD: (1, 2),
}  # of a scene: one step, unless it is here
_CELL_BYTES = 512
_SIDECAR_1 = f"{paths.SIDECAR_DIR}/{paths.sidecar_name(1)}"


def make_values(step: int) -> dict[str, np.ndarray]:
    """The leaves of a step. `split` is replicated and large, so that both processes write some of its rows."""
    chance = np.random.default_rng([step])
    return {
        "split": chance.standard_normal((64, 16), np.float32),
        "sharded": chance.standard_normal((4, 40), np.float32),
        "small": chance.integers(-100, 100, 7, np.int8),
        "frozen": np.random.default_rng(1).standard_normal((4, 200), np.float32),
    }


def open_manager(root: str, log: ckptkit.EventLog | None = None) -> ckptkit.CheckpointManager:
    """A manager whose only tier is the durable one."""
    return ckptkit.CheckpointManager(
        root,
        options=ocp.CheckpointManagerOptions(save_interval_steps=1),
        events=log,
        processes=ckptkit.ProcessOptions(timeout_s=60),
    )


def save_args(state: Mapping[str, Any]) -> Any:
    """`split` has cells of 512 bytes: a leaf of one cell is never split."""
    limits = {name: ocp.SaveArgs(chunk_byte_size=_CELL_BYTES if name == "split" else None) for name in state}
    return ocp.args.PyTreeSave(dict(state), save_args=limits)  # pyright: ignore[reportCallIssue]


def main() -> None:
    """Runs the job below the directory that is given."""
    home, output = sys.argv[1], list[str]()
    launcher = Launcher(
        Workers(
            [sys.executable, "-m", "bench.crash_pair", home, "{process}", "{coordinator}"],
            processes=PROCESSES,
            devices_per_process=1,
            warm=WarmStart(preload=("jax", "orbax.checkpoint", "ckptkit.manager")),
        ),
        policy=RestartPolicy(restarts=0),
        hooks=Hooks(on_output=lambda process, line: output.append(f"{process}: {line}"), say=output.append),
    )
    if launcher.run() != ExitCode.OK:
        raise SystemExit("\n".join(output[-60:]))


def worker(home: str, process: int, coordinator: str) -> None:
    """One of the processes: every scene, one after the other."""
    jax.distributed.initialize(coordinator, PROCESSES, process)
    say = _noting(home) if process == 0 else lambda _: None
    with small_leaves_shared():
        for scene, broken in SCENES.items():
            with broken():
                _save(f"{home}/{scene}", STEPS.get(scene, (1,)), _promises(scene, say))
    jax.distributed.shutdown()


def _noting(home: str) -> Callable[[str], None]:
    if properties_of(home).file_system:
        return Notes(Path(home)).say
    store, numbers = open_store(f"{home}/{NOTES}"), itertools.count()
    return lambda text: store.put(str(next(numbers)), text.encode())


def _promises(scene: str, say: Callable[[str], None]) -> Callable[[ckptkit.Event], None]:
    def hear(event: ckptkit.Event) -> None:
        if event.kind == ckptkit.Kind.COMMITTED:
            say(json.dumps({"scene": scene, "committed": event.step}))

    return hear


def _save(root: str, steps: tuple[int, ...], hear: Callable[[ckptkit.Event], None]) -> None:
    log = ckptkit.EventLog(process=jax.process_index())
    log.observe(hear)
    with open_manager(root, log) as manager:
        for step in steps:
            assert manager.save(step, args=save_args(_on_the_mesh(make_values(step))))
            manager.wait_until_finished()


def _on_the_mesh(values: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    mesh = jax.make_mesh((PROCESSES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(name: str, value: np.ndarray) -> jax.Array:
        spec = jax.sharding.PartitionSpec(*(("x",) if name in ("sharded", "frozen") else ()))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return {name: put(name, value) for name, value in values.items()}


# The rules that a scene breaks. Each is on both processes.


@contextmanager
def _sidecar_late() -> Iterator[None]:
    """Process 1 writes its sidecar once the step is committed, and process 0 does not ask for it."""
    side_files, write = PartWriter._side_files, StepWriter.write
    kept = dict[str, bytes]()

    def without_sidecar(self: PartWriter, args: Any) -> dict[str, bytes]:
        files = side_files(self, args)
        kept.update({name: files.pop(name) for name in [*files] if name == _SIDECAR_1})
        return files

    def late(self: StepWriter, name: str, *args: Any, **kwargs: Any) -> Any:
        tidy = write(self, name, *args, **kwargs)
        for file, data in kept.items():
            open_store(f"{self._url}/{name}").put(f"default/{file}", data)
        kept.clear()
        return tidy

    with (
        mock.patch.object(PartWriter, "_side_files", without_sidecar),
        mock.patch.object(StepWriter, "write", late),
        mock.patch.object(StepWriter, "_join_sidecars", return_value=None),
    ):
        yield


@contextmanager
def _sidecars_deleted() -> Iterator[None]:
    """Process 0 deletes the sidecars that it has joined."""
    join = StepWriter._join_sidecars

    def joined(self: StepWriter, place: str, item: str, profile: Any) -> None:
        join(self, place, item, profile)
        open_store(place).delete(f"{item}/{_SIDECAR_1}")

    with mock.patch.object(StepWriter, "_join_sidecars", joined):
        yield


@contextmanager
def _sidecar_not_synced() -> Iterator[None]:
    """Nobody syncs the bytes of process 1's sidecar before the commit."""
    sync = write_part.sync
    with mock.patch.object(write_part, "sync", lambda path: None if path.endswith(_SIDECAR_1) else sync(path)):
        yield


@contextmanager
def _sidecar_left_to_process_0() -> Iterator[None]:
    """Process 1 leaves it to process 0 to sync its sidecar. On a file system that hosts share nobody does."""
    sync = write_part.sync

    def synced(path: str) -> None:
        if jax.process_index() == 0 or not path.endswith(_SIDECAR_1):
            sync(path)

    with mock.patch.object(write_part, "sync", synced):
        yield


@contextmanager
def _other_record() -> Iterator[None]:
    """The joined record is that of another save of the step, with the bits of the step before it."""
    join = StepWriter._join_sidecars

    def joined(self: StepWriter, place: str, item: str, profile: Any) -> None:
        join(self, place, item, profile)
        here, before = open_store(place), open_store(f"{self._url}/{STEPS[OTHER_RECORD][0]}")
        keys = [f"{item}/{paths.SIDECAR_DIR}/{paths.sidecar_name(process)}" for process in range(PROCESSES)]
        own = Manifest.from_bytes(here.get(keys[0]), path=place).save_id
        if own.step == STEPS[OTHER_RECORD][0]:
            return
        other = replace(own, number=own.number + 1)
        texts = [replace(Manifest.from_bytes(before.get(key), path=key), save_id=other).to_bytes() for key in keys]
        record = join_sidecars(texts)
        assert record is not None
        here.put(f"{item}/{paths.JOINED_SIDECARS}", record)

    with mock.patch.object(StepWriter, "_join_sidecars", joined):
        yield


SCENES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    RIGHT: nullcontext,
    "sidecar-late": _sidecar_late,
    "sidecars-deleted": _sidecars_deleted,
    "sidecar-not-synced": _sidecar_not_synced,
    "sidecar-left-to-process-0": _sidecar_left_to_process_0,
    OTHER_RECORD: _other_record,
}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main()
    else:
        worker(sys.argv[1], int(sys.argv[2]), sys.argv[3])
