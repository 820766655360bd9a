"""One process of a job that resumes on another number of processes, and saves to a ramdisk that holds it once.

    python -m tests.multiprocess.resized PROCESS PORT COUNT DIR

Prints one line of JSON: what was restored, from where, and the outcome of every save.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

STATE_BYTES = 8 << 20
SAVES = 5


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    import ckptkit

    process, port, count, root = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, process)
    sharding = NamedSharding(jax.make_mesh((len(jax.devices()),), ("x",)), PartitionSpec("x"))
    shape = (STATE_BYTES // 4,)

    def state(step: int) -> dict[str, jax.Array]:
        local = np.full(shape, step, np.float32)
        return {"w": jax.make_array_from_callback(shape, sharding, lambda index: local[index])}

    events: list[ckptkit.Event] = []
    log = ckptkit.EventLog()
    log.observe(events.append)
    with ckptkit.CheckpointManager(
        root / "durable",
        options=ocp.CheckpointManagerOptions(save_interval_steps=10**6),
        tiers=[ckptkit.Tier.ram(str(root / "ram"), slots=3, save=ckptkit.EverySteps(1))],
        host_id="host",
        events=log,
    ) as manager:
        abstract = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}
        manager.prepare(ocp.args.StandardSave(abstract))  # pyright: ignore[reportCallIssue]
        last, values = manager.latest_step(), list[float]()
        if last is not None:
            found = manager.restore(None, args=ocp.args.StandardRestore(abstract))  # pyright: ignore[reportCallIssue]
            assert found is not None
            values = sorted({float(x) for each in found["w"].addressable_shards for x in np.unique(each.data)})
        begin = 1 if last is None else last + 1
        for step in range(begin, begin + SAVES):
            manager.save(step, args=ocp.args.StandardSave(state(step)))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
        said = {
            "last": last,
            "values": values,
            "committed": [e.step for e in events if e.kind == ckptkit.Kind.COMMITTED and e.tier == "ram"],
            "kinds": Counter(str(e.kind) for e in events),
            "reasons": [
                e.fields.get("reason") for e in events if e.kind in (ckptkit.Kind.DEGRADED, ckptkit.Kind.SKIPPED)
            ],
        }
    print("SAID", json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
