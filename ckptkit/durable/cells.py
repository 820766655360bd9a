"""Zarr cells into OCDBT: from host memory through TensorStore's key-value store, in one transaction.

A leaf is `<name>/.zarray` and one value per cell, as the zarr 2 specification says, without compression. Small cells
are put there directly: TensorStore's array driver takes about a millisecond to open a leaf, and a key-value pair some
microseconds. Large ones go through the array driver, which refers to the caller's memory and copies nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
import tensorstore as ts

from ckptkit.errors import TransientStoreError
from ckptkit.manifest import LeafRecord
from ckptkit.sharding import Box, cells_of
from ckptkit.store import PutMode, open_store, put_new
from ckptkit.store.roots import is_remote
from ckptkit.tuning import DurableProfile

_CONFIG = {
    "max_inline_value_bytes": 1024,  # zarr metadata and tiny cells stand in the tree itself
    "max_decoded_node_bytes": 100_000_000,  # one node, as Orbax has it: a listing or a lookup is one read
    "manifest_kind": "single",
}
_MANIFEST = "manifest.ocdbt"  # names the root of an OCDBT database: what is not below it is not in the database
_UNPUBLISHED = {"driver": "memory", "path": "unpublished/"}
_CACHE_BYTES = 100_000_000
_COALESCED_BYTES = 1_000_000  # reads that are nearer than this become one request,
_MERGED_BYTES = 16 << 20  # unless it is this large already: several requests at a time are faster than one


def kvstore_context(profile: DurableProfile) -> ts.Context:
    """The limits under which a step is read or written; and the memory in which `_UNPUBLISHED` stands meanwhile."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": max(profile.write_concurrency, profile.read_concurrency)},
            "gcs_request_concurrency": {"limit": max(profile.write_concurrency, profile.read_concurrency)},
        }
    )


def kvstore_spec(directory: str, profile: DurableProfile, *, writing: bool) -> dict[str, Any]:
    """The OCDBT database of an item's directory, a path or a bucket URL."""
    if is_remote(directory):
        spec: dict[str, Any] = {"driver": "ocdbt", "base": f"{directory}/"}
        if writing:
            # The last object is put by us, so that we say what it may replace (see `publish`).
            spec["manifest"] = _UNPUBLISHED
        else:
            spec["experimental_read_coalescing_threshold_bytes"] = _COALESCED_BYTES
            spec["experimental_read_coalescing_merged_bytes"] = _MERGED_BYTES
            spec["experimental_read_coalescing_interval"] = "1ms"
    else:
        base = {"driver": "file", "path": f"{directory}/"}
        # Data files have names of their own: only the manifest has to be replaced in one piece.
        spec = {"driver": "ocdbt", "base": {**base, "file_io_locking": {"mode": "non_atomic"}}, "manifest": base}
    if writing:
        # The directory is new: no other writer has chosen a configuration.
        spec |= {"config": _CONFIG, "assume_config": True, "target_data_file_size": profile.data_file_bytes}
    return spec


@final
class CellWriter:
    """What one process writes of one item. Nothing is in the storage as a database until `commit` has returned."""

    def __init__(self, directory: str, profile: DurableProfile, context: ts.Context | None = None):
        self._directory, self._profile = directory, profile
        self._spec = kvstore_spec(directory, profile, writing=True)
        self._context = context or kvstore_context(profile)
        self._transaction = ts.Transaction(atomic=True)
        self._store = _opened(self._spec, self._context, profile).with_transaction(self._transaction)
        self._writes: list[Any] = []

    def add(self, leaf: LeafRecord, blocks: Iterable[tuple[Box, np.ndarray]], *, describe: bool) -> None:
        """Adds the cells of `blocks`, whose memory must not change until `commit` has returned.

        `describe` adds the leaf's metadata too: one process does, for each leaf.
        """
        prefix = f"{leaf.name}/" if leaf.path else ""
        if describe:
            self._write(f"{prefix}.zarray", json.dumps(zarr_metadata(leaf)).encode())
        array = None
        for box, block in blocks:
            if min(block.nbytes, _cell_bytes(leaf)) < self._profile.copied_bytes:
                for cell in cells_of(box, leaf.cell):
                    self._write(cell_key(prefix, leaf, cell), _cell_value(leaf, block[cell.slices(box.start)]))
                continue
            if array is None:
                array = self._array(leaf, prefix)
            self._writes.append(array[box.slices()].write(block, can_reference_source_data_indefinitely=True).copy)

    def commit(self) -> None:
        """Writes everything; raises ValueError as TensorStore does, `TransientStoreError` after the time limit, and
        `FileExistsError` where another writer's database has appeared in a bucket."""
        self.write()
        publish(self._directory, self._context, mode="create")

    def write(self) -> None:
        """Writes everything; in a bucket nothing of it is in the database until it is published."""
        awaited(self._writes, self._profile)
        awaited([self._transaction.commit_async()], self._profile)

    def _write(self, key: str, value: bytes) -> None:
        self._writes.append(self._store.write(key, value))

    def _array(self, leaf: LeafRecord, prefix: str) -> Any:
        spec = {"driver": "zarr", "kvstore": {**self._spec, "path": prefix}, "metadata": zarr_metadata(leaf)}
        spec["store_data_equal_to_fill_value"] = True
        opened = ts.open(spec, open=True, assume_metadata=True, context=self._context, transaction=self._transaction)
        return awaited([opened], self._profile)[0]


@final
class CellStream:
    """Cells of one item written one after the other, for whoever cannot hold an item in memory.

    Holds up to `commit_bytes` of blocks, which must not change meanwhile, and then commits them: a commit of its own
    for every cell is slow. In a bucket `finish` puts all of it in the place of what the database was before, in one
    operation. Raises what `CellWriter` raises.
    """

    def __init__(self, directory: str, commit_bytes: int, profile: DurableProfile = DurableProfile()):  # noqa: B008  frozen
        self._directory = directory
        self._commit_bytes = commit_bytes
        self._profile = profile
        self._context = kvstore_context(profile)
        self._writer = CellWriter(directory, profile, self._context)
        self._described: set[str] = set()
        self._pending_bytes = 0

    def write(self, leaf: LeafRecord, cell: Box, block: np.ndarray) -> None:
        """One cell; an array that is not there yet is described."""
        self.create(leaf)
        self._writer.add(leaf, [(cell, block)], describe=False)
        self._pending_bytes += block.nbytes
        if self._pending_bytes >= self._commit_bytes:
            self._commit()

    def create(self, leaf: LeafRecord) -> None:
        """The array, where it is not there yet: one without elements has no cell that would make it."""
        if leaf.name not in self._described:
            self._described.add(leaf.name)
            self._writer.add(leaf, [], describe=True)

    def finish(self) -> None:
        """Commits what is held."""
        self._commit()
        publish(self._directory, self._context, mode="replace")

    def _commit(self) -> None:
        self._writer.write()
        self._writer = CellWriter(self._directory, self._profile, self._context)
        self._pending_bytes = 0


def merge_processes(directory: str, count: int, profile: DurableProfile) -> None:
    """One database of those of all processes, which stay where they are: the result refers to their data files."""
    context = kvstore_context(profile)
    transaction = ts.Transaction(atomic=True)
    whole = _opened(kvstore_spec(directory, profile, writing=True), context, profile).with_transaction(transaction)
    parts = [
        _opened(kvstore_spec(process_directory(directory, each), profile, writing=False), context, profile)
        for each in range(count)
    ]
    awaited([part.experimental_copy_range_to(whole) for part in parts], profile)
    awaited([transaction.commit_async()], profile)
    publish(directory, context, mode="create")


def publish(directory: str, context: ts.Context, *, mode: PutMode) -> None:
    """Makes what was written under `context` the database of a directory in a bucket: one put, `create` or `replace`.

    TensorStore would join a database that is there already: a writer that was given up long ago would change what a
    later one has committed. On a disk a step that is written has a directory of its own, and TensorStore has done it.
    """
    if not is_remote(directory):
        return
    memory = ts.KvStore.open(_UNPUBLISHED, context=context).result()
    store, manifest = open_store(directory), memory.read(_MANIFEST).result().value
    if mode == "create":
        put_new(store, _MANIFEST, manifest)
    else:
        store.put(_MANIFEST, manifest)


def process_directory(directory: str, process: int) -> str:
    """Where one process of several writes its part of an item, under Orbax's name for it."""
    return f"{directory}/ocdbt.process_{process}"


def zarr_metadata(leaf: LeafRecord) -> dict[str, Any]:
    """`.zarray` of a leaf."""
    return {**_zarr_template(leaf.dtype), "shape": list(leaf.shape), "chunks": list(leaf.cell)}


def cell_key(prefix: str, leaf: LeafRecord, cell: Box) -> str:
    """The key of a cell below its leaf's."""
    index = [start // rows for start, rows in zip(cell.start, leaf.cell, strict=True)]
    return prefix + (".".join(map(str, index)) or "0")


@lru_cache(maxsize=64)
def _zarr_template(dtype: str) -> dict[str, Any]:
    """What TensorStore itself writes for a dtype: zarr 2 has no name of its own for bfloat16 and the like."""
    memory = ts.Context()
    kvstore = {"driver": "memory", "path": "a/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": {"compressor": None}, "create": True}
    ts.open(spec, dtype=ts.dtype(np.dtype(dtype)), shape=[1], context=memory).result()
    text = ts.KvStore.open({"driver": "memory"}, context=memory).result().read("a/.zarray").result().value
    return json.loads(text)


def _cell_bytes(leaf: LeafRecord) -> int:
    return math.prod(leaf.cell) * leaf.itemsize


def _cell_value(leaf: LeafRecord, part: np.ndarray) -> bytes:
    """A cell as zarr stores it: whole, with zeros after the end of the array."""
    if part.shape != leaf.cell:
        whole = np.zeros(leaf.cell, part.dtype)
        whole[tuple(slice(rows) for rows in part.shape)] = part
        part = whole
    return part.tobytes()


def _opened(spec: dict[str, Any], context: ts.Context, profile: DurableProfile) -> Any:
    return awaited([ts.KvStore.open(spec, context=context)], profile)[0]


def awaited(futures: Sequence[Any], profile: DurableProfile) -> list[Any]:
    """What TensorStore's futures give; raises what they raise, `TransientStoreError` for one without an end."""
    try:
        return [future.result(timeout=profile.operation_timeout_s) for future in futures]
    except TimeoutError as error:
        raise TransientStoreError(
            f"no end within {profile.operation_timeout_s:g} s; look at the network and at the service, or raise "
            "DurableProfile.operation_timeout_s"
        ) from error
