"""README's loop on several processes with one argument more, `events`; each process keeps an account by hand, too.

    python -m tests.goodput.loop_under_slurm ROOT [STEP]

SIGKILL ends the processes at STEP.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from tests.goodput.by_hand import Notebook

STEP_S = 0.3


def main(root: Path, killed_at: int | None) -> None:
    """Trains to step 20, or is killed."""
    jax.distributed.initialize()
    events = ckptkit.EventLog.for_run(root / "run")
    notebook = Notebook(root / f"by_hand-{jax.process_index()}", STEP_S)
    notebook.watch(ckptkit.CheckpointManager)
    replicated = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec())
    state = {"w": jax.device_put(np.zeros((256, 256), np.float32), replicated)}

    everywhere = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
    add = jax.shard_map(lambda w: notebook.computed(w) + 1, mesh=replicated.mesh, **everywhere)
    step_fn = jax.jit(lambda s: {**s, "w": add(s["w"])}, donate_argnums=0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    tiers = [ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(2))]
    options = ocp.CheckpointManagerOptions(save_interval_steps=50, max_to_keep=3)
    with ckptkit.CheckpointManager(root / "durable", options=options, tiers=tiers, events=events) as manager:
        if manager.latest_step() is not None:
            state = manager.restore(None, args=ocp.args.StandardRestore(abstract))
        for step in range((manager.latest_step() or 0) + 1, 21):
            state = step_fn(state)
            manager.save(step, args=ocp.args.StandardSave(state))
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
