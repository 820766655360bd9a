"""Artifex: a transformer block with dropout, and the checkpoints of its library, over ckptkit.

    python artifex_nnx.py ROOT [--kill-after STEP] [--stock]

Its `orbax.checkpoint.CheckpointManager` is ckptkit's.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from artifex.generative_models.core import checkpointing  # pyright: ignore[reportMissingImports]
from artifex.generative_models.core.layers.transformers import (  # pyright: ignore[reportMissingImports]
    TransformerEncoderBlock,
)
from flax import nnx

from tests.strangers.reporting import Run

STEPS = 6


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: jax.Array) -> None:
    """One step of a denoiser."""

    def loss_of(model: nnx.Module) -> jax.Array:
        return ((model(batch, deterministic=False) - batch[:, ::-1]) ** 2).mean()  # pyright: ignore[reportCallIssue]

    optimizer.update(model, nnx.grad(loss_of)(model))


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step."""
    model = TransformerEncoderBlock(hidden_dim=32, num_heads=4, dropout_rate=0.2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, run.notebook.slow(optax.adamw(1e-2)), wrt=nnx.Param)
    manager, _ = checkpointing.setup_checkpoint_manager(run.root / "steps")
    restored = checkpointing.load_checkpoint_with_optimizer(manager, model, optimizer)[2]
    first = 0 if restored is None else restored + 1
    data = np.random.default_rng(0).normal(size=(STEPS, 4, 16, 32)).astype(np.float32)
    for step in range(first, STEPS):
        train_step(model, optimizer, data[step])
        checkpointing.save_checkpoint_with_optimizer(manager, model, optimizer, step)
        run.reached(step)
    leaves = jax.tree.leaves((nnx.state(model, nnx.Param), nnx.state(optimizer)))
    run.report(first, leaves)
    manager.close()


if __name__ == "__main__":
    main(Run.from_arguments())
