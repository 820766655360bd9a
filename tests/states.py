"""States to save: small, sharded in every way, with the leaves that are easily lost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp")


def mesh() -> jax.sharding.Mesh:
    """Four devices as two replicas of two."""
    return jax.make_mesh((2, 2), MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)


def put(value: Any, *spec: Any) -> jax.Array:
    """A global array on `mesh()`."""
    return jax.device_put(value, NamedSharding(mesh(), PartitionSpec(*spec)))


def make_state(seed: int = 0) -> dict[str, Any]:
    """Sharded, replicated, scalar, low-precision, key and host leaves; different for every seed."""
    return {
        "w": put(jnp.arange(64.0).reshape(8, 8) + seed, "fsdp"),
        "x": put(-jnp.arange(64.0).reshape(8, 8) * seed, "data", "fsdp"),
        "b": put(jnp.full(4, seed, jnp.bfloat16)),
        "flags": put(jnp.arange(8) % 3 == seed % 3, "data"),
        "small": put(jnp.arange(8, dtype=jnp.int8) - seed % 7, "data"),
        "key": put(jax.random.key(seed)),
        "keys": put(jax.random.split(jax.random.key(seed), 4), "data"),
        "list": [put(jnp.float32(seed)), put(jnp.zeros((2, 2), jnp.float16))],
        "host": np.arange(3) + seed,
        "count": seed,
        "rate": seed / 3,
    }


def abstract(state: Any) -> Any:
    """The target of a restore: shapes, dtypes and shardings of `state`."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(of, state)


def raw(leaf: Any) -> Any:
    """The bytes of a leaf, so that -0.0 and NaN payloads count."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).dtype, np.asarray(leaf).shape, np.asarray(leaf).tobytes()


def assert_same(found: Any, expected: Any) -> None:
    """Bit equality of two trees, leaf by leaf."""
    found_leaves, found_tree = jax.tree_util.tree_flatten_with_path(found)
    expected_leaves, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    assert found_tree == expected_tree
    for (path, a), (_, b) in zip(found_leaves, expected_leaves, strict=True):
        assert raw(a) == raw(b), jax.tree_util.keystr(path)


def assert_same_shards(found: Any, expected: Any) -> None:
    """Bit equality of this process's shards of two trees, leaf by leaf."""

    def shards(leaf: Any) -> Any:
        return [each.data for each in leaf.addressable_shards] if isinstance(leaf, jax.Array) else leaf

    assert_same(jax.tree.map(shards, found), jax.tree.map(shards, expected))


def save_args(state: Any, step: int) -> Any:
    """A state and its data position, as Orbax's trainers save them."""
    return ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"step": step}))  # pyright: ignore[reportCallIssue]


def restore_args(target: Any) -> Any:
    """The arguments that restore what `save_args` saved."""
    return ocp.args.Composite(state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
