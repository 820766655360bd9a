"""One process of a job that saves and restores with stock Orbax.

    orbax_job.py ROOT STEPS WAITS [COUNT INDEX PORT]

With WAITS `short` gcsfs waits a twentieth of its 1 to 32 s before each retry; with `stock` all of them.
"""

import asyncio
import sys
from types import SimpleNamespace

import gcsfs.retry
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHAPE = (64, 256)


def expected(step: int, name: str) -> np.ndarray:
    return np.random.default_rng([step, ord(name)]).random(SHAPE, np.float32)


def main(root: str, steps: int) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def state(step: int) -> dict[str, jax.Array]:
        values = {name: expected(step, name) for name in "wb"}
        return {
            name: jax.make_array_from_callback(SHAPE, sharding, value.__getitem__) for name, value in values.items()
        }

    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        for step in range(steps):
            assert manager.save(step, args=ocp.args.StandardSave(state(step)))
        manager.wait_until_finished()
    with ocp.CheckpointManager(root) as manager:
        assert list(manager.all_steps()) == list(range(steps))[-2:], manager.all_steps()
        abstract = {name: jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding) for name in "wb"}
        for step in manager.all_steps():
            restored = manager.restore(step, args=ocp.args.StandardRestore(abstract))
            for name, array in restored.items():
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), expected(step, name)[shard.index])


def shorten_waits() -> None:
    async def sleep(delay_s: float) -> None:
        await asyncio.sleep(delay_s / 20)

    gcsfs.retry.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    if sys.argv[3] == "short":
        shorten_waits()
    if len(sys.argv) > 4:
        count, index, port = (int(text) for text in sys.argv[4:7])
        jax.distributed.initialize(
            f"127.0.0.1:{port}", count, index, heartbeat_timeout_seconds=60, shutdown_timeout_seconds=60
        )
    main(sys.argv[1], int(sys.argv[2]))
    if len(sys.argv) > 4:
        jax.distributed.shutdown()
    print("restored")
