"""Zarr cells into OCDBT: from host memory through TensorStore's key-value store, in few transactions.

A leaf is `<name>/.zarray` and one value per cell, as the zarr 2 specification says. Small cells are put there directly:
TensorStore's array driver takes about a millisecond to open a leaf, and a key-value pair some microseconds. Large ones
go through the array driver, which refers to the caller's memory and copies nothing, or encodes it where the profile
says so.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, final

import numpy as np
import tensorstore as ts

from ckptkit.durable.buckets import base_of
from ckptkit.durable.pacing import Pace
from ckptkit.durable.waiting import awaited, small_objects
from ckptkit.manifest import LeafRecord
from ckptkit.sharding import Box, cells_of
from ckptkit.store import PutMode, put_new
from ckptkit.store.roots import is_remote
from ckptkit.tuning import COMPRESSORS, HELD_IN_FLIGHT, Codec, DurableProfile

_CONFIG = {
    "max_inline_value_bytes": 1024,  # zarr metadata and tiny cells stand in the tree itself
    "max_decoded_node_bytes": 100_000_000,  # one node, as Orbax has it: a listing or a lookup is one read
    "manifest_kind": "single",
}
_MANIFEST = "manifest.ocdbt"  # names the root of an OCDBT database: what is not below it is not in the database
_UNPUBLISHED = {"driver": "memory", "path": "unpublished/"}
_NODES = "n/"  # where the trees of parts stand, in memory: only the database that joins them has one in the storage
_CACHE_BYTES = 100_000_000
_COALESCED_BYTES = 1_000_000  # reads that are nearer than this become one request,
# With TensorStore's jitter; its own 32 tries take up to 15 minutes: whoever waits for a step hears of it before.
_RETRIES = {"max_retries": 8, "initial_delay": "200ms", "max_delay": "16s"}
_MERGED_BYTES = 16 << 20  # unless it is this large already: several requests at a time are faster than one


def kvstore_context(profile: DurableProfile, *, synced: bool = True) -> ts.Context:
    """The limits under which a step is read or written; and the memory in which `_UNPUBLISHED` stands meanwhile.

    Unless `synced`, files are left to the caller to sync.
    """
    return ts.Context(
        {
            "file_io_sync": synced,
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": {"limit": max(profile.write_concurrency, profile.read_concurrency)},
            "gcs_request_concurrency": {"limit": max(profile.write_concurrency, profile.read_concurrency)},
            "gcs_request_retries": _RETRIES,
            "s3_request_concurrency": {"limit": max(profile.write_concurrency, profile.read_concurrency)},
            "s3_request_retries": _RETRIES,
        }
    )


def kvstore_spec(directory: str, profile: DurableProfile, *, writing: bool) -> dict[str, Any]:
    """The OCDBT database of an item's directory, a path or a bucket URL."""
    if is_remote(directory):
        spec: dict[str, Any] = {"driver": "ocdbt", "base": base_of(directory)}
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
    """What one process writes of one item. Nothing is in the storage as a database until `commit` has returned.

    Written in pieces of `DurableProfile.piece_bytes`, up to `in_flight_bytes` of them at a time, and `pace` says when
    each may go. What TensorStore holds, copied or encoded, goes in pieces of `held_piece_bytes`, of which one is filled
    while `HELD_IN_FLIGHT` are on their way. Where `expected` says that there will be several, each is a
    database whose tree stands in memory and whose data files stand where the last one, which is the item's, refers to
    them: they are written side by side, and cost a file each. Without `expected` each is a commit to that database.

    A write that is given up, because it does not end, may still land: in a bucket as an object that no database names.
    """

    def __init__(
        self,
        directory: str,
        profile: DurableProfile,
        pace: Pace | None = None,
        context: ts.Context | None = None,
        ready: Callable[[], object] = lambda: None,
        *,
        expected: Iterable[tuple[LeafRecord, Sequence[tuple[Box, np.ndarray]]]] = (),
    ):
        """`ready` returns once something may be put into the directory, and raises where that will not be. `expected`
        is what will be added, where that is known."""
        self._ready = ready
        self._directory, self._profile = directory, profile
        self._pace = pace or Pace(profile.write_bytes_per_s)
        self._context = context or kvstore_context(profile)
        self._left_bytes, self._left_held_bytes = _load_of(expected, profile)
        self._held_piece_bytes = profile.held_piece_bytes(self._left_held_bytes)
        self._spec = kvstore_spec(directory, profile, writing=True)
        if not self._is_last():
            nodes = {"prefix": _NODES, "base": {"driver": "memory", "path": "nodes/"}}
            self._spec["base"] = {"driver": "kvstack", "layers": [{"base": self._spec["base"]}, nodes]}
        self._parts: list[Any] = []
        self._store = self._opened(self._spec)
        self._piece = self._next_piece()
        self._sent: deque[_Piece] = deque()

    def add(self, leaf: LeafRecord, blocks: Iterable[tuple[Box, np.ndarray]], *, describe: bool) -> None:
        """Adds the cells of `blocks`, whose memory must not change until `commit` has returned.

        `describe` adds the leaf's metadata too: one process does, for each leaf. Blocks while more is in flight than
        may be; raises what `commit` raises.
        """
        prefix, cell_bytes = f"{leaf.name}/" if leaf.path else "", stored_bytes(leaf)
        codec = self._profile.codec_of(cell_bytes)
        if describe:
            self._write(f"{prefix}.zarray", zarr_text(leaf.dtype, leaf.shape, leaf.cell, codec), nbytes=0)
        opened, array = None, None
        for box, block in blocks:
            if self._profile.copies(cell_bytes, block.nbytes):
                for cell in cells_of(box, leaf.cell):
                    source = block[cell.slices(box.start)]
                    self._write(cell_key(prefix, leaf, cell), _cell_value(leaf, source), nbytes=source.nbytes)
                continue
            most_bytes = self._profile.piece_bytes if codec is None else self._held_piece_bytes
            for part in [box] if block.nbytes <= most_bytes else cells_of(box, leaf.cell):
                if opened is not self._piece.spec:
                    opened, array = self._piece.spec, self._array(leaf, prefix, codec)
                assert array is not None
                into = array.with_transaction(self._piece.transaction)[part.slices()]
                source = block[part.slices(box.start)]
                self._piece.writes.append(into.write(source, can_reference_source_data_indefinitely=True).copy)
                self._added(source.nbytes, source.nbytes, held=codec is not None)

    def commit(self) -> None:
        """Writes everything; raises ValueError as TensorStore does, `TransientStoreError` after the time limit,
        `StoreError` where a permission is refused, and `FileExistsError` where another writer's database has appeared
        in a bucket."""
        self.write()
        publish(self._directory, self._context, self._profile, mode="create")

    def write(self) -> None:
        """Writes everything; in a bucket nothing of it is in the database until it is published."""
        if self._parts:
            if self._piece.spec is not self._spec:  # less has come than was expected
                self._send()
                self._piece = _Piece(self._store, self._spec)
            while self._sent:
                self._finish_oldest()
            self._await([part.experimental_copy_range_to(self._piece.store) for part in self._parts], 0)
        self._send()
        while self._sent:
            self._finish_oldest()

    def _is_last(self) -> bool:
        """Whether one piece will do for what is left, as far as that is known."""
        return self._left_bytes <= self._profile.piece_bytes and self._left_held_bytes <= self._held_piece_bytes

    def _next_piece(self) -> _Piece:
        if self._is_last():
            return _Piece(self._store, self._spec)
        manifest = {"driver": "memory", "path": f"parts/{len(self._parts)}/"}
        spec = {**self._spec, "manifest": manifest, "btree_node_data_prefix": _NODES}
        self._parts.append(self._opened(spec))
        return _Piece(self._parts[-1], spec)

    def _opened(self, spec: dict[str, Any]) -> Any:
        return _opened(spec, self._directory, self._context, self._profile)

    def _write(self, key: str, value: bytes, *, nbytes: int) -> None:
        self._piece.store.write(key, value)  # in a transaction: that it failed, the commit says
        self._added(len(value), nbytes, held=True)

    def _added(self, stored_bytes: int, nbytes: int, *, held: bool) -> None:
        """So much is stored, of `nbytes` that were expected."""
        self._piece.nbytes += stored_bytes
        self._left_bytes -= nbytes
        if held:
            self._piece.held_bytes += nbytes
            self._left_held_bytes -= nbytes
        full = self._piece.nbytes >= self._profile.piece_bytes or self._piece.held_bytes >= self._held_piece_bytes
        if full and self._left_bytes != 0:  # what is expected to be the last goes with the tree that joins all
            self._send()

    def _send(self) -> None:
        piece = self._piece
        while self._sent and not self._has_room(piece):
            self._finish_oldest()
        self._pace.take(piece.nbytes)
        self._await([*piece.writes], piece.nbytes)
        self._ready()
        piece.writes = [piece.transaction.commit_async()]
        self._sent.append(piece)
        self._piece = self._next_piece()

    def _has_room(self, piece: _Piece) -> bool:
        held_bytes = sum(sent.held_bytes for sent in self._sent)
        fits = self._sent_bytes + piece.nbytes <= self._profile.in_flight_bytes
        return fits and held_bytes < HELD_IN_FLIGHT * self._held_piece_bytes

    @property
    def _sent_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._sent)

    def _finish_oldest(self) -> None:
        self._await([write for piece in self._sent for write in piece.writes][:1], self._sent_bytes)
        self._sent.popleft()

    def _await(self, futures: Sequence[Any], nbytes: int) -> None:
        awaited(futures, self._profile, self._directory, nbytes=nbytes, needs="create")

    def _array(self, leaf: LeafRecord, prefix: str, codec: Codec | None) -> Any:
        metadata = json.loads(zarr_text(leaf.dtype, leaf.shape, leaf.cell, codec))
        spec = {"driver": "zarr", "kvstore": {**self._piece.spec, "path": prefix}, "metadata": metadata}
        spec["store_data_equal_to_fill_value"] = True
        opened = ts.open(spec, open=True, assume_metadata=True, context=self._context)
        return awaited([opened], self._profile, self._directory)[0]


class _Piece:
    """What is committed together, to the database of this specification."""

    def __init__(self, store: Any, spec: dict[str, Any]):
        self.transaction: Any = ts.Transaction(atomic=True)
        self.spec = spec
        self.store = store.with_transaction(self.transaction)
        self.writes: list[Any] = []
        self.nbytes = 0
        self.held_bytes = 0


@final
class CellStream:
    """Cells of one item written one after the other, for whoever cannot hold an item in memory.

    Holds up to `commit_bytes` of blocks, which must not change meanwhile, and then commits them: a commit of its own
    for every cell is slow. In a bucket `finish` puts all of it in the place of what the database was before, in one
    operation, unless the stream `continues` that. `on_commit` is called after each commit, which has to sync the files
    unless `synced`; then a bucket's database is put after each. Of several processes one `describes` the arrays. Raises
    what `CellWriter` raises.
    """

    def __init__(
        self,
        directory: str,
        commit_bytes: int,
        profile: DurableProfile = DurableProfile(),  # noqa: B008  frozen
        *,
        on_commit: Callable[[], None] | None = None,
        describes: bool = True,
        synced: bool = True,
        continues: bool = False,
    ):
        self._directory = directory
        self._commit_bytes = commit_bytes
        self._profile = profile
        self._on_commit = on_commit
        self._describes = describes
        self._context = kvstore_context(profile, synced=synced)
        if continues:
            _adopt(directory, self._context, profile)
        self._writer = CellWriter(directory, profile, context=self._context)
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
        if self._describes and leaf.name not in self._described:
            self._described.add(leaf.name)
            self._writer.add(leaf, [], describe=True)

    def finish(self) -> None:
        """Commits what is held."""
        self._commit()
        publish(self._directory, self._context, self._profile, mode="replace")

    def _commit(self) -> None:
        self._writer.write()
        if self._on_commit is not None:
            publish(self._directory, self._context, self._profile, mode="replace")
            self._on_commit()
        self._writer = CellWriter(self._directory, self._profile, context=self._context)
        self._pending_bytes = 0


def merge_processes(directory: str, count: int, profile: DurableProfile) -> None:
    """One database of those of all processes, which stay where they are: the result refers to their data files."""
    context = kvstore_context(profile)
    transaction = ts.Transaction(atomic=True)

    def opened(url: str, *, writing: bool) -> Any:
        return _opened(kvstore_spec(url, profile, writing=writing), url, context, profile)

    whole = opened(directory, writing=True).with_transaction(transaction)
    parts = [opened(process_directory(directory, each), writing=False) for each in range(count)]
    awaited([part.experimental_copy_range_to(whole) for part in parts], profile, directory)
    awaited([transaction.commit_async()], profile, directory, needs="create")
    publish(directory, context, profile, mode="create")


def publish(directory: str, context: ts.Context, profile: DurableProfile, *, mode: PutMode) -> None:
    """Makes what was written under `context` the database of a directory in a bucket: one put, `create` or `replace`.

    TensorStore would join a database that is there already: a writer that was given up long ago would change what a
    later one has committed. On a disk a step that is written has a directory of its own, and TensorStore has done it.
    """
    if not is_remote(directory):
        return
    memory = ts.KvStore.open(_UNPUBLISHED, context=context).result()
    store, manifest = small_objects(directory, profile), memory.read(_MANIFEST).result().value
    if mode == "create":
        put_new(store, _MANIFEST, manifest)
    else:
        store.put(_MANIFEST, manifest)


def _adopt(directory: str, context: ts.Context, profile: DurableProfile) -> None:
    """Goes on from the database that stands in a bucket, where there is one. On a disk TensorStore does."""
    if is_remote(directory):
        with suppress(FileNotFoundError):
            manifest = small_objects(directory, profile).get(_MANIFEST)
            ts.KvStore.open(_UNPUBLISHED, context=context).result().write(_MANIFEST, manifest).result()


def process_directory(directory: str, process: int) -> str:
    """Where one process of several writes its part of an item, under Orbax's name for it."""
    return f"{directory}/ocdbt.process_{process}"


@lru_cache(maxsize=1024)  # a model has few shapes
def zarr_text(dtype: str, shape: tuple[int, ...], cell: tuple[int, ...], codec: Codec | None = None) -> bytes:
    """`.zarray` of a leaf."""
    compressor = None if codec is None else COMPRESSORS[codec]
    own = {"shape": list(shape), "chunks": list(cell), "compressor": compressor}
    return json.dumps({**_zarr_template(dtype), **own}).encode()


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


def stored_bytes(leaf: LeafRecord) -> int:
    """Bytes of a whole cell of a leaf."""
    return math.prod(leaf.cell) * leaf.itemsize


def _load_of(
    expected: Iterable[tuple[LeafRecord, Sequence[tuple[Box, np.ndarray]]]], profile: DurableProfile
) -> tuple[int, int]:
    """Bytes of these blocks, and of those among them that TensorStore holds until they are written."""
    all_bytes, held_bytes = 0, 0
    for leaf, blocks in expected:
        cell_bytes = stored_bytes(leaf)
        for _, block in blocks:
            all_bytes += block.nbytes
            if profile.holds(cell_bytes, block.nbytes):
                held_bytes += block.nbytes
    return all_bytes, held_bytes


def _cell_value(leaf: LeafRecord, part: np.ndarray) -> bytes:
    """A cell as zarr stores it: whole, with zeros after the end of the array."""
    if part.shape != leaf.cell:
        whole = np.zeros(leaf.cell, part.dtype)
        whole[tuple(slice(rows) for rows in part.shape)] = part
        part = whole
    return part.tobytes()


def _opened(spec: dict[str, Any], directory: str, context: ts.Context, profile: DurableProfile) -> Any:
    return awaited([ts.KvStore.open(spec, context=context)], profile, directory)[0]
