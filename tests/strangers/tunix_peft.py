"""Google's Tunix: `PeftTrainer` trains a small model. Its `ocp.CheckpointManager` is ckptkit's.

Run: `python tunix_peft.py ROOT [--kill-after STEP] [--stock]`
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

from tests.strangers.reporting import Run

STEPS = 6


class Model(nnx.Module):
    """Predicts the next token."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, 64, rngs=rngs)
        self.out = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token."""
        return self.out(nnx.relu(self.embed(tokens)))


def loss_of(model: Model, input_tokens: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Cross entropy of the next token."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(input_tokens[:, :-1]), input_tokens[:, 1:])
    return (losses * input_mask[:, 1:]).mean()


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last step."""
    model = Model(nnx.Rngs(0))
    saving = ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=2)
    last = STEPS if run.kill_after is None else run.kill_after
    config: Any = {"checkpoint_root_directory": str(run.root / "steps"), "checkpointing_options": saving}
    config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=last, **config)
    trainer = peft_trainer.PeftTrainer(model, run.notebook.slow(optax.adamw(1e-2)), config).with_loss_fn(loss_of)
    names = ("input_tokens", "input_mask")
    trainer = trainer.with_gen_model_input_fn(lambda each: {name: getattr(each, name) for name in names})
    first = trainer._train_steps
    tokens = np.random.default_rng(0).integers(0, 32, (last, 4, 16)).astype(np.int32)
    inputs = [peft_trainer.TrainingInput(input_tokens=each, input_mask=np.ones_like(each)) for each in tokens]
    trainer.train(inputs, skip_jit=False)  # it skips as many batches as it has trained
    run.reached(last)
    run.report(first, jax.tree.leaves(nnx.state(model, nnx.Param)))


if __name__ == "__main__":
    main(Run.from_arguments())
