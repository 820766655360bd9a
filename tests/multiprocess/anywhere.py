"""A job that saves a state over all its devices, or restores every root it is given without a template.

Its data iterators go on with the records that the saving job did not take, on any number of processes.

Run by `test_restore_anywhere.py`: prints one line of JSON, root -> leaf -> the hex digest of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ckptkit
from ckptkit.resume import ElasticBatches
from ckptkit.surgery import Rename, Skip, Take, restore_into

DATA = ("index", "streams")


def state() -> dict[str, Any]:
    """Split over all devices, replicated, a key, a list, host leaves; the same values on any devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))

    def put(value: Any, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.jit(lambda: value, out_shardings=sharding)()

    return {
        "w": put(jnp.arange(64.0).reshape(8, 8) - 7, "all"),
        "layers": [{"b": put(jnp.arange(8, dtype=jnp.bfloat16), "all")}, {"b": put(jnp.float32(-0.0))}],
        "key": put(jax.random.key(5)),
        "host": np.arange(3),
        "count": 7,
    }


def local_bytes(leaf: Any) -> bytes:
    """The bytes of a leaf of which this process holds everything."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf).tobytes()
    whole = np.empty(leaf.shape, leaf.dtype)
    held = np.zeros(leaf.shape, bool)
    for shard in leaf.addressable_shards:
        whole[shard.index], held[shard.index] = np.asarray(shard.data), True
    assert held.all(), "a part is on another process alone"
    return whole.tobytes()


def digests(tree: Any) -> dict[str, str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): hashlib.sha256(local_bytes(leaf)).hexdigest() for path, leaf in flat}


def batches(kind: str) -> ElasticBatches:
    """This process's rows of batches of 8 out of 5 epochs of 20 shuffled records, by index or from 4 streams."""
    data = grain.MapDataset.range(20)
    if kind == "index":
        return ElasticBatches(data.seed(3).shuffle().repeat(5), 8)
    return ElasticBatches([data[part::4].seed(3).shuffle().repeat(5).to_iter_dataset() for part in range(4)], 8)


def take(iterator: ElasticBatches, steps: int) -> list[tuple[int, int]]:
    """The rows and records of so many steps."""
    return [pair for _ in range(steps) for pair in zip(iterator.rows.tolist(), next(iterator).tolist(), strict=True)]


def save(directory: Path) -> None:
    items = {"state": ocp.args.StandardSave(state()), "data": ocp.args.JsonSave({"at": 3})}
    args = ocp.args.Composite(**items)
    iterators = {kind: batches(kind) for kind in DATA}
    for iterator in iterators.values():
        take(iterator, 3)
    iterated = {kind: grain.checkpoint.CheckpointSave(each) for kind, each in iterators.items()}  # pyright: ignore[reportCallIssue]
    with ckptkit.CheckpointManager(directory / "ours") as manager:
        manager.save(3, args=ocp.args.Composite(**items, **iterated))
    with ocp.CheckpointManager(directory / "stock") as stock:
        stock.save(3, args=args)


def take_apart(root: Path) -> dict[str, Any]:
    """A part of the step, by surgery and by a follower, whole on every device of this job."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    target = {"moved": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=whole), "count": 0}
    rules = [Rename("w", "moved"), Take("count"), Skip("**")]
    taken, report = restore_into(root, None, target, rules)
    assert (report.step, report.proven) == (3, root.name == "ours")
    for step in ckptkit.follow(root, poll_s=0.01, idle_timeout_s=0.0):
        assert (step.step, step.proven) == (3, root.name == "ours")
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(ckptkit.abstract_state(state(), mesh)))
        assert step.restore(wanted)["state"]["count"] == taken["count"]
    return taken


def check_batches(manager: ckptkit.CheckpointManager) -> None:
    """The iterators go on where the saving job's were, with this job's rows."""
    found, expected = ({kind: batches(kind) for kind in DATA} for _ in range(2))
    wanted = {kind: grain.checkpoint.CheckpointRestore(each) for kind, each in found.items()}  # pyright: ignore[reportCallIssue]
    manager.restore(3, args=ocp.args.Composite(**wanted))
    for kind in DATA:
        assert take(expected[kind], 12)[3 * len(found[kind].rows) :] == take(found[kind], 9), kind


def restore(roots: list[Path]) -> dict[str, Any]:
    found = {}
    for root in roots:
        with ckptkit.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
            restored = manager.restore(3)
            assert restored["data"] == {"at": 3}
            if root.name == "ours":
                check_batches(manager)
        found[str(root)] = digests(restored["state"]) | digests(take_apart(root))
    return found


def main() -> None:
    what, address, count, process, *paths = sys.argv[1:]
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(process))
    if what == "save":
        save(Path(paths[0]))
    else:
        print(json.dumps(restore([Path(path) for path in paths])), flush=True)
    if int(count) > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
