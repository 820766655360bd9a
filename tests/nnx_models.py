"""NNX models with all in their state that is easily lost: normalisation, dropout streams, lists, an optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

RULES = (("hidden", "fsdp"), ("batch", "data"))
_ADAM = optax.adamw(1e-2)  # one for all: another one is another program to compile


class Net(nnx.Module):
    """Linear, batch norm, dropout, a list of layers; the first kernel is split over `hidden` when `named`."""

    def __init__(self, seed: int, *, named: bool = False, width: int = 8):
        rngs = nnx.Rngs(params=seed, dropout=seed + 1)
        metadata: dict[str, Any] = {"kernel_metadata": {"out_sharding": (None, "hidden")}} if named else {}
        self.first = nnx.Linear(4, width, rngs=rngs, **metadata)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 2, rngs=rngs, param_dtype=jnp.bfloat16)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Train(nnx.Module):
    """A net and its optimizer, stepped together."""

    def __init__(self, seed: int, *, named: bool = False):
        self.net = Net(seed, named=named)
        self.optimizer = nnx.Optimizer(self.net, _ADAM, wrt=nnx.Param)

    def step(self, seed: int) -> float:
        """One training step on data of `seed`; draws from the dropout stream."""
        return float(_step(self, jax.random.key(seed)))


@nnx.jit  # operation by operation, each would be compiled alone: seconds
def _step(train: Train, key: jax.Array) -> jax.Array:
    x = jax.random.normal(key, (8, 4))

    def loss(net: Net) -> jax.Array:
        return jnp.mean(jnp.square(net(x).astype(jnp.float32)))

    value, gradients = nnx.value_and_grad(loss)(train.net)
    train.optimizer.update(train.net, gradients)
    return value
