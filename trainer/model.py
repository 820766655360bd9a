"""A decoder-only transformer in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU or GELU.

Shapes are written with B rows, T tokens, D model width, N heads, K kv heads, H head width, F mlp width, V vocabulary.
Weights keep the dimensions that are split over devices apart (heads, not heads x width), so that the table in
`trainer.sharding` can name them.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config import ModelConfig

ROPE_THETA = 10_000.0
NORM_EPSILON = 1e-6
Place = Callable[[jax.Array, Literal["stream", "table"]], jax.Array]


def weight(key: jax.Array, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A float32 parameter of normal noise with standard deviation `std`."""
    return nnx.Param(std * jax.random.normal(key, shape, jnp.float32))


class RMSNorm(nnx.Module):
    """Divides by the root mean square over D, in float32 for any input dtype; `scale` is float32[D]."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., D], same dtype out."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPSILON)
        return (y * self.scale[...]).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): turn each pair of [B, T, heads, H] by t x frequency."""
    half = x.shape[-1] // 2
    frequency = ROPE_THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency  # [T, H/2]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero a `rate` of the elements and scale the rest up; without a key (evaluation), do nothing."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention in which N / K query heads share one key and value head (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        s = config.size
        std, out_std = s.d_model**-0.5, (2 * s.layers * s.d_model) ** -0.5  # GPT-2: damp what adds to the stream
        self.query = weight(rngs.params(), (s.d_model, s.heads, s.head_dim), std)
        self.key_value = weight(rngs.params(), (s.d_model, 2, s.kv_heads, s.head_dim), std)
        self.out = weight(rngs.params(), (s.heads, s.head_dim, s.d_model), out_std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mix tokens: [B, T, D] to [B, T, D]."""
        query = jnp.einsum("btd,dnh->btnh", x, self.query[...].astype(x.dtype))
        key, value = jnp.einsum("btd,dckh->cbtkh", x, self.key_value[...].astype(x.dtype))
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return jnp.einsum("btnh,nhd->btd", mixed, self.out[...].astype(x.dtype))


class Mlp(nnx.Module):
    """SwiGLU (Shazeer 2020) or GELU. `up` holds the gate next to the input weight: [D, 2 or 1, F]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        s = config.size
        self.gated = config.mlp == "swiglu"
        self.up = weight(rngs.params(), (s.d_model, 2 if self.gated else 1, s.d_ff), s.d_model**-0.5)
        self.down = weight(rngs.params(), (s.d_ff, s.d_model), (2 * s.layers * s.d_ff) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Transform each token: [B, T, D] to [B, T, D]."""
        hidden = jnp.einsum("btd,dcf->cbtf", x, self.up[...].astype(x.dtype))
        hidden = jax.nn.silu(hidden[1]) * hidden[0] if self.gated else jax.nn.gelu(hidden[0])
        return jnp.einsum("btf,fd->btd", hidden, self.down[...].astype(x.dtype))


class Block(nnx.Module):
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = RMSNorm(config.size.d_model)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.size.d_model)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Add attention, then the MLP, to the stream [B, T, D]."""
        keys = (None, None) if key is None else jax.random.split(key)
        x = x + dropout(self.attention(self.attention_norm(x)), self.dropout, keys[0])
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[1])


class Transformer(nnx.Module):
    """The language model. Parameters are float32; matmuls run in `config.compute_dtype`, logits are float32."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        s = config.size
        self.config = config
        self.embed = weight(rngs.params(), (s.vocab, s.d_model), 0.02)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(s.layers)])
        self.norm = RMSNorm(s.d_model)
        if config.head == "untied":
            self.head = weight(rngs.params(), (s.d_model, s.vocab), 0.02)

    def __call__(
        self, tokens: jax.Array, *, dropout_key: jax.Array | None = None, place: Place = lambda x, _: x
    ) -> jax.Array:
        """Predict the next token.

        Args:
            tokens: int32[B, T], each below V.
            dropout_key: a typed key; None (evaluation) drops nothing.
            place: pins the sharding of an array: the "stream" [B, T, D] between blocks, and the embedding
                "table" [V, D] where it is used. Without it the compiler chooses, at times badly.

        Returns:
            float32[B, T, V] logits; position t sees tokens 0..t.
        """
        config = self.config
        keys = [
            None if dropout_key is None else jax.random.fold_in(dropout_key, i) for i in range(1 + config.size.layers)
        ]
        x = place(self.embed[...].astype(config.compute_dtype), "table")[tokens]
        x = place(dropout(x, config.dropout, keys[0]), "stream")
        for block, key in zip(self.blocks, keys[1:], strict=True):
            apply = jax.checkpoint(block.__call__) if config.remat else block
            x = place(apply(x, key), "stream")
        head = self.embed[...].T if config.head == "tied" else self.head[...]
        return jnp.einsum(
            "btd,dv->btv",
            self.norm(x),
            head.astype(config.compute_dtype),
            preferred_element_type=jnp.float32,
        )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean negative log likelihood, in nats: float32[B, T, V] and int32[B, T] to float32[]."""
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(log_normaliser - picked)
