"""JAX in 64 bits, by a variable that the script sets before it imports JAX."""

import os

os.environ["JAX_ENABLE_X64"] = "1"

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from training import train


@jax.jit
def step(state, number):
    """Float64 and int64 beyond the range of 32 bits."""
    noise = jax.random.normal(jax.random.key(number), state["w"].shape)
    return {"w": 0.999 * state["w"] + 1e-3 * jnp.tanh(state["w"] @ noise), "count": state["count"] * 1024 + 1}


train(Path(sys.argv[1]), {"w": jnp.linspace(0.0, 1.0, 4096).reshape(64, 64), "count": jnp.asarray(1)}, step)
