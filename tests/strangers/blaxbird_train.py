"""blaxbird: its trainer of Flax NNX models and its checkpoint hook, over ckptkit.

    python blaxbird_train.py ROOT [--kill-after STEP] [--stock]

Its `orbax.checkpoint.CheckpointManager` and its `PyTreeCheckpointer` are ckptkit's.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from blaxbird import get_default_checkpointer, train_fn  # pyright: ignore[reportMissingImports]
from flax import nnx

from tests.strangers.reporting import Run

STEPS = 6


def loss_of(model: Any, batch: Any) -> jax.Array:
    return ((model(batch) - batch[:, ::-1]) ** 2).mean()


@nnx.jit
def train_step(model: Any, rng_key: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
    """The loss and its gradients, on a noisy batch."""
    noise = 0.1 * jax.random.normal(rng_key, batch.shape)
    return nnx.value_and_grad(loss_of)(model, batch + noise)


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step, one call of its trainer for each."""
    model = nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
    optimizer = nnx.ModelAndOptimizer(model, run.notebook.slow(optax.adamw(1e-2)))
    save, restore_best, restore_last = get_default_checkpointer(str(run.root / "steps"), save_every_n_steps=1)
    del restore_last
    optimizer = restore_best(optimizer)  # its criterion is the step: the best is the newest
    first = int(optimizer.opt_state[0].count)
    data = np.random.default_rng(0).normal(size=(STEPS, 16, 8)).astype(np.float32)
    for step in range(first, STEPS):
        train = train_fn(
            fns=(train_step, lambda model, rng_key, batch: loss_of(model, batch)),
            n_steps=1,
            eval_every_n_steps=1,
            n_eval_batches=1,
            hooks=[lambda _, metrics, step=step, **given: save(step, metrics=metrics | {"val/loss": -step}, **given)],
        )
        train(jax.random.key(step), optimizer, iter(data[step : step + 1]), iter(data[:1]))
        run.reached(step)
    run.report(first, jax.tree.leaves(nnx.state((optimizer.model, optimizer.opt_state))))


if __name__ == "__main__":
    main(Run.from_arguments())
