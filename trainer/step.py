"""The training step over a functional state.

The state is one `nnx.State` pytree: `model` (parameters), `optimizer` (moments and counters) and `dropout` (a key and
a counter). A checkpoint of it, with the data position, is all that a resumed run needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ckptkit.resume import compiled
from trainer.config import ModelConfig, OptimizerConfig
from trainer.model import Transformer, cross_entropy
from trainer.optimizer import make_optimizer
from trainer.sharding import OFFLOADED, USE_SPECS, P, batch_sharding, shard_state

State = nnx.State
StepFn = Callable[[State, jax.Array], tuple[State, jax.Array]]


class Train(nnx.Module):
    """The trained values, in the shape in which they are saved."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, seed: int):
        weights, drops = jax.random.split(jax.random.key(seed))
        self.model = Transformer(model, nnx.Rngs(params=weights))
        self.optimizer = nnx.Optimizer(self.model, make_optimizer(optimizer), wrt=nnx.Param)
        self.dropout = nnx.RngStream(drops, tag="dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The jitted functions of a run and the abstract state they share (a sharding on every leaf)."""

    mesh: Mesh
    abstract_state: State
    init: Callable[[], State]
    step: Any  # (state, tokens) -> (state, loss), donates state
    gradient: Any  # (state, tokens) -> (gradients, loss), leaves state alone: the first half of a step
    update: Any  # (state, gradients) -> state, donates state: the second half


def abstract_train(model: ModelConfig, optimizer: OptimizerConfig) -> tuple[nnx.GraphDef[Train], State]:
    """Structure and shapes of the state; allocates nothing, for any size."""
    return nnx.split(nnx.eval_shape(lambda: Train(model, optimizer, seed=0)))


def make_program(model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh, *, seed: int) -> Program:
    """Build the functions of a run; nothing is compiled or allocated until they are called."""
    graphdef, abstract = abstract_train(model, optimizer)
    abstract_state = shard_state(abstract, mesh, offload=optimizer.offload)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    replicated = NamedSharding(mesh, P())

    def place(x: jax.Array, what: str) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, USE_SPECS[what]))

    def init() -> State:
        return nnx.state(Train(model, optimizer, seed))

    def gradient(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        train = nnx.merge(graphdef, state)
        model_def, params = nnx.split(train.model, nnx.Param)
        step_key = jax.random.fold_in(train.dropout.key[...], train.dropout.count[...])

        def loss_of(params: State, rows: jax.Array, key: jax.Array) -> jax.Array:
            logits = nnx.merge(model_def, params)(rows[:, :-1], dropout_key=key, place=place)
            return cross_entropy(logits, rows[:, 1:])

        return _accumulate(jax.value_and_grad(loss_of), params, tokens, step_key, optimizer.accumulate)

    def update(state: State, gradients: State) -> State:
        train = nnx.merge(graphdef, _on_device(state, shardings))
        train.optimizer.update(train.model, gradients)
        train.dropout.count[...] += 1  # the step's key is spent
        return nnx.state(train)

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        gradients, loss = gradient(state, tokens)
        return update(state, gradients), loss

    # It runs once: on CPU, XLA's level 1 compiles it in half the time (2.4 s instead of 4.6 for `tiny`).
    quickly = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return Program(
        mesh=mesh,
        abstract_state=abstract_state,
        init=jax.jit(init, out_shardings=shardings, compiler_options=quickly),
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated)),
        gradient=jax.jit(gradient, out_shardings=(shardings["model"], replicated)),
        update=jax.jit(update, donate_argnums=0, out_shardings=shardings),
    )


def _on_device(state: State, shardings: State) -> State:
    """The state with offloaded moments in the device's memory, for the update; `out_shardings` take them back."""

    def fetched(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        is_there = sharding.memory_kind != OFFLOADED
        return leaf if is_there else jax.device_put(leaf, sharding.with_memory_kind("device"))

    return jax.tree.map(fetched, state, shardings)


def _accumulate(
    value_and_grad: Callable[..., tuple[jax.Array, State]],
    params: State,
    tokens: jax.Array,
    key: jax.Array,
    microbatches: int,
) -> tuple[State, jax.Array]:
    """Mean gradients and loss over the microbatches of int32[rows, T + 1], one in memory at a time.

    Microbatch j takes every microbatches-th row from row j, so each device cuts up its own rows and none move.
    """
    if microbatches == 1:
        loss, gradients = value_and_grad(params, tokens, key)
        return gradients, loss
    split = tokens.reshape(-1, microbatches, tokens.shape[1]).swapaxes(0, 1)

    def add(total: tuple[jax.Array, State], part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        rows, i = part
        return jax.tree.map(jnp.add, total, value_and_grad(params, rows, jax.random.fold_in(key, i))), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, gradients), _ = jax.lax.scan(add, zeros, (split, jnp.arange(microbatches)))
    return jax.tree.map(lambda g: g / microbatches, gradients), loss / microbatches


def programs_cache(compile_cache: str | None) -> Path | None:
    """The directory of compiled programs, in that of JAX's compile cache; None if that is in a bucket."""
    return None if compile_cache is None or "://" in compile_cache else Path(compile_cache) / "programs"


def compile_step(
    program: Program, batch_shape: tuple[int, int], *, cache: Path | None = None, key: Any = None
) -> StepFn:
    """Compile now, or load what an earlier start of the same program left in `cache`.

    Returns `take_step(state, tokens) -> (state, loss)`, which consumes `state`.

    Args:
        program: the functions.
        batch_shape: (global batch, T + 1) of the int32 tokens.
        cache: directory of compiled programs, of this user alone; None keeps none.
        key: what `program` was made from, besides sources: its configuration.
    """
    tokens = jax.ShapeDtypeStruct(batch_shape, jnp.int32, sharding=batch_sharding(program.mesh))
    return compiled(program.step, program.abstract_state, tokens, cache=cache, key=key)
