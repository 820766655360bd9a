"""Zarr cells out of OCDBT, ahead of those who ask for them: the store's latency is paid once, not for every cell."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple, final

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.tensorstore_wait import awaited
from ckptkit.durable.cells.writer import cell_key, kvstore_context, kvstore_spec, zarr_text
from ckptkit.errors import TransientStoreError
from ckptkit.model.boxes import Box, cells_of
from ckptkit.model.durable_profile import COMPRESSORS, Codec, DurableProfile
from ckptkit.model.manifest import BoxRecord, LeafRecord
from ckptkit.model.paths import array_prefix

Wanted = tuple[str, LeafRecord, BoxRecord, Box]  # item, leaf, a stored box, and the part of the leaf that is wanted
_Key = tuple[str, tuple[str, ...], tuple[int, ...]]
_HEADER = struct.Struct("<4x I 4x I")  # blosc 1: four small fields, bytes before, block size, bytes after
HEAD_BYTES = _HEADER.size


class _Read(NamedTuple):
    """A read that was begun, and by which of the clients."""

    future: Any
    client: int
    item: str
    leaf: LeafRecord
    cell: Box


@final
class CellReader:
    """The cells of one step as the bytes in its databases; digests decide whether they are right.

    Nothing is opened for each leaf. Reads that were announced are under way, up to `read_ahead_bytes` of them; in a
    bucket TensorStore joins neighbours into one request. Safe from several threads.
    """

    def __init__(self, step_url: str, profile: DurableProfile):
        self._url = step_url
        self._profile = profile
        self._client = 0  # which one reads: the second, once the first has hung
        self._context = kvstore_context(profile, writing=False)
        self._opened_s = time.time()  # a committed step does not change: what was read since is not asked for again
        self._lock = threading.Lock()
        self._stores: dict[str, Any] = {}
        self._waiting: deque[tuple[str, LeafRecord, Box]] = deque()
        self._started: dict[_Key, _Read] = {}
        self._started_bytes = 0
        self._overtaken: set[_Key] = set()  # asked for before they were begun, although they are in `_waiting`

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Begins to read what will be asked for, in the order in which it will be."""
        with self._lock:
            for item, leaf, record, box in wanted:
                cells = cells_of(record.box, leaf.cell)
                self._waiting += [
                    (item, leaf, cell) for cell in cells if record.box == box or cell.intersect(box) is not None
                ]
            self._go_on()

    def fetch(self, item: str, leaf: LeafRecord, cell: Box) -> np.ndarray | None:
        """The elements of a cell; None where it is stored in a way that only TensorStore's driver can read.

        A read that does not end in time is begun again, once, by a client that shares nothing with the first. Raises
        ValueError as TensorStore does, `TransientStoreError` where nothing comes in time.
        """
        with self._lock:
            read = self._started.pop(_key(item, leaf, cell), None)
            expected = read is not None
            if read is None:
                if self._waiting:
                    self._overtaken.add(_key(item, leaf, cell))
                read = self._start(item, leaf, cell)
        try:
            found = self._found(read)
        finally:
            with self._lock:
                if expected:
                    self._started_bytes -= leaf.cell_bytes
                self._go_on()
        value = found.value if found.state == "value" else b""  # each access makes a copy of all of it
        elements = self._elements(item, leaf, value)
        if elements is None:
            return None
        return elements[tuple(slice(rows) for rows in cell.shape)]  # the last cell along an axis may be padded

    def _elements(self, item: str, leaf: LeafRecord, value: bytes) -> np.ndarray | None:
        whole_bytes = leaf.cell_bytes
        if encoded_bytes(value) == whole_bytes:
            # Or a plain cell that begins like an encoded one: its leaf's metadata has the kind.
            codec = self._codec(item, leaf)
            if codec is not None:
                return decoded(value, leaf, codec)
        return np.frombuffer(value, np.dtype(leaf.dtype)).reshape(leaf.cell) if len(value) == whole_bytes else None

    def _codec(self, item: str, leaf: LeafRecord) -> Codec | None:
        """That of a leaf that is described as we describe it; None for a plain one, and for other descriptions."""
        with self._lock:
            key = f"{array_prefix(leaf.name)}.zarray"
            future = self._store(item).read(key, staleness_bound=self._opened_s)
        found = awaited([future], self._profile, f"{self._url}/{item}")[0]
        with suppress(ValueError, RecursionError):
            described = json.loads(found.value if found.state == "value" else b"")
            for codec in COMPRESSORS:
                if described == json.loads(zarr_text(leaf.dtype, leaf.shape, leaf.cell, codec)):
                    return codec
        return None

    def _found(self, read: _Read) -> Any:
        moving_bytes = max(self._started_bytes, read.leaf.cell_bytes)
        try:
            return awaited([read.future], self._profile, f"{self._url}/{read.item}", nbytes=moving_bytes)[0]
        except TransientStoreError:
            if read.future.done() or read.client > 0:  # it failed, after TensorStore's own tries; or hung once more
                raise
        with self._lock:
            self._replace_client()
            again = self._start(read.item, read.leaf, read.cell)
        return awaited([again.future], self._profile, f"{self._url}/{read.item}", nbytes=moving_bytes)[0]

    def _replace_client(self) -> None:
        """Begins again with another client, once: the caches of the first wait for what hangs."""
        if self._client > 0:
            return
        self._client += 1
        self._context = kvstore_context(self._profile, writing=False)
        self._stores.clear()
        for key, read in self._started.items():
            if not read.future.done():
                self._started[key] = self._start(read.item, read.leaf, read.cell)

    def _go_on(self) -> None:
        while self._waiting and self._started_bytes < self._profile.read_ahead_bytes:
            item, leaf, cell = self._waiting.popleft()
            key = _key(item, leaf, cell)
            if key in self._overtaken:
                self._overtaken.discard(key)
            elif key not in self._started:
                self._started[key] = self._start(item, leaf, cell)
                self._started_bytes += leaf.cell_bytes
        if not self._waiting:
            self._overtaken.clear()

    def _start(self, item: str, leaf: LeafRecord, cell: Box) -> _Read:
        key = cell_key(array_prefix(leaf.name), leaf, cell)
        future = self._store(item).read(key, staleness_bound=self._opened_s)
        return _Read(future, self._client, item, leaf, cell)

    def _store(self, item: str) -> Any:
        if item not in self._stores:
            spec = kvstore_spec(f"{self._url}/{item}", self._profile, writing=False)
            opened = ts.KvStore.open(spec, context=self._context)
            self._stores[item] = awaited([opened], self._profile, f"{self._url}/{item}")[0]
        return self._stores[item]


def _key(item: str, leaf: LeafRecord, cell: Box) -> _Key:
    return item, leaf.path, cell.start


def encoded_bytes(value: bytes) -> int | None:
    """The decoded size of a blosc frame; None if it is not a frame, or its length differs from its header."""
    if len(value) < _HEADER.size:
        return None
    before, after = _HEADER.unpack_from(value)
    return before if after == len(value) else None


def may_be_encoded(head: bytes, length: int, before: int) -> bool:
    """Whether a value of `length` bytes that begins with `head` may be a frame of which `before` bytes come out."""
    return len(head) >= _HEADER.size and _HEADER.unpack_from(head) == (before, length)


def copied_plain(value: bytes | memoryview, target: np.ndarray) -> bool:
    """Fills flat `target` with a cell that is stored as it is, whole; False where it is not, or may not be."""
    if len(value) != target.nbytes or may_be_encoded(bytes(value[:HEAD_BYTES]), len(value), len(value)):
        return False
    target[:] = np.frombuffer(value, np.uint8)
    return True


def decoded(value: bytes, leaf: LeafRecord, codec: Codec) -> np.ndarray:
    """The elements of a whole cell of `leaf`. Raises ValueError as TensorStore does, for damaged bytes.

    Cost: decoding, about 1 GB/s of a core, and a copy of the encoded bytes; half a millisecond for each cell.
    """
    context, kvstore = ts.Context(), {"driver": "memory", "path": "cell/"}
    key = ".".join("0" for _ in leaf.cell)
    ts.KvStore.open(kvstore, context=context).result().write(key, value).result()
    metadata = json.loads(zarr_text(leaf.dtype, leaf.cell, leaf.cell, codec))
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
    return ts.open(spec, open=True, assume_metadata=True, context=context).result().read().result()
