"""Flax's own `flax.training.checkpoints`, as its examples call it, with a `TrainState`, over ckptkit.

    python flax_checkpoints.py ROOT [--kill-after STEP] [--stock]

The `orbax.checkpoint.PyTreeCheckpointer` that it makes is ckptkit's.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training import checkpoints, train_state

from tests.strangers.reporting import Run

STEPS = 6


class Model(nn.Module):
    @nn.compact
    def __call__(self, image: Any) -> Any:
        return nn.Dense(8)(nn.BatchNorm(use_running_average=True)(nn.relu(nn.Dense(32)(image))))


@jax.jit
def train_step(state: Any, batch: Any) -> Any:
    """One step of a denoiser."""
    gradients = jax.grad(lambda params: ((state.apply_fn(params, batch) - batch[:, ::-1]) ** 2).mean())(state.params)
    return state.apply_gradients(grads=gradients)


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step."""
    steps, model = run.root / "steps", Model()
    data = np.random.default_rng(0).normal(size=(STEPS, 16, 8)).astype(np.float32)
    params = model.init(jax.random.key(0), data[0])
    state: Any = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))
    state = checkpoints.restore_checkpoint(steps, state)
    first = int(state.step)
    for step in range(first, STEPS):
        state = train_step(state, data[step])
        checkpoints.save_checkpoint(steps, state, step)
        run.reached(step)
    run.report(first, jax.tree.leaves((state.params, state.opt_state)))


if __name__ == "__main__":
    main(Run.from_arguments())
