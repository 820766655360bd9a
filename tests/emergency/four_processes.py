"""One of four processes, two slices of two hosts: run by `test_four_processes.py`.

    python -m tests.emergency.four_processes PROCESS PORT DIR

Prints `done` at its end.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

SHARE = 1024  # elements of a host


def main(process: int, port: str, root: Path) -> None:
    """Every process makes every call."""
    import jax

    jax.distributed.initialize(f"localhost:{port}", 4, process)
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    import ckptkit
    from ckptkit import emergency

    kinds: Any = ocp.args
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    local = root / "local" / f"host-{process}"
    local.mkdir(parents=True, exist_ok=True)
    events: list[Any] = []

    def state_of(step: int) -> dict[str, Any]:
        return {"w": jax.device_put(np.arange(2.0 * SHARE) + step, sharding)}

    def shares(state: Any) -> list[Any]:
        return [shard.data.tolist() for shard in state["w"].addressable_shards]

    def make() -> emergency.CheckpointManager:
        log = ckptkit.EventLog()
        log.observe(events.append)
        shape = jax.ShapeDtypeStruct((2 * SHARE,), np.float32, sharding=sharding)
        options = emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(save_interval_steps=2),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=10),
            multiprocessing_options=emergency.MultiprocessingOptions(coordination_timeout_secs=60),
        )
        where = root / "persistent"
        return emergency.CheckpointManager(
            local, where, mesh, {"w": shape}, options=options, host_id=f"host-{process}", events=log
        )

    def restored(expected: int) -> set[str]:
        """Restores the newest step, which has to be `expected`; returns the tiers that gave bytes."""
        multihost_utils.sync_global_devices("ramdisks are as they shall be")
        with make() as manager:
            assert manager.latest_step() == expected, manager.all_steps()
            assert manager.in_primary_slice == (process < 2)
            state = manager.restore(manager.latest_step()).state
        assert shares(state) == shares(state_of(expected)), "other bits"
        (event,) = [each for each in events if each.kind == ckptkit.Kind.RESTORED]
        events.clear()
        return {tier for tier, nbytes in event.fields["sources"].items() if nbytes}

    with make() as manager:
        assert manager.latest_step() is None
        for step in range(15):
            manager.save(step, args=kinds.Composite(state=kinds.PyTreeSave(state_of(step))))
            manager.wait_until_finished()
    events.clear()
    assert restored(14) == {"ram"}
    if process == 1:
        shutil.rmtree(local)
        local.mkdir()
    assert restored(14) == ({"peer"} if process == 1 else {"ram"}), "the other slice has the same boxes"
    if process in (0, 1):
        shutil.rmtree(local)
        local.mkdir()
    assert restored(14) == ({"peer"} if process in (0, 1) else {"ram"}), "a whole slice is lost"
    shutil.rmtree(local)
    local.mkdir()
    assert restored(10) == {"durable"}, "every ramdisk is lost"
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
