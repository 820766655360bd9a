"""One of two processes that save and load trees at paths of their own: run by `test_two_processes.py`.

    python -m tests.direct.two_processes PROCESS PORT DIR

Prints `done` at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(process: int, port: str, root: Path) -> None:
    """Both processes make every call together."""
    import jax

    jax.distributed.initialize(f"localhost:{port}", 2, process)
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    import ckptkit
    from ckptkit import direct
    from tests.direct.test_checkpointers import flip_bit

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def put(value: Any, *spec: Any) -> Any:
        return jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    def of(tree: Any) -> list[Any]:
        return [[shard.data.tolist() for shard in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]

    tree = {"w": put(np.arange(1 << 16, dtype=np.float32), "x"), "b": put(np.arange(4.0))}
    direct.save(root / "x", {**tree, "step": 3, "host": np.arange(3)})
    found = direct.load(root / "x", {**tree, "step": 0, "host": np.zeros(3, int)})
    assert of({name: found[name] for name in tree}) == of(tree), "other bits"
    assert found["step"] == 3
    assert found["host"].tolist() == [0, 1, 2]
    with direct.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "y", tree)
        checkpointer.wait_until_finished()
        assert of(checkpointer.restore(root / "y", tree)) == of(tree), "other bits"
    with ocp.StandardCheckpointer() as stock:
        assert of(stock.restore(root / "y", tree)) == of(tree), "other bits in stock Orbax"
        stock.save(root / "stock", tree)
    assert of(direct.load(root / "stock", tree)) == of(tree), "a stock directory"
    each: Any = ocp.options.MultiprocessingOptions(primary_host=None)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=each)
    alone = direct.Checkpointer(handler, multiprocessing_options=each)
    assert not hasattr(alone._handler, "stock"), "digests of one process prove nothing"
    some: Any = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="some")
    if process == 0:
        with direct.StandardCheckpointer(multiprocessing_options=some) as checkpointer:
            checkpointer.save(root / "some", {"n": np.arange(3)})
            checkpointer.wait_until_finished()
            assert checkpointer.restore(root / "some")["n"].tolist() == [0, 1, 2]
        flip_bit(root / "y")  # in the part of one of the two
    for directory in ("y", "x"):
        multihost_utils.sync_global_devices(directory)
        try:
            direct.load(root / directory, tree if directory == "y" else None)
            refused = ""
        except ckptkit.CorruptCheckpointError as error:
            refused = str(error)
        assert ("digest" in refused) == (directory == "y"), f"{directory}: {refused or 'one process took damage'}"
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
