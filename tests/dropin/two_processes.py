"""One of two processes of a job that uses what only a drop-in has: run by `test_two_processes.py`.

    python -m tests.dropin.two_processes PROCESS PORT DIR

Prints `done` with the steps that it saw. Every call is made by both processes together, as with Orbax's manager.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def main(process: int, port: str, root: Path) -> None:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec
    from orbax.checkpoint import checkpoint_managers as policies

    import ckptkit

    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    args: Any = ocp.args

    def state(step: int) -> dict[str, Any]:
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        return {"w": jax.device_put(np.arange(8.0) + step, sharding), "step": step}

    answers = iter([True, False, True, True])

    class Whim:
        """A policy that would decide differently on each process."""

        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            assert process == 0
            return next(answers)

    def make(**more: Any) -> Any:
        ram = [ckptkit.Tier.ram(str(root / "ram"))] if more.pop("ram", False) else []
        options = ocp.CheckpointManagerOptions(**more)
        return ckptkit.CheckpointManager(root / "run", options=options, tiers=ram, host_id=f"h{process}", timeout_s=60)

    with make(save_decision_policy=policies.AnySavePolicy([Whim()])) as manager:
        taken = [manager.save(step, args=args.StandardSave(state(step))) for step in range(4)]
        assert taken == [True, False, True, True], taken
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 2, 3]
        manager.delete(2)
        assert manager.all_steps(read=True) == [0, 3]
        assert manager.metadata(3).item_handlers["default"].endswith("StandardCheckpointHandler")
        assert manager.restore(3, args=args.StandardRestore())["step"] == 3
    with make(ram=True) as manager:
        # Text is of a kind that only Orbax's handlers hold: on the caller's thread, between steps of our own.
        for step in range(4, 8):
            given = args.PyTreeSave({**state(step), **({"name": "text"} if step % 2 else {})})
            assert manager.save(step, args=given)
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 3, 4, 5, 6, 7]
        found = manager.restore(7)
        assert found["name"] == "text"
        assert [shard.data.tolist() for shard in found["w"].addressable_shards] == [
            shard.data.tolist() for shard in state(7)["w"].addressable_shards
        ]
        print("done", manager.all_steps(), flush=True)
    os._exit(0)  # the service's own shutdown barrier is not what is tested


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
