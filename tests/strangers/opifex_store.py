"""Opifex: a network and the checkpoint store of its library, over ckptkit.

    python opifex_store.py ROOT [--kill-after STEP] [--stock]

Its `orbax.checkpoint.CheckpointManager` is ckptkit's.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from opifex.core.training.components.checkpoint_store import (  # pyright: ignore[reportMissingImports]
    OrbaxCheckpointStore,
)
from opifex.neural.base import StandardMLP  # pyright: ignore[reportMissingImports]

from tests.strangers.reporting import Run

STEPS = 6


@jax.jit
def train_step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """One step towards a sine."""

    def loss_of(params: Any) -> jax.Array:
        return ((nnx.merge(state.apply_fn, params)(batch) - jax.numpy.sin(batch)) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step."""
    model = StandardMLP([8, 32, 8], rngs=nnx.Rngs(0))
    with OrbaxCheckpointStore(run.root / "steps") as store:
        state = store.create_train_state(model, run.notebook.slow(optax.adamw(1e-2))).replace(
            apply_fn=nnx.graphdef(model)
        )
        newest = store.latest_step()
        if newest is not None:
            state, metadata = store.restore_train_state(state, newest)
            assert metadata["step"] == newest
        first = 0 if newest is None else newest + 1
        data = np.random.default_rng(0).normal(size=(STEPS, 16, 8)).astype(np.float32)
        for step in range(first, STEPS):
            state, loss = train_step(state, data[step])
            store.save_train_state(state, step, float(loss))
            run.reached(step)
        run.report(first, jax.tree.leaves((state.params, state.opt_state)))


if __name__ == "__main__":
    main(Run.from_arguments())
