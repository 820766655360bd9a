"""One process of a job whose leaves live on parts of its devices, as the stages of a pipeline do.

    python -m tests.multiprocess.stages_worker --process 0 --coordinator HOST:PORT DIR

Writes DIR/found-{process}.json: what each act gave, or what it raised.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import traceback
from pathlib import Path
from typing import Any

PROCESSES, DEVICES, LIMIT_S = 3, 2, 200.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--process", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("dir", type=Path)
    given = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    import jax

    jax.distributed.initialize(given.coordinator, PROCESSES, given.process)
    worker = Worker(given.dir, given.process)
    for act in (
        worker.save_and_restore,
        worker.other_meshes,
        worker.handler_files,
        worker.one_ends_with_an_error,
        worker.whole_values,
        worker.handler_fails,
        worker.local_meshes,
        worker.active_processes,
    ):
        try:
            act()
        except Exception:  # noqa: BLE001  written down: the test reads it
            worker.found[act.__name__] = traceback.format_exc()
        (given.dir / f"found-{given.process}.json").write_text(json.dumps(worker.found))
    jax.distributed.shutdown()


class Worker:
    """The acts of the job, in the same order on every process."""

    def __init__(self, root: Path, process: int):
        self.found: dict[str, Any] = {}
        self._root, self._process = root, process

    def save_and_restore(self) -> None:
        """Stages without this process's devices, from the ramdisk and from the durable tier."""
        import orbax.checkpoint as ocp

        import ckptkit

        tiers = [ckptkit.Tier.ram(str(self._root / "ram"))]
        found = self.found["saved"] = {}
        with ckptkit.CheckpointManager(self._root / "run", tiers=tiers, host_id=f"host-{self._process}") as manager:
            args: Any = ocp.args.Composite(state=ocp.args.StandardSave(state()), meta=ocp.args.StandardSave(META))
            manager.save(0, args=args)
            manager.wait_until_finished()
            found["tiers"] = sorted(manager.steps()[0].tiers)
            found["ram"] = self._restored(manager, 0)
        with ckptkit.CheckpointManager(self._root / "run") as manager:
            found["durable"] = self._restored(manager, None)

    def other_meshes(self) -> None:
        """Restores stages onto the whole mesh, the whole mesh onto stages, and all without a template."""
        import jax
        import orbax.checkpoint as ocp

        import ckptkit

        found = self.found["other meshes"] = {}
        meshes = {"whole": jax.devices(), "stage": jax.devices()[: 2 * DEVICES], "last": jax.devices()[-DEVICES:]}
        with ckptkit.CheckpointManager(self._root / "run") as manager:
            for name, devices in meshes.items():
                template = jax.tree.map(lambda leaf, to=devices: abstract(leaf, to), state())
                args: Any = ocp.args.Composite(state=ocp.args.StandardRestore(template))
                found[name] = same_here(manager.restore(0, args=args)["state"], state(devices))
            restored = manager.restore(0)
            found["no template"] = [has_values(restored["state"]), restored["meta"] == META]

    def handler_files(self) -> None:
        """An item of which each process writes files, small and large: from the ramdisks, and after a host is lost."""
        import shutil

        import orbax.checkpoint as ocp
        from jax.experimental import multihost_utils

        import ckptkit
        import ckptkit.manager.save as saving
        from tests.multiprocess.notes import NotesRestore, NotesSave

        found = self.found["handler files"] = {}
        for size, limit in (("small", saving.INLINE_BYTES_MAX), ("large", 3)):
            saving.INLINE_BYTES_MAX = limit
            root = self._root / size

            def opened(root: Path = root) -> Any:
                tiers = [ckptkit.Tier.ram(str(root / f"ram-{self._process}"))]
                return ckptkit.CheckpointManager(root / "run", tiers=tiers, host_id=f"host-{self._process}")

            with opened() as manager:
                for step in (0, 1):
                    args: Any = ocp.args.Composite(
                        state=ocp.args.StandardSave(state()), notes=NotesSave(f"step {step}")
                    )
                    manager.save(step, args=args)
                    manager.wait_until_finished()
                found[size] = [sorted(record.tiers) for record in manager.steps()]
            wanted: Any = ocp.args.Composite(notes=NotesRestore())
            with opened() as manager:
                found[f"{size}, ram"] = manager.restore(1, args=wanted)["notes"]
            if self._process == 0:
                shutil.rmtree(root / "run" / "1")
            with opened() as manager:
                found[f"{size}, ram alone"] = manager.restore(1, args=wanted)["notes"]
                again: Any = ocp.args.Composite(state=ocp.args.StandardSave(state()), notes=NotesSave("step 1"))
                assert manager.save(1, args=again, force=True)
            with ckptkit.CheckpointManager(root / "run") as manager:
                (proof,) = ckptkit.verify(str(root / "run"), step=1).steps
                found[f"{size}, flushed"] = [manager.restore(1, args=wanted)["notes"], proof.state]
                found[f"{size}, flushed state"] = has_values(manager.restore(1)["state"])
                multihost_utils.sync_global_devices(f"{size} was read")
            if self._process == 0:
                shutil.rmtree(root / "run" / "1")
            if self._process == 1:
                shutil.rmtree(root / "ram-1")
            with opened() as manager:
                found[f"{size}, a host is lost"] = [manager.restore(None, args=wanted)["notes"], manager.latest_step()]
            with ckptkit.CheckpointManager(root / "run") as manager:
                found[f"{size}, durable"] = manager.restore(0, args=wanted)["notes"]

    def one_ends_with_an_error(self) -> None:
        """All restore a step that only ramdisks hold; then one process raises, and the others close in the normal way.

        A process that waited for it would not come back within `LIMIT_S`.
        """
        import shutil

        import orbax.checkpoint as ocp

        import ckptkit

        root = self._root / "alone"

        def opened() -> Any:
            tiers = [ckptkit.Tier.ram(str(root / "ram"))]
            return ckptkit.CheckpointManager(root / "run", tiers=tiers, host_id=f"host-{self._process}")

        with opened() as manager:
            manager.save(0, args=ocp.args.StandardSave(state()))  # pyright: ignore[reportCallIssue]
        if self._process == 0:
            shutil.rmtree(root / "run" / "0")
        manager = opened()
        manager.restore(0)
        try:
            if self._process == 1:
                raise RuntimeError("of the loop")
        except RuntimeError:
            manager.close()
        else:
            manager.close()
        self.found["flushed without all"] = (root / "run" / "0").exists()

    def whole_values(self) -> None:
        """Single arrays and random keys that each process has whole."""
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        import ckptkit

        found = self.found["whole values"] = {}
        whole = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("all",)), jax.sharding.PartitionSpec())
        vector = jax.make_array_from_callback((8,), whole, lambda index: np.arange(8.0, dtype=np.float32)[index])
        key = jax.jit(lambda: jax.random.key(5), out_shardings=whole)()
        tiers = [ckptkit.Tier.ram(str(self._root / "whole-ram"))]
        save: Any = ocp.args.Composite(
            state=ocp.args.StandardSave(state()), vector=ocp.args.ArraySave(vector), key=ocp.args.JaxRandomKeySave(key)
        )
        wanted: Any = ocp.args.Composite(vector=ocp.args.ArrayRestore(), key=ocp.args.JaxRandomKeyRestore())

        def right(restored: Any) -> list[bool]:
            values = restored["vector"], jax.random.key_data(restored["key"])
            return [np.array_equal(a, b) for a, b in zip(values, (vector, jax.random.key_data(key)), strict=True)]

        for place in ("ram", "durable"):
            given = {"tiers": tiers, "host_id": f"host-{self._process}"} if place == "ram" else {}
            with ckptkit.CheckpointManager(self._root / "whole", **given) as manager:
                if place == "ram":
                    manager.save(0, args=save)
                    manager.wait_until_finished()
                    found["tiers"] = sorted(manager.steps()[0].tiers)
                found[place] = right(manager.restore(0, args=wanted))

    def handler_fails(self) -> None:
        """A handler that raises on one process, and one that leaves a link there."""
        import orbax.checkpoint as ocp

        import ckptkit
        from tests.multiprocess.notes import NotesSave

        found = self.found["handler fails"] = []
        tiers = [ckptkit.Tier.ram(str(self._root / "fails-ram"))]
        root = self._root / "fails"
        with ckptkit.CheckpointManager(root, tiers=tiers, host_id=f"host-{self._process}") as manager:
            for step, fault in enumerate(("", "raise", "link", "")):
                text = fault if self._process == 1 else ""
                args: Any = ocp.args.Composite(state=ocp.args.StandardSave(state()), notes=NotesSave(text))
                try:
                    found.append(manager.save(step, args=args))
                except (ValueError, RuntimeError) as error:
                    found.append(str(error))
                manager.wait_until_finished()
            found.append(sorted(record.step for record in manager.steps() if record.state == "committed"))

    def local_meshes(self) -> None:
        """Each process has a mesh of its own devices: it is not a stage."""
        import jax
        import orbax.checkpoint as ocp

        import ckptkit

        mesh = jax.sharding.Mesh(jax.local_devices(), ("all",))
        alone = jax.device_put(jax.numpy.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        manager = ckptkit.CheckpointManager(self._root / "local")
        try:
            args: Any = ocp.args.StandardSave({"w": alone})
            manager.save(0, args=args)
            manager.wait_until_finished()
        except ckptkit.SaveFailedError as error:
            self.found["local meshes"] = f"{error} {error.__cause__}"
        manager.close()

    def active_processes(self) -> None:
        """A manager for some of the processes."""
        import orbax.checkpoint as ocp

        import ckptkit

        options = ocp.CheckpointManagerOptions(
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=0, active_processes={0, 1}, barrier_sync_key_prefix="some"
            )
        )
        try:
            ckptkit.CheckpointManager(self._root / "some", options=options)
        except ValueError as error:
            self.found["active processes"] = str(error)

    def _restored(self, manager: Any, step: int | None) -> list[bool]:
        import jax
        import orbax.checkpoint as ocp

        template = jax.tree.map(abstract, state())
        args: Any = ocp.args.Composite(state=ocp.args.StandardRestore(template), meta=ocp.args.StandardRestore())
        found = manager.restore(step, args=args)
        return [same_here(found["state"], state()), found["meta"] == META]


META = {"epoch": 7, "lr": 0.5}


def state(devices: Any = None) -> dict[str, Any]:
    """Leaves over all devices, over those of processes 0 and 1, and of the last process; or all over `devices`."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    everywhere = jax.devices()
    first, last = everywhere[: 2 * DEVICES], everywhere[-DEVICES:]

    def put(name: str, on: Any, *spec: Any) -> jax.Array:
        value = values()[name]
        sharding = NamedSharding(Mesh(np.array(devices or on), ("all",)), PartitionSpec(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)

    return {
        "whole": put("whole", everywhere, "all"),
        "stage": put("stage", first, "all"),
        "copies": put("copies", first),
        "last": put("last", last, "all"),
    }


def values() -> dict[str, Any]:
    import numpy as np

    return {
        "whole": np.arange(24, dtype=np.float32).reshape(12, 2),
        "stage": np.arange(96, dtype=np.int32).reshape(24, 4) - 7,
        "copies": np.full((), 0.25, np.float32),
        "last": np.arange(12, dtype=np.float32),
    }


def has_values(found: Any) -> bool:
    """Whether every leaf has shards on this process, of the right bits, wherever it was placed."""
    import numpy as np

    def right(name: str, value: Any) -> bool:
        shards = found[name].addressable_shards
        return bool(shards) and all(np.array_equal(shard.data, value[shard.index]) for shard in shards)

    return all(right(name, value) for name, value in values().items())


def abstract(leaf: Any, devices: Any = None) -> Any:
    import jax
    import numpy as np

    sharding = leaf.sharding
    if devices is not None:
        mesh = jax.sharding.Mesh(np.array(devices), ("all",))
        sharding = jax.sharding.NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def same_here(found: Any, expected: Any) -> bool:
    """Whether this process's shards are the same, bit for bit, and of the same indices."""
    import jax
    import numpy as np

    def shards(leaf: Any) -> Any:
        held = {str(shard.index): np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        return leaf.shape, str(leaf.dtype), held

    return bool(jax.tree.all(jax.tree.map(lambda a, b: shards(a) == shards(b), found, expected)))


if __name__ == "__main__":
    main()
