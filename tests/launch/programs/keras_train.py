"""Keras over JAX, which it finds by a variable that the script sets. Its weights, seeds and optimizer are saved."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import sys
from pathlib import Path

import keras  # pyright: ignore[reportMissingImports]
import numpy as np
from training import train

keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
model = keras.Sequential([keras.Input((16,)), *layers])
model.compile(keras.optimizers.Adam(1e-2), "mse")
model.optimizer.build(model.trainable_variables)
rows = np.random.default_rng(0).normal(size=(16, 20)).astype(np.float32)


def step(state, number):
    """The state is in the model."""
    del state
    model.train_on_batch(rows[:, :16] + number, rows[:, 16:])
    return model.get_state_tree()


def use(state):
    """Puts a restored state into the model."""
    model.set_state_tree(state)
    return state


train(Path(sys.argv[1]), model.get_state_tree(), step, use)
