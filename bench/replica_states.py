"""States of data replicas: a mesh of replicas over all devices of a job, and every dtype with random bits."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

DTYPES = (
    *("bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)


def put(value: np.ndarray, replicas: int, *spec: Any) -> jax.Array:
    """A global array over all devices, as so many replicas (`data`), each split over the rest (`fsdp`)."""
    shape = (replicas, jax.device_count() // replicas)
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def random_block(name: str, rng: np.random.Generator) -> np.ndarray:
    """16 x 24 elements of a dtype: any bits that it can have, NaN payloads among them, and a zero of each sign."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if name in ("bool", "int4"):
        return rng.integers(0, 2 if name == "bool" else 8, (16, 24)).astype(dtype)
    block = np.frombuffer(rng.bytes(16 * 24 * dtype.itemsize), dtype).reshape(16, 24).copy()
    block[3, 4:6] = np.array([0, 1]).astype(dtype) * -np.array(0).astype(dtype)
    return block


def every_dtype(replicas: int, *, x64: bool = True) -> dict[str, Any]:
    """Each dtype split, whole and as a scalar, and typed keys. `x64` with those of 64 bits, where JAX may have them."""
    rng = np.random.default_rng(3)
    state: dict[str, Any] = {}
    for name in DTYPES:
        block = random_block(name, rng)
        if name in ("int64", "uint64", "float64", "complex128") and not x64:
            continue
        state[f"{name}_split"] = put(block, replicas, "fsdp")
        state[f"{name}_whole"] = put(block[::2, 1:].copy(), replicas)
        state[f"{name}_scalar"] = put(block[3, 4].copy(), replicas)
    keys = np.arange(16, dtype=np.uint32).reshape(8, 2)
    state["key_split"] = jax.random.wrap_key_data(put(keys, replicas, "fsdp"))
    state["key_rbg"] = jax.random.wrap_key_data(put(np.arange(4, dtype=np.uint32), replicas), impl="rbg")
    return state


def bits_here(tree: Any) -> dict[str, list[str]]:
    """By leaf its dtype, and the digests of this process's shards."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = str(getattr(leaf, "dtype", type(leaf)))
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        blocks = [shard.data for shard in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [leaf]
        digests = [hashlib.sha256(np.asarray(block).tobytes()).hexdigest() for block in blocks]
        found[jax.tree_util.keystr(path)] = [name, *digests]
    return found
