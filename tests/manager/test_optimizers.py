"""The state of every family of optimizers comes back from every tier, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optax import contrib

import ckptkit
from tests.cases import long_except

RATE = 0.01


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


# Optimizers that guides and papers chain, wrap and nest. Shampoo and SOAP are in no package that this one depends on.
FAMILIES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip, schedule, apply_every": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.rmsprop(optax.cosine_decay_schedule(RATE, 100)),
        optax.apply_every(2),
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), every_k_schedule=2).gradient_transformation(),
    "lookahead": lambda: optax.lookahead(optax.sgd(RATE), sync_period=2, slow_step_size=0.5),  # pyright: ignore[reportReturnType]
    "muon": lambda: contrib.muon(RATE),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), _matrices), optax.scale(-RATE)),
    "multi_transform": lambda: optax.multi_transform({"matrix": optax.adamw(RATE), "vector": optax.sgd(RATE)}, _labels),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "schedule-free": lambda: contrib.schedule_free_adamw(RATE),
    "lion with EMA": lambda: optax.chain(optax.lion(RATE), optax.ema(0.9)),
    "ademamix": lambda: contrib.ademamix(RATE),
}
TIERS = ("ram", "ssd", "durable")


Update = Callable[[dict[str, Any], int], dict[str, Any]]


def make(family: str) -> tuple[Update, dict[str, Any]]:
    """One update with gradients that the step gives, compiled as one program, and the state after three of them."""
    optimizer = FAMILIES[family]()

    @jax.jit
    def update(state: dict[str, Any], step: int) -> dict[str, Any]:
        params = state["params"]
        of = params.fast if isinstance(params, optax.LookaheadParams) else params
        gradients = jax.tree.map(lambda leaf: (jnp.cos(leaf.astype(jnp.float32) * (step + 1))).astype(leaf.dtype), of)
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], params)
        return {"params": optax.apply_updates(params, updates), "optimizer": optimizer_state}

    fast = {"w": jnp.linspace(-1, 1, 128, dtype=jnp.float32).reshape(8, 16), "b": jnp.ones(16, jnp.bfloat16)}
    params: Any = optax.LookaheadParams.init_synced(fast) if family == "lookahead" else fast
    state = {"params": params, "optimizer": jax.jit(optimizer.init)(params)}
    for step in range(3):
        state = update(state, step)
    return update, state


def bits(tree: Any) -> list[tuple[str, str, bytes]]:
    """Name, dtype and bytes of every leaf."""
    return [
        (jax.tree_util.keystr(path), str(leaf.dtype), np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.mark.parametrize(
    "family", long_except(["muon", "MultiSteps", "adafactor", "clip, schedule, apply_every"], FAMILIES)
)
def test_optimizer_state_comes_back_from_every_tier(family: str, tmp_path: Path) -> None:
    """A resumed run would take another step than the one that was interrupted."""
    update, state = make(family)
    following = bits(update(state, 3))
    abstract = ckptkit.abstract_state(state)
    for name in TIERS:
        fast = {"ram": ckptkit.Tier.ram, "ssd": ckptkit.Tier.ssd}.get(name)
        tiers = [fast(str(tmp_path / name), save=ckptkit.EverySteps(1))] if fast else []
        options = ocp.CheckpointManagerOptions(save_interval_steps=1000 if fast else 1)
        for turn in ("save", "restore"):
            with ckptkit.CheckpointManager(
                tmp_path / f"root-{name}", options=options, tiers=tiers, host_id="h"
            ) as manager:
                if turn == "save":
                    manager.save(0, args=ocp.args.StandardSave(state))  # the first is due everywhere
                    manager.wait_until_finished()
                    assert manager.save(3, args=ocp.args.StandardSave(state))
                    continue
                assert {record.step: record.tiers for record in manager.steps()}[3] == (name,)
                found = manager.restore(3, args=ocp.args.StandardRestore(abstract))
        assert jax.tree.structure(found) == jax.tree.structure(state), name
        assert bits(found) == bits(state), name
        assert bits(update(found, 3)) == following, name
