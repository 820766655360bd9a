"""One of two processes that load by `ckptkit.v1.Checkpointer`: run by `test_two_processes.py`.

    python -m tests.v1.two_processes PROCESS PORT DIR

Prints `done` at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(process: int, port: str, root: Path) -> None:
    """Both processes make every call together; the step's metadata can be read by one of them alone."""
    import jax

    jax.distributed.initialize(f"localhost:{port}", 2, process)
    import numpy as np
    import pytest
    from orbax.checkpoint import v1 as orbax

    import ckptkit
    import ckptkit.v1
    from ckptkit.inspection.places import Place

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {"w": jax.device_put(np.arange(8.0), sharding), "name": "run"}
    own = [shard.data.tolist() for shard in state["w"].addressable_shards]
    opened = Place.open

    def unreadable(*_: Any, **__: Any) -> Place:
        raise ckptkit.StoreError("the root cannot be reached", path=str(root))

    with ckptkit.v1.Checkpointer(root, processes=ckptkit.ProcessOptions(timeout_s=30)) as checkpointer:
        assert checkpointer.save(1, state)
        for blind in (1, 0):
            Place.open = unreadable if process == blind else opened
            for load in (
                lambda: checkpointer.load(None, state),
                lambda: checkpointer.load(1, state),
                lambda: checkpointer.load_async(1, state).result(),
                lambda: checkpointer.load_checkpointables()["state"],
            ):
                if blind == 0:
                    with pytest.raises(ckptkit.StoreError, match="cannot be reached"):
                        load()
                    continue
                found = load()  # each process would read for itself
                assert found["name"] == "run"
                assert [shard.data.tolist() for shard in found["w"].addressable_shards] == own
        Place.open = opened
        with pytest.raises(orbax.training.errors.StepNotFoundError, match="No checkpoint found at step 2"):
            checkpointer.load(2, state)
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
