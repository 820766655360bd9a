"""The model of the `125m` state: GPT-2 small in Flax NNX with AdamW, one array per weight and per bias, 590 leaves.

The trainer's own model packs its projections and has half as many leaves; what is saved out there has this many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Size:
    """Sizes of GPT-2 small (124 million parameters); its vocabulary of 50,257 padded so that 8 divides it."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50_304
    positions: int = 1024

    def scaled(self, scale: float) -> Gpt2Size:
        """As many leaves, about `scale` as many bytes."""
        if scale == 1.0:
            return self
        width = max(16, round(self.width * scale**0.5) // 16 * 16)
        vocab = max(64, round(self.vocab * scale**0.5) // 64 * 64)
        return Gpt2Size(layers=self.layers, width=width, heads=2, vocab=vocab, positions=64)


class Attention(nnx.Module):
    """Causal attention with separate query, key, value and output projections."""

    def __init__(self, size: Gpt2Size, rngs: nnx.Rngs):
        self.heads = size.heads
        self.query = nnx.Linear(size.width, size.width, rngs=rngs)
        self.key = nnx.Linear(size.width, size.width, rngs=rngs)
        self.value = nnx.Linear(size.width, size.width, rngs=rngs)
        self.out = nnx.Linear(size.width, size.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mix tokens: [B, T, D] to [B, T, D]."""
        split = (*x.shape[:2], self.heads, -1)
        query, key, value = (project(x).reshape(split) for project in (self.query, self.key, self.value))
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    """Pre-norm residual block: 16 arrays."""

    def __init__(self, size: Gpt2Size, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(size.width, rngs=rngs)
        self.attention = Attention(size, rngs)
        self.norm_2 = nnx.LayerNorm(size.width, rngs=rngs)
        self.up = nnx.Linear(size.width, 4 * size.width, rngs=rngs)
        self.down = nnx.Linear(4 * size.width, size.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Add attention, then the MLP, to the stream [B, T, D]."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))


class Gpt2(nnx.Module):
    """The language model, its head tied to the embedding."""

    def __init__(self, size: Gpt2Size, rngs: nnx.Rngs):
        self.token = nnx.Embed(size.vocab, size.width, rngs=rngs)
        self.position = nnx.Embed(size.positions, size.width, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Predict the next token: int32[B, T] to float32[B, T, V]."""
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.token.attend(self.norm(x))


class Train(nnx.Module):
    """Model and optimizer: what is saved."""

    def __init__(self, size: Gpt2Size):
        self.model = Gpt2(size, nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(1e-4), wrt=nnx.Param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt2Program:
    """Shapes of the state as nested dicts with names for keys, and the step over such a tree."""

    shapes: Tree
    step: Callable[[Tree, jax.Array], tuple[Tree, jax.Array]]  # (state, int32[B, T + 1] tokens) -> (state, loss)


def gpt2_program(size: Gpt2Size) -> Gpt2Program:
    """The program of a size; nothing is allocated."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Train(size)))
    flat, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    names = [_names(keypath) for keypath, _ in flat]

    def step(tree: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        train = nnx.merge(graphdef, jax.tree_util.tree_unflatten(treedef, [_look_up(tree, name) for name in names]))

        def loss_of(model: Gpt2) -> jax.Array:
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(train.model)
        train.optimizer.update(train.model, gradients)
        return _nested(names, jax.tree.leaves(nnx.state(train))), loss

    return Gpt2Program(shapes=_nested(names, [leaf for _, leaf in flat]), step=step)


def _names(keypath: Any) -> tuple[str, ...]:
    """A key path as names; NNX's own `.value` at its end is left out."""
    return tuple(str(key.key) for key in keypath if isinstance(key, jax.tree_util.DictKey))


def _nested(names: list[tuple[str, ...]], leaves: list[Any]) -> Tree:
    root: Tree = {}
    for name, leaf in zip(names, leaves, strict=True):
        node = root
        for part in name[:-1]:
            node = node.setdefault(part, {})
        node[name[-1]] = leaf
    return root


def _look_up(tree: Tree, name: tuple[str, ...]) -> Any:
    node: Any = tree
    for part in name:
        node = node[part]
    return node
