"""Reads zarr cells of a step on a local disk directly from their files: TensorStore would copy twice."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.blosc import HEAD_BYTES, copied_plain, may_be_encoded
from ckptkit.durable.cells.ocdbt import Placed, places
from ckptkit.durable.cells.tensorstore_wait import awaited
from ckptkit.durable.cells.writer import cell_key
from ckptkit.errors import CheckpointError
from ckptkit.model.boxes import Box
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord
from ckptkit.model.paths import array_prefix
from ckptkit.store.backends import properties_of
from ckptkit.util.disk_file import FileReads

_Item = dict[str, Placed | bytes]


@final
class PlacedCells:
    """The places of one step's cells, read from its databases once for each item; empty for a bucket.

    A shortcut that may decline: cells that it cannot get or understand are left to TensorStore, which reports the
    reason. Digests decide whether bytes are right. Safe from several threads.
    """

    def __init__(self, step_url: str, profile: DurableProfile):
        self._directory = Path(step_url.removeprefix("file://")) if properties_of(step_url).file_system else None
        self._profile = profile
        self._lock = threading.Lock()
        self._items: dict[str, _Item] = {}
        self._files: dict[tuple[str, str], FileReads | None] = {}

    def has(self, item: str) -> bool:
        """Whether `fill` knows cells of the item. Cost the first time: its database's nodes, 10 microseconds a key."""
        return bool(self._places(item))

    def fill(self, item: str, leaf: LeafRecord, cell: Box, target: np.ndarray) -> bool:
        """Fills flat `target` with the bytes of a cell that is stored as it is, whole; False where it is not."""
        size_bytes = leaf.cell_bytes
        if target.nbytes != size_bytes or cell.shape != leaf.cell:  # padded, at the end of an axis
            return False
        place = self._places(item).get(cell_key(array_prefix(leaf.name), leaf, cell))
        if isinstance(place, bytes):
            return copied_plain(place, target)
        if place is None or place.length != size_bytes:
            return False
        with suppress(OSError, EOFError, ValueError):
            if (file := self._file(item, place.path)) is not None:
                file.fill(target, place.start)
                return not may_be_encoded(target[:HEAD_BYTES].tobytes(), size_bytes, size_bytes)
        return False

    def file_of(self, item: str, leaf: LeafRecord, cell: Box) -> str | None:
        """The file that holds a cell, by its path below the step; None where a tree holds it, or it is not known."""
        place = self._places(item).get(cell_key(array_prefix(leaf.name), leaf, cell))
        return f"{item}/{place.path}" if isinstance(place, Placed) else None

    def _places(self, item: str) -> _Item:
        if self._directory is None:
            return {}
        with self._lock:
            if (found := self._items.get(item)) is None:
                self._items[item] = found = self._read_places(self._directory / item)
            return found

    def _read_places(self, directory: Path) -> _Item:
        def finished(future: Any) -> Any:
            return awaited([future], self._profile, str(directory))[0]

        try:
            base = finished(ts.KvStore.open({"driver": "file", "path": f"{directory}/"}))
            return places(base, finished)
        except (CheckpointError, OSError, ValueError, KeyError, TypeError, IndexError):
            return {}

    def _file(self, item: str, path: str) -> FileReads | None:
        with self._lock:
            key = (item, path)
            if key not in self._files:
                assert self._directory is not None
                self._files[key] = None  # once is enough for one that is not there
                self._files[key] = FileReads(self._directory / item / path)
            return self._files[key]
