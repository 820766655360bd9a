"""FlaxDiff: its `SimpleTrainer`, which calls Orbax's manager in the legacy form, over ckptkit.

    python flaxdiff_train.py ROOT [--kill-after STEP] [--stock]

Its `orbax.checkpoint.CheckpointManager` and checkpointers are ckptkit's. It restores parameters and random keys, not
the optimizer's state: gradient descent without momentum has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flaxdiff.trainer.simple_trainer import SimpleTrainer  # pyright: ignore[reportMissingImports]

from tests.strangers.reporting import Run

STEPS = 6


class Model(nn.Module):
    @nn.compact
    def __call__(self, image: Any) -> Any:
        return nn.Dense(8)(nn.relu(nn.Dense(32)(image)))


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step."""
    numbers = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    steps = run.root / "steps"
    saved = list(steps.glob("simple/[0-9]*"))
    trainer: Any = SimpleTrainer(
        Model(),
        {"image": (8,)},
        run.notebook.slow(optax.sgd(0.1)),
        jax.random.PRNGKey(0),
        distributed_training=False,
        checkpoint_base_path=str(steps),
        load_from_checkpoint=str(steps / "simple") if saved else None,
    )
    trainer.wandb = None  # it reads it, and sets it with a configuration of W&B alone
    first = trainer.latest_step

    def batches() -> Iterator[Any]:
        for step in range(first, STEPS):
            yield {"image": numbers, "label": numbers[:, ::-1]}
            run.reached(step)  # the next batch is asked for once the step is saved

    trainer.fit({"train": batches}, train_steps_per_epoch=1, epochs=STEPS, val_steps_per_epoch=0)
    run.report(first, jax.tree.leaves(trainer.state.params))


if __name__ == "__main__":
    main(Run.from_arguments())
