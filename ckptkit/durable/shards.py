"""A leaf that is what this process writes of one global array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckptkit.manifest import LeafRecord
from ckptkit.sharding import Box


@dataclass(eq=False, slots=True, kw_only=True)
class HostShards:
    """The boxes of one leaf that this process writes: disjoint over all processes, whole cells each.

    `blocks` are views of host memory that must not change until the save has finished. `sidecar` is what this
    process records of the whole item, and `on_written` is called once its bytes are written and before Orbax
    commits the item: the same two objects on every leaf of an item.
    """

    record: LeafRecord
    blocks: list[tuple[Box, np.ndarray]]
    sidecar: bytes
    on_written: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes of the leaf."""
        return sum(block.nbytes for _, block in self.blocks)


def shards_of(tree: Any) -> list[HostShards]:
    """The leaves of a tree that are `HostShards`, in its order."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, HostShards)]


def has_host_shards(args: Any) -> bool:
    """Whether save arguments are a tree with `HostShards`, so that a sidecar is written with it."""
    return bool(shards_of(getattr(args, "item", None)))
