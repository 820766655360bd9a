"""Google's Tunix trains with its checkpoints through ckptkit: its import of Orbax is all that is changed.

    python tunix_trainer.py DIRECTORY

Its `PeftTrainer` saves model, optimizer and custom metadata through `ocp.CheckpointManager`. Trained without a break
over stock Orbax, and with a break over ckptkit, the weights are the same; and each resumes what the other saved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.sft import checkpoint_manager, peft_trainer  # pyright: ignore[reportMissingImports]

import ckptkit

BREAK, END = 5, 9


class Model(nnx.Module):
    """A small one."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, 64, rngs=rngs)
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the next token."""
        return self.out(nnx.relu(self.hidden(self.embed(tokens))))


def loss_of(model: Model, input_tokens: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Cross entropy of the next token."""
    logits = model(input_tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, input_tokens[:, 1:])
    return (losses * input_mask[:, 1:]).mean()


def batches(first: int, last: int) -> Iterator[peft_trainer.TrainingInput]:
    """The batches of these steps; each depends on its step alone."""
    for step in range(first, last):
        tokens = np.random.default_rng(step).integers(0, 32, (4, 16)).astype(np.int32)
        yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


def train(root: Path, last: int) -> tuple[int, dict[str, bytes]]:
    """From the newest checkpoint below `root` to step `last`: the step it began at, and the weights."""
    model = Model(nnx.Rngs(0))
    options = ocp.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000, max_steps=last, checkpoint_root_directory=str(root), checkpointing_options=options
    )
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-2), config).with_loss_fn(loss_of)
    trainer = trainer.with_gen_model_input_fn(
        lambda each: {"input_tokens": each.input_tokens, "input_mask": each.input_mask}
    )
    began = trainer._train_steps
    # It counts the batches that it has seen, and skips as many of a new iterator.
    trainer.train(list(batches(0, last)), skip_jit=False)
    return began, {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    }


def through(manager: Any) -> None:
    """Changes the import: what `import orbax.checkpoint as ocp` gives Tunix has another `CheckpointManager`."""
    changed = SimpleNamespace(**{**{name: getattr(ocp, name) for name in dir(ocp)}, "CheckpointManager": manager})
    checkpoint_manager.ocp = changed


def main(root: Path) -> None:
    """Fails where anything differs."""
    tiers = [ckptkit.Tier.ram(str(root / "ram"), save=ckptkit.EverySteps(2))]
    log, committed = ckptkit.EventLog(), []
    log.observe(lambda event: committed.append((event.tier, event.step)) if event.kind == "committed" else None)
    ours = partial(ckptkit.CheckpointManager, tiers=tiers, events=log)

    began, expected = train(root / "straight", END)
    assert began == 0
    through(ours)
    assert train(root / "broken", BREAK)[0] == 0
    began, found = train(root / "broken", END)
    assert began == BREAK
    assert found == expected, "other weights after a resume"
    through(ocp.CheckpointManager)
    began, found = train(root / "broken", END + 2)
    assert began == END, "stock Orbax goes on from what ckptkit wrote"
    straight = train(root / "longer", END + 2)[1]
    assert found == straight
    through(ours)
    began, found = train(root / "straight", END + 2)
    assert began == END, "ckptkit goes on from what stock Orbax wrote"
    assert found == straight
    assert jnp.isfinite(jnp.asarray(np.frombuffer(next(iter(found.values())), np.float32))).all()
    assert {tier for tier, _ in committed} >= {"durable"}, committed
    print(f"TUNIX: resumed at {BREAK}, weights equal; committed {sorted(set(committed))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
