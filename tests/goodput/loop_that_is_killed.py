"""A loop like README's, with `events`; if asked, a second log records the same moments by hand."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import ckptkit

STEP_S = 0.03


def main(root: Path, *, by_hand: bool) -> None:
    """Trains to step 100; `by_hand` waits for each step and records it."""
    events = ckptkit.EventLog.for_run(root / "run")
    hand = ckptkit.EventLog.for_run(root / "hand") if by_hand else None

    def span(name: str, step: int | None = None):
        return hand.span(name, step) if hand else nullcontext()

    def computed(w: np.ndarray) -> np.ndarray:
        time.sleep(STEP_S)
        return np.asarray(w) + np.float32(1)

    def add(w: jax.Array) -> jax.Array:
        return jax.pure_callback(computed, jax.ShapeDtypeStruct(w.shape, w.dtype), w)

    with span("training_prep"):
        state = {"w": jnp.zeros((256, 256)), "key": jax.random.key(0)}
        step_fn = jax.jit(lambda s: {**s, "w": add(s["w"])}, donate_argnums=0)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        tiers = [ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(2))]
        options = ocp.CheckpointManagerOptions(save_interval_steps=50, max_to_keep=3)
        manager = ckptkit.CheckpointManager(root / "durable", options=options, tiers=tiers, events=events)
    with manager:
        if manager.latest_step() is not None:
            with span("checkpoint_restore"):
                state = manager.restore(None, args=ocp.args.StandardRestore(abstract))
        if by_hand:
            with span("compile"):
                step_fn = step_fn.lower(state).compile()
        for step in range((manager.latest_step() or 0) + 1, 101):
            with span("step", step):
                state = step_fn(state)
                if by_hand:
                    jax.block_until_ready(state["w"])
            with span("checkpoint_save", step):
                manager.save(step, args=ocp.args.StandardSave(state))
            print(step, flush=True)
    if hand:
        hand.emit(ckptkit.Kind.FINISHED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), by_hand="hand" in sys.argv[2:])
