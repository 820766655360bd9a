"""Single arrays and random keys, as the files that Orbax's handlers of such items read: plain zarr, one chunk each."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.durable.cells.writer import zarr_text
from ckptkit.durable.orbax.files import process_files, tree_files
from ckptkit.durable.orbax.host_shards import HostShards
from ckptkit.durable.orbax.partial import names_in
from ckptkit.durable.orbax.shardings import sharding_text
from ckptkit.model import paths
from ckptkit.model.manifest import LeafRecord

_ARRAY, _JAX_KEY, _NUMPY_KEY = "checkpoint", "jax_random_key", "np_random_key"  # Orbax's names, which are settings


def array_files(value: Any) -> dict[str, bytes]:
    """The item of an array or a number that this process holds whole."""
    return _tree_files({_ARRAY: value})


def jax_key_files(key: jax.Array) -> dict[str, bytes]:
    """The item of a random key of JAX, typed or not."""
    typed = bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))
    return _key_files(_JAX_KEY, array_files(jax.random.key_data(key)), {"typed": typed})


def numpy_key_files(state: tuple[Any, ...] | dict[str, Any]) -> dict[str, bytes]:
    """The item of a random state of NumPy."""
    return _key_files(_NUMPY_KEY, _tree_files(state), {"legacy": isinstance(state, tuple)})


def _key_files(name: str, files: dict[str, bytes], words: dict[str, bool]) -> dict[str, bytes]:
    parts = {name: files, f"{name}_metadata": {paths.JSON_VALUE: json.dumps(words).encode()}}
    marks = {f"{part}/{paths.COMMIT_MARK}": b"Checkpoint commit was successful" for part in parts}
    return {f"{part}/{file}": data for part, below in parts.items() for file, data in below.items()} | marks


def _tree_files(tree: Any) -> dict[str, bytes]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    files, stored = dict[str, bytes](), list[Any]()
    for keypath, leaf in leaves:
        if isinstance(leaf, str):
            stored.append(leaf)
            continue
        record, block = _described(names_in(keypath), leaf)
        below = paths.array_prefix(record.name)
        files[f"{below}.zarray"] = zarr_text(record.dtype, record.shape, record.cell)
        files[below + (".".join("0" * block.ndim) or "0")] = block.tobytes()
        stored.append(HostShards(record=record, blocks=[]) if isinstance(leaf, jax.Array) else leaf)
    shards = [leaf for leaf in stored if isinstance(leaf, HostShards)]
    if shards:
        files |= process_files(shards, 0)
    return files | tree_files(treedef.unflatten(stored), ocdbt=False)


def _described(path: tuple[str, ...], leaf: Any) -> tuple[LeafRecord, np.ndarray]:
    extra = {}
    if isinstance(leaf, jax.Array):
        extra = {} if (sharding := sharding_text(leaf.sharding)) is None else {"sharding": sharding}
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            extra["key_impl"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
    block = np.asarray(leaf)
    shape = block.shape
    record = LeafRecord(path=path, keys="", kind="jax", shape=shape, dtype=block.dtype.name, cell=shape, extra=extra)
    return record, block
