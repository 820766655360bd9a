"""Writes cells into an item's OCDBT tree one after the other, for whoever cannot hold an item in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import numpy as np
import tensorstore as ts

from ckptkit.manifest import LeafRecord
from ckptkit.sharding import Box

_CACHE_BYTES = 32 << 20


@final
class CellWriter:
    """The zarr arrays of an item directory on a local disk, as `host_shards` makes them (docs/FORMAT.md).

    Holds up to `commit_bytes` and then commits them: a commit of its own for every cell is slow.
    """

    def __init__(self, item: Path, commit_bytes: int):
        self._item = item
        self._commit_bytes = commit_bytes
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._begin()

    def write(self, leaf: LeafRecord, cell: Box, block: np.ndarray) -> None:
        """One cell; an array that is not there yet is made. Raises ValueError as TensorStore does."""
        self.create(leaf)
        self._opened[leaf.name][cell.slices()].write(block).result()
        self._pending_bytes += block.nbytes
        if self._pending_bytes >= self._commit_bytes:
            self.finish()

    def create(self, leaf: LeafRecord) -> None:
        """The array, where it is not there yet: one without elements has no cell that would make it."""
        if leaf.name not in self._opened:
            self._opened[leaf.name] = ts.open(
                _spec(self._item, leaf),
                create=True,
                open=True,
                context=self._context,
                transaction=self._transaction,
                dtype=ts.dtype(np.dtype(leaf.dtype)),
                shape=leaf.shape,
            ).result()

    def finish(self) -> None:
        """Commits what is held."""
        self._transaction.commit_sync()
        self._begin()

    def _begin(self) -> None:
        self._transaction = ts.Transaction(atomic=True)
        self._pending_bytes = 0
        self._opened: dict[str, Any] = {}  # an array belongs to the transaction that it was opened in


def _spec(item: Path, leaf: LeafRecord) -> dict[str, Any]:
    return {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{leaf.name}/"},
        "metadata": {"chunks": list(leaf.cell), "compressor": None, "dimension_separator": "."},
        "store_data_equal_to_fill_value": True,
    }
