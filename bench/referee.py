"""A job for fault injectors that others wrote: `python -m bench.referee DIRECTORY` trains, saves and resumes below it.

One process, a ramdisk tier, an SSD tier and a durable root, all in DIRECTORY, a few steps of float32 arithmetic whose
end is known. It prints the step from which it resumed, and writes the state of its end to DIRECTORY/final.json.
docs/TESTING.md has the command of `ckpt-chaos`, which kills it at each file that it writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import ckptkit

STEPS, RAM_EVERY, DURABLE_EVERY = 8, 1, 3


def main(home: Path) -> None:
    """Trains to the end from the newest step that is complete."""
    step_fn = jax.jit(lambda state: {"w": state["w"] * 1.5 + 1, "count": state["count"] + 1})
    state = {"w": jnp.arange(4096.0), "count": jnp.zeros((), jnp.int32)}
    tiers = [
        ckptkit.Tier.ram(str(home / "ram"), save=ckptkit.EverySteps(RAM_EVERY)),
        ckptkit.Tier.ssd(str(home / "ssd"), save=ckptkit.EverySteps(2)),
    ]
    options = ocp.CheckpointManagerOptions(save_interval_steps=DURABLE_EVERY, max_to_keep=2)
    with ckptkit.CheckpointManager(home / "root", options=options, tiers=tiers, host_id="host") as manager:
        if manager.latest_step() is not None:
            state = manager.restore(None, args=ocp.args.StandardRestore(state))  # pyright: ignore[reportCallIssue]
        begin = manager.latest_step() or 0
        print(f"resumed from step {begin}", flush=True)
        for step in range(begin + 1, STEPS + 1):
            state = step_fn(state)
            manager.save(step, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()  # or two runs would write their files in different orders
    final = {"count": int(state["count"]), "digest": ckptkit.state_digest(state)}
    (home / "final.json").write_text(json.dumps(final, sort_keys=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
