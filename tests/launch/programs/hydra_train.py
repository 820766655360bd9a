"""Hydra, which reads the configuration, the command line and a folder for its output."""

from pathlib import Path

import hydra  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from training import train


@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    """The root of the run is relative to the folder of the job, into which Hydra changes."""
    keys = jax.random.split(jax.random.key(cfg.seed), 2)
    params = {"w1": jax.random.normal(keys[0], (16, 32)), "w2": jax.random.normal(keys[1], (32, 4))}
    optimizer = optax.adam(cfg.optimizer.rate)

    def loss_of(params, x):
        return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - x[:, :4]) ** 2)

    @jax.jit
    def step(state, number):
        grads = jax.grad(loss_of)(state["params"], jax.random.normal(jax.random.key(number), (8, 16)))
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    train(Path.cwd(), {"params": params, "opt": optimizer.init(params)}, step)


if __name__ == "__main__":
    main()  # pyright: ignore[reportCallIssue]  Hydra gives it the configuration
