"""A leaf that is what this process writes of one global array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
