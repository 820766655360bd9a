"""Digests of a state in memory, by which two runs are compared bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckptkit.model.digests import digest_of
from ckptkit.util.own_context import own_context
from ckptkit.util.whole_file import write_whole

STATE_DIGEST = "CKPTKIT_STATE_DIGEST"  # a file to which `state_digest` also writes; `{process}` is the process's number

# By name of the leaf, index of the box and number of the replica: the digest, and words for a report.
BoxDigests = dict[tuple[str, str, int], tuple[str, str]]


def state_digest(state: Any) -> str:
    """One digest of all that this process holds of a state: 32 hexadecimal digits.

    Two runs of the same program on the same devices have equal states if their digests are equal on every process. It
    covers the name, type, shape and bytes of each leaf, and each replica. Under `ckptkit chaos` it is also written to
    the file that the environment names, where that command compares it. Cost: one host copy of a box at a time.
    """
    lines = [f"{name} {index} {replica} {told[0]}" for (name, index, replica), told in box_digests(state).items()]
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        lines.append(f"{_name(path)} {getattr(leaf, 'dtype', type(leaf).__name__)} {np.shape(leaf)}")
    found = digest_of("\n".join(sorted(lines)).encode())
    if target := os.environ.get(STATE_DIGEST):
        write_whole(Path(target.replace("{process}", str(jax.process_index()))), found)
    return found


@own_context()
def box_digests(state: Any) -> BoxDigests:
    """The digest of every box that this process holds, replicas too: one of them may differ."""
    found: BoxDigests = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = _name(path)
        if not isinstance(leaf, jax.Array):
            found[name, "", 0] = digest_of(np.ascontiguousarray(leaf).tobytes()), name
            continue
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for shard in data.addressable_shards:
            box = np.array(shard.data, order="C")
            found[name, str(shard.index), shard.replica_id] = digest_of(box.tobytes()), f"{name} on {shard.device}"
    return found


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
