"""One of four processes: the cases of Orbax's own tests of its emergency manager, for ours (`test_orbax_cases.py`).

    python -m tests.emergency.orbax_cases PROCESS PORT DIR [CASE...]

Prints a JSON object at its end: the error of each case that failed here. The cases are those of Orbax 0.12.8's
`checkpoint_manager_test.py` and `single_slice_checkpoint_manager_test.py`: two slices of two hosts with two devices
each, and one slice. They are in our words, and ask nothing of Orbax's private names. Its tests of helpers
(`_global_max`, swapped meshes) have nothing to ask of another manager.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckptkit import emergency

ARGS: Any = ocp.args
AXES = {0: ("replica", "data"), 1: ("data", "replica")}  # by `replica_axis_index`


@dataclasses.dataclass(frozen=True)
class Job:
    """Where a case saves, and on which mesh."""

    root: Path
    mesh: Mesh
    axis: int = 0

    @property
    def local(self) -> Path:
        """This process's own directory."""
        path = self.root / f"local-{jax.process_index()}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def state(self, factor: int = 1) -> dict[str, Any]:
        """A replicated, a sharded and a scalar leaf, and an empty node."""

        def placed(value: Any, *spec: str) -> jax.Array:
            host = np.asarray(value) * factor
            sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return {"a": placed(np.arange(8)), "b": placed(np.arange(16), "data"), "scalar": placed(123), "empty": {}}

    def manager(
        self, local: tuple[Any, int | None], persistent: tuple[Any, int | None], **more: Any
    ) -> emergency.CheckpointManager:
        """`local` and `persistent`: an interval or a function that decides, and `max_to_keep`."""
        into = {name: more.pop(name) for name in ("persistent_non_replicated_directory",) if name in more}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state())
        options = emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(**_when(*local)),
            persistent=emergency.PersistentCheckpointOptions(
                **_when(*persistent), keep_period=more.pop("keep_period", None)
            ),
            replica_axis_index=self.axis,
            multiprocessing_options=emergency.MultiprocessingOptions(coordination_timeout_secs=30),
            **more,
        )
        host = f"host-{jax.process_index()}"
        where = self.root / "persistent"
        return emergency.CheckpointManager(self.local, where, self.mesh, shapes, options=options, host_id=host, **into)

    def train(self, manager: emergency.CheckpointManager, steps: Sequence[int], *, factor: int = 1) -> None:
        """Saves each of `steps`, and waits until it is in its tiers."""
        for step in steps:
            self.save(manager, step, factor=factor)
            manager.wait_until_finished()

    def save(self, manager: emergency.CheckpointManager, step: int, *, factor: int = 1) -> None:
        """Saves, and does not wait."""
        manager.save(step, args=ARGS.Composite(state=ARGS.PyTreeSave(self.state(factor))))

    def lose_local(self, *, here: bool = True) -> None:
        """Empties the local directory of this process, if `here`; all processes wait for each other."""
        if here:
            shutil.rmtree(self.local)
        assert self.local.is_dir()
        multihost_utils.sync_global_devices("local directories are as they shall be")

    def check(self, found: Any, *, factor: int = 1) -> None:
        """`found` has the bits of `state(factor)`."""
        for (path, expected), (_, leaf) in zip(
            *map(jax.tree.leaves_with_path, (self.state(factor), found)), strict=True
        ):
            for left, right in zip(expected.addressable_shards, leaf.addressable_shards, strict=True):
                assert np.array_equal(left.data, right.data), jax.tree_util.keystr(path)


def _when(when: Any, keep: int | None) -> dict[str, Any]:
    return {"should_save_fn" if callable(when) else "save_interval_steps": when, "max_to_keep": keep}


def should_save(job: Job, step: int, local: int, persistent: int, expected: bool) -> None:
    """Whether a step is due in a tier."""
    with job.manager((local, 1), (persistent, 4)) as manager:
        job.train(manager, range(step))
        assert manager.should_save(step) == expected


def all_steps(job: Job, local: int, local_keep: int, persistent: int, keep: int, expected: list[int]) -> None:
    """The steps of both tiers, after ten steps and in a new manager."""
    with job.manager((local, local_keep), (persistent, keep)) as manager:
        job.train(manager, range(10))
        assert sorted(manager.all_steps()) == expected, manager.all_steps()
    with job.manager((local, local_keep), (persistent, keep)) as manager:
        assert sorted(manager.all_steps()) == expected, manager.all_steps()


def keep_period(job: Job, local_keep: int, persistent: int, period: int, expected: list[int]) -> None:
    """`keep_period` of the persistent directory; the newest steps can be restored."""
    with job.manager((1, local_keep), (persistent, 1), keep_period=period) as manager:
        job.train(manager, range(10))
        manager.reload()
        assert sorted(manager.all_steps(True)) == expected, manager.all_steps()
        for step in (8, 9):
            job.check(manager.restore(step).state)


def latest_step(job: Job, local: int, persistent: int, expected: int) -> None:
    """The newest step of both tiers, after four steps and in a new manager."""
    with job.manager((local, 2), (persistent, 4)) as manager:
        job.train(manager, range(4))
        assert manager.latest_step() == expected, manager.latest_step()
    with job.manager((local, 2), (persistent, 4)) as manager:
        assert manager.latest_step() == expected, manager.latest_step()


def save(job: Job, is_async: bool) -> None:
    """Saves without a wait between them; a reserved item is refused."""
    with job.manager((3, 2), (5, 3), enable_async_checkpointing=is_async) as manager:
        for step in range(17):
            job.save(manager, step)
        manager.wait_until_finished()
        found = manager.all_steps()
        try:
            items = {"state": ARGS.PyTreeSave(job.state()), "process_metadata": ARGS.JsonSave({})}
            manager.save(18, args=ARGS.Composite(**items))
            raise AssertionError("the reserved item is taken")
        except ValueError:
            assert found == [5, 10, 12, 15], found


def restored_locally(job: Job, is_async: bool) -> None:
    """The persistent directory is emptied under the manager, and the local copies are read."""
    with job.manager((1, 2), (1, 2), enable_async_checkpointing=is_async) as manager:
        for step, factor in enumerate((1, 1, 2)):
            job.save(manager, step, factor=factor)
        manager.wait_until_finished()
        if jax.process_index() == 0:
            for each in (job.root / "persistent").iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        multihost_utils.sync_global_devices("the persistent directory is empty")
        job.check(manager.restore(2).state, factor=2)


def slices(job: Job) -> None:
    """Which processes are of the first slice, before and after the slices change places."""
    with job.manager((1, 2), (1, 2)) as manager:
        assert manager.in_primary_slice == (jax.process_index() < 2)
        job.train(manager, range(3))
    turned = _turned(job)
    with turned.manager((1, 2), (1, 2)) as manager:
        assert manager.in_primary_slice == (jax.process_index() >= 2)


def slices_change_places(job: Job) -> None:
    """Steps are found although only the hosts of the first slice of the new mesh still have them."""
    with job.manager((1, 10), (10, 10)) as manager:
        job.train(manager, range(3))
        assert set(manager.all_steps()) == {0, 1, 2}
        first = manager.in_primary_slice
    job.lose_local(here=first)
    turned = _turned(job)
    with turned.manager((1, 10), (10, 10)) as manager:
        assert manager.in_primary_slice != first
        assert manager.latest_step() == 2
        found = manager.all_steps()
        for step in (2, 1):
            turned.check(manager.restore(step).state)
        assert set(found) == {0, 1, 2}, found


def local_copy_lost(job: Job, is_async: bool) -> None:
    """A slice without its local copies restores, and the saves after it can be restored too."""
    with job.manager((1, 2), (2, 2), enable_async_checkpointing=is_async) as manager:
        for step, factor in enumerate((1, 1, 2)):
            job.save(manager, step, factor=factor)
        manager.wait_until_finished()
        job.lose_local(here=not manager.in_primary_slice)
        job.check(manager.restore(2).state, factor=2)
        manager.reload()
        for step, factor in zip((3, 4, 5), (1, 1, 2), strict=True):
            job.save(manager, step, factor=factor)
        manager.wait_until_finished()
        job.check(manager.restore(5).state, factor=2)


def persistent_copy(job: Job, is_async: bool) -> None:
    """Every local directory is lost."""
    with job.manager((1, 2), (2, 2), enable_async_checkpointing=is_async) as manager:
        for step, factor in enumerate((1, 1, 2)):
            job.save(manager, step, factor=factor)
        manager.wait_until_finished()
        job.lose_local()
        job.check(manager.restore(2, args=ARGS.Composite(state=ARGS.PyTreeRestore())).state, factor=2)


def dataset(job: Job) -> None:
    """A dataset is saved together with the state."""
    data = job.root / "data"
    with job.manager((1, 2), (2, 2), persistent_non_replicated_directory=data) as manager:
        items = {"state": ARGS.PyTreeSave(job.state()), "dataset": ARGS.JsonSave({"position": 7})}
        manager.save(0, args=ARGS.Composite(**items))
        manager.wait_until_finished()
        job.lose_local()
        found = manager.restore(0, args=ARGS.Composite(dataset=ARGS.JsonRestore()))
        job.check(found.state)
        assert found.dataset == {"position": 7}


def process_metadata(job: Job) -> None:
    """The hosts of the other slices write which devices a process has, in Orbax's files."""
    with job.manager((1, 1), (1000, 1)) as manager:
        job.train(manager, [0])
        if not manager.in_primary_slice:
            assert (job.local / "0" / "process_metadata").is_dir(), "no process_metadata"


def decided_by_functions(job: Job) -> None:
    """`should_save_fn` of both tiers."""
    local, persistent = {1, 5, 7, 8}, {1, 2}
    with job.manager((lambda step, _: step in local, 10), (lambda step, _: step in persistent, 10)) as manager:
        job.train(manager, range(10))
        assert set(manager.all_steps()) == local | persistent, manager.all_steps()


def one_slice(job: Job) -> None:
    """A job of one slice saves in the persistent directory alone, as the item `state`."""
    with job.manager((3, 2), (5, 3)) as manager:
        assert manager.in_primary_slice
        for step in range(17):
            job.save(manager, step)
        manager.wait_until_finished()
        job.check(manager.restore(None).state)
        found = sorted(int(each.name) for each in (job.root / "persistent").iterdir() if each.name.isdigit())
        assert found == [5, 10, 15], found
        assert (job.root / "persistent" / "15" / "state").is_dir(), "the layout of several slices"


def one_slice_has_no_local_steps(job: Job) -> None:
    """In a job of one slice Orbax ignores the local directory, and its options."""
    with job.manager((3, 2), (5, 3)) as manager:
        job.train(manager, range(17))
        assert manager.all_steps() == [5, 10, 15], manager.all_steps()


def _two_slices(axis: int) -> Mesh:
    """Processes 0 and 1 are one slice, 2 and 3 the other."""
    return Mesh(np.stack(_by_slice(), axis=axis), AXES[axis])


def _by_slice() -> list[np.ndarray]:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return [np.array(devices[:4]), np.array(devices[4:])]


def _turned(job: Job) -> Job:
    devices = np.flip(job.mesh.devices, job.axis)
    return dataclasses.replace(job, mesh=Mesh(devices, job.mesh.axis_names))


ONE_SLICE = {"(8,) axis 0": ((8,), 0), "(8,) axis 1": ((8,), 1), "(1,8)": ((1, 8), 0), "(8,1)": ((8, 1), 1)}


def cases() -> dict[str, tuple[Callable[..., None], tuple[Any, ...], int | str]]:
    """By name: the function, its arguments, and the slice axis of two slices, or a key of `ONE_SLICE`."""
    made: dict[str, tuple[Callable[..., None], tuple[Any, ...], int | str]] = {}

    def add(function: Callable[..., None], *rows: tuple[Any, ...], meshes: Sequence[int | str] = (0,)) -> None:
        for row in rows or ((),):
            for mesh in meshes:
                made[f"{function.__name__}{list(row)} {mesh}"] = (function, row, mesh)

    add(should_save, (0, 1, 1, True), (0, 2, 2, True), (1, 1, 1, True), (1, 1, 2, True))
    add(should_save, (1, 2, 2, False), (3, 5, 7, False), (2, 1, 2, True), (3, 2, 3, True))
    add(all_steps, (1, 2, 2, 4, [2, 4, 6, 8, 9]), (1, 3, 2, 4, [2, 4, 6, 7, 8, 9]))
    add(all_steps, (1, 2, 2, 5, [0, 2, 4, 6, 8, 9]), (1, 2, 10, 4, [0, 8, 9]))
    add(keep_period, (2, 2, 2, [0, 2, 4, 6, 8, 9]), (3, 2, 4, [0, 4, 7, 8, 9]))
    add(keep_period, (2, 2, 5, [0, 8, 9]), (2, 6, 3, [0, 6, 8, 9]))
    add(latest_step, (1, 4, 3), (2, 3, 3), (2, 4, 2), (4, 4, 0))
    add(save, (False,), (True,))
    for function in (restored_locally, local_copy_lost, persistent_copy):
        add(function, (False,))
        add(function, (True,), meshes=(0, 1))
    for function in (slices, slices_change_places):
        add(function, meshes=(0, 1))
    add(dataset)
    add(process_metadata)
    add(decided_by_functions)
    add(one_slice, meshes=list(ONE_SLICE))
    add(one_slice_has_no_local_steps, meshes=["(1,8)"])
    return made


def main(process: int, port: str, root: Path, names: Sequence[str]) -> None:
    """Runs every case, or those of `names`."""
    jax.distributed.initialize(f"localhost:{port}", 4, process)
    failed = {}
    for number, (name, (function, row, of)) in enumerate(cases().items()):
        if names and not any(each in name for each in names):
            continue
        try:
            shape, axis = ONE_SLICE[of] if isinstance(of, str) else ((), of)
            axes = ("data",) if len(shape) == 1 else AXES[axis]
            mesh = Mesh(np.concatenate(_by_slice()).reshape(shape), axes) if shape else _two_slices(axis)
            function(Job(root / str(number), mesh, axis), *row)
        except Exception as error:  # noqa: BLE001  the cases after it run too
            failed[name] = f"{type(error).__name__}: {error}"[:600]
        multihost_utils.sync_global_devices(f"end of case {number}")
    print("RESULT " + json.dumps(failed), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
