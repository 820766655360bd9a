"""Keras: `model.fit` with the `OrbaxCheckpoint` callback, over ckptkit.

    python keras_fit.py ROOT [--kill-after EPOCH] [--stock]

Its `orbax.checkpoint.v1.training.Checkpointer` is ckptkit's.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras  # pyright: ignore[reportMissingImports]
import numpy as np

from tests.strangers.reporting import Run

EPOCHS = 6


def make_model(run: Run) -> Any:
    """A model with dropout, whose seed is a part of the state."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((16,)), *layers])

    def loss_of(wanted: Any, found: Any) -> Any:
        return keras.losses.mean_squared_error(wanted, run.notebook.computed(found))

    model.compile(keras.optimizers.Adam(1e-2), loss_of)
    model.optimizer.build(model.trainable_variables)
    return model


def main(run: Run) -> None:
    """Trains from the newest checkpoint to the last epoch."""
    model = make_model(run)
    saving = keras.callbacks.OrbaxCheckpoint(str(run.root / "steps"))
    newest = saving.checkpointer.latest
    if newest is not None:
        model.set_state_tree(saving.checkpointer.load_checkpointables(newest.step, {"pytree": None})["pytree"])

    def on_epoch_end(epoch: int, logs: Any) -> None:
        del logs
        saving.wait_until_finished()
        run.reached(epoch)

    numbers = np.random.default_rng(0).normal(size=(64, 20)).astype(np.float32)
    first = 0 if newest is None else newest.step + 1
    callbacks = [saving, keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)]
    data: Any = {"x": numbers[:, :16], "y": numbers[:, 16:], "batch_size": 16, "shuffle": False}
    model.fit(**data, epochs=EPOCHS, initial_epoch=first, verbose=0, callbacks=callbacks)
    run.report(first, jax.tree.leaves(model.get_state_tree()))


if __name__ == "__main__":
    main(Run.from_arguments())
