"""Zarr cells into OCDBT: from host memory through TensorStore's key-value store, in few transactions.

A leaf is `<name>/.zarray` and one value per cell, by the zarr 2 specification. Small cells are put there directly:
TensorStore's array driver takes about a millisecond to open a leaf, and a key-value pair some microseconds. Large ones
go through the array driver, which refers to the caller's memory and copies nothing, or encodes it if the profile asks
for it.
"""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, final

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.pacing import Pace
from ckptkit.durable.cells.pieces import INLINE_BYTES, Pieces
from ckptkit.durable.cells.tensorstore_wait import BUCKET_DRIVERS, awaited, base_of, small_objects
from ckptkit.durable.cells.unchanged import NODES, NOTHING_SHARED, FileGroup, PieceTree, SharingPlan, group_of
from ckptkit.model.boxes import Box
from ckptkit.model.durable_profile import COMPRESSORS, Codec, DurableProfile
from ckptkit.model.manifest import LeafRecord
from ckptkit.model.paths import OCDBT_MANIFEST, array_prefix
from ckptkit.store import PutMode, put_new
from ckptkit.store.backends import properties_of
from ckptkit.util.clock import Deadline

_CONFIG = {
    "max_inline_value_bytes": INLINE_BYTES,  # zarr metadata and tiny cells
    "max_decoded_node_bytes": 100_000_000,  # one node, as Orbax has it: a listing or a lookup is one read
    "manifest_kind": "single",
}
_UNPUBLISHED = {"driver": "memory", "path": "unpublished/"}
_APART = "unchanged."  # in the names of data files that later steps may take over, and of the nodes that find them
_CACHE_BYTES = 100_000_000
_COALESCED_BYTES = 1_000_000  # reads that are nearer than this become one request,
# With TensorStore's jitter. Its own 32 tries take up to 15 minutes; a waiting caller gets the error sooner.
RETRIES = {"max_retries": 8, "initial_delay": "200ms", "max_delay": "16s"}
_GIVE_UP_S = 5.0
_MERGED_BYTES = 16 << 20  # unless it is this large already: several requests at a time are faster than one


def kvstore_context(profile: DurableProfile, *, writing: bool, synced: bool = True) -> ts.Context:
    """The limits under which a step is read or written, and the memory that holds `_UNPUBLISHED` meanwhile.

    Unless `synced`, files are left to the caller to sync.
    """
    limit = {"limit": profile.write_concurrency if writing else profile.read_concurrency}
    return ts.Context(
        {
            "file_io_sync": synced,
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "file_io_concurrency": limit,
            **{f"{driver}_request_concurrency": limit for driver in BUCKET_DRIVERS},
            **{f"{driver}_request_retries": RETRIES for driver in BUCKET_DRIVERS},
        }
    )


def kvstore_spec(
    directory: str, profile: DurableProfile, *, writing: bool, data_prefix: str | None = None
) -> dict[str, Any]:
    """The OCDBT database of an item's directory, a path or a bucket URL. The names of the data files that are written
    begin with `data_prefix` (None: as TensorStore names them)."""
    properties, base = properties_of(directory), base_of(directory)
    spec: dict[str, Any] = {"driver": "ocdbt", "base": base}
    if properties.file_system:
        # Data files have names of their own: only the manifest has to be replaced in one piece. No database has two
        # writers at a time (two would lose keys), so none is locked: Lustre without `flock`, and some NFS mounts,
        # refuse locks.
        assert isinstance(base, dict)
        spec |= {
            "base": {**base, "file_io_locking": {"mode": "non_atomic"}},
            "manifest": {**base, "file_io_locking": {"mode": "none"}},
        }
    elif not writing:
        spec["experimental_read_coalescing_threshold_bytes"] = _COALESCED_BYTES
        spec["experimental_read_coalescing_merged_bytes"] = _MERGED_BYTES
        spec["experimental_read_coalescing_interval"] = "1ms"
    if writing and not properties.atomic_rename:
        # ckptkit puts the last object itself, to decide what it may replace (see `publish`).
        spec["manifest"] = _UNPUBLISHED
    if writing:
        # The directory is new: no other writer has chosen a configuration.
        spec |= {"config": _CONFIG, "assume_config": True, "target_data_file_size": profile.data_file_bytes}
        if data_prefix is not None:
            kinds = ("value_data_prefix", "btree_node_data_prefix", "version_tree_node_data_prefix")
            spec |= dict.fromkeys(kinds, data_prefix)
    return spec


@final
class CellWriter:
    """Writes one process's part of one item. The storage has no database of it until `commit` has returned.

    Written in pieces (`Pieces`), each when `pace` allows it. If `expected` announces several, each but the last is a
    database of its own with its tree in memory: they are written in parallel, and cost a data file each. The last one
    is the item's database, and refers to the data files of the others. Without `expected` each piece is a commit to the
    item's database.

    A write that timed out may still land: in a bucket as an object that no database names.
    """

    def __init__(
        self,
        directory: str,
        profile: DurableProfile,
        pace: Pace | None = None,
        context: ts.Context | None = None,
        *,
        expected: Iterable[tuple[LeafRecord, Iterable[tuple[Box, np.ndarray]]]] = (),
        data_prefix: str | None = None,
        sharing: SharingPlan = NOTHING_SHARED,
    ):
        """`expected` is what will be added, where that is known. `data_prefix` is that of `kvstore_spec`. The files of
        the groups that `sharing` takes over are in the directory already. Its leaves `apart` are added first, until
        `end_apart`.
        """
        self._apart, self._group_databases = bool(sharing.apart), list[int]()
        self._own = f"{_APART}{uuid.uuid4().hex[:8]}."  # begins the names of nodes of this step's group, of no other's
        self._directory, self._profile = directory, profile
        self._pace = pace or Pace(profile.write_bytes_per_s)
        self._context = context or kvstore_context(profile, writing=True)
        self._pieces = Pieces(profile, ((leaf, [box for box, _ in blocks]) for leaf, blocks in expected))
        self._spec = kvstore_spec(directory, profile, writing=True, data_prefix=data_prefix)
        if not self._pieces.is_last or sharing.taken or sharing.apart:
            # References to data files can be copied between databases of one base only: the item's has this one too.
            nodes = {"prefix": NODES, "base": {"driver": "memory", "path": "nodes/"}}
            self._spec["base"] = {"driver": "kvstack", "layers": [{"base": self._spec["base"]}, nodes]}
        self._store = self._opened(self._spec)
        self._databases: list[Any] = []  # of all pieces but the last
        self._sent: deque[Any] = deque()  # commits, oldest first
        self._taken = [database for group in sharing.taken for database in self._taken_over(group)]
        self._begin_piece()

    def add(self, leaf: LeafRecord, blocks: Iterable[tuple[Box, np.ndarray]], *, describe: bool) -> None:
        """Adds the cells of `blocks`, whose memory must not change until `commit` has returned.

        `describe` adds the leaf's metadata too: one process does, for each leaf. Blocks while more is in flight than
        may be; raises what `commit` raises.
        """
        prefix, codec = array_prefix(leaf.name), self._profile.codec_of(leaf.cell_bytes)
        if describe:
            text = zarr_text(leaf.dtype, leaf.shape, leaf.cell, codec)
            self._piece.store.write(f"{prefix}.zarray", text)  # in a transaction: the commit reports its failure
            self._pieces.add_text(len(text))
        array, opened_in = None, None
        for box, block in blocks:
            for part in self._pieces.parts_of(leaf, box):
                source = block[part.box.slices(box.start)]
                if part.way == "copied":
                    self._piece.store.write(cell_key(prefix, leaf, part.box), _cell_value(leaf, source))
                else:
                    if opened_in is not self._piece.spec:
                        array, opened_in = self._array(leaf, prefix, codec), self._piece.spec
                    assert array is not None
                    into = array.with_transaction(self._piece.transaction)[part.box.slices()]
                    self._piece.writes.append(into.write(source, can_reference_source_data_indefinitely=True).copy)
                self._pieces.add(part)
                if self._pieces.is_full:
                    self._send()

    def end_apart(self) -> None:
        """Later leaves go into other data files than the leaves that were added so far."""
        if self._pieces.filled_bytes:
            self._apart = False
            self._send()
            return
        self._apart = False
        self._databases.pop()  # the piece that was begun after the last one is empty
        self._group_databases.pop()
        self._begin_piece()

    def group(self, leaves: Mapping[str, int]) -> FileGroup:
        """The data files of what was added before `end_apart`, for `taken` of a later step: `leaves`, with their bytes.
        Call it after `commit`."""
        trees = list[PieceTree]()
        memory = self._opened({"driver": "memory"})

        def read(key: str) -> bytes:
            return awaited([memory.read(key)], self._profile, self._directory)[0].value

        for number in self._group_databases:
            prefix = f"nodes/{self._own}{number}."
            names = [key.decode() for key in awaited([memory.list()], self._profile, self._directory)[0]]
            nodes = {name.removeprefix("nodes/"): read(name) for name in names if name.startswith(prefix)}
            trees.append(PieceTree(manifest=read(f"pieces/{number}/{OCDBT_MANIFEST}"), nodes=nodes))
        return group_of(trees, leaves)

    def _taken_over(self, group: FileGroup) -> list[tuple[Any, list[Any]]]:
        """A group's databases over this directory, and the ranges of keys of its leaves that did not change."""
        memory, found = self._opened({"driver": "memory"}), list[tuple[Any, list[Any]]]()
        ranges = [ts.KvStore.KeyRange()]
        if group.live != group.leaves.keys():
            ranges = [ts.KvStore.KeyRange(f"{name}/", f"{name}0") for name in sorted(group.live)]  # "0" follows "/"
        for tree in group.trees:
            path = f"taken/{uuid.uuid4().hex}/"
            puts = [memory.write(f"nodes/{name}", node) for name, node in tree.nodes.items()]
            puts.append(memory.write(f"{path}{OCDBT_MANIFEST}", tree.manifest))
            awaited(puts, self._profile, self._directory)
            found.append((self._opened({**self._spec, "manifest": {"driver": "memory", "path": path}}), ranges))
        return found

    def commit(self) -> None:
        """Writes everything; raises ValueError as TensorStore does, `TransientStoreError` after the time limit,
        `StoreError` where a permission is refused, and `FileExistsError` where another writer's database has appeared
        in a bucket."""
        self.write()
        publish(self._directory, self._context, self._profile, mode="create")

    def write(self) -> None:
        """Writes everything; in a bucket nothing of it is in the database until it is published."""
        self._pieces.expect_no_more()
        if not self._pieces.is_last:
            self._send()
        if self._databases or self._taken:
            while self._sent:
                self._finish_oldest()
            own = [(each, [ts.KvStore.KeyRange()]) for each in self._databases]
            into = self._piece.store
            copies = [each.experimental_copy_range_to(into, r) for each, ranges in own + self._taken for r in ranges]
            self._await(copies, 0)
        self._send()
        while self._sent:
            self._finish_oldest()

    def give_up(self) -> None:
        """After an error: waits some seconds for writes in flight. A write that lands later makes its directory
        anew."""
        deadline = Deadline(_GIVE_UP_S)
        for commit in self._sent:
            with suppress(ValueError, TimeoutError):
                commit.result(timeout=deadline.left_s)

    def _begin_piece(self) -> None:
        if self._pieces.is_last and not self._apart:
            self._piece = _Piece(self._store, self._spec)
            return
        number = len(self._databases)
        manifest = {"driver": "memory", "path": f"pieces/{number}/"}
        spec = {**self._spec, "manifest": manifest, "btree_node_data_prefix": NODES}
        if self._apart:
            spec |= {"btree_node_data_prefix": f"{NODES}{self._own}{number}.", "value_data_prefix": f"d/{_APART}"}
            self._group_databases.append(number)
        self._databases.append(self._opened(spec))
        self._piece = _Piece(self._databases[-1], spec)

    def _send(self) -> None:
        while self._pieces.must_wait:
            self._finish_oldest()
        self._pace.take(self._pieces.filled_bytes)
        self._await(self._piece.writes, self._pieces.filled_bytes)
        self._sent.append(self._piece.transaction.commit_async())
        self._pieces.send()
        self._begin_piece()

    def _finish_oldest(self) -> None:
        self._await([self._sent[0]], self._pieces.sent_bytes)
        self._sent.popleft()
        self._pieces.finish_oldest()

    def _opened(self, spec: dict[str, Any]) -> Any:
        return _opened(spec, self._directory, self._context, self._profile)

    def _await(self, futures: Sequence[Any], nbytes: int) -> None:
        awaited(futures, self._profile, self._directory, nbytes=nbytes, needs="create")

    def _array(self, leaf: LeafRecord, prefix: str, codec: Codec | None) -> Any:
        metadata = json.loads(zarr_text(leaf.dtype, leaf.shape, leaf.cell, codec))
        spec = {"driver": "zarr", "kvstore": {**self._piece.spec, "path": prefix}, "metadata": metadata}
        spec["store_data_equal_to_fill_value"] = True
        opened = ts.open(spec, open=True, assume_metadata=True, context=self._context)
        return awaited([opened], self._profile, self._directory)[0]


class _Piece:
    """One commit to the database of this specification."""

    def __init__(self, store: Any, spec: dict[str, Any]):
        self.transaction: Any = ts.Transaction(atomic=True)
        self.spec = spec
        self.store = store.with_transaction(self.transaction)
        self.writes: list[Any] = []  # copies of what the array driver does not refer to


@final
class CellStream:
    """Cells of one item written one after the other, for a caller that cannot hold an item in memory.

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
        data_prefix: str | None = None,
    ):
        self._directory = directory
        self._data_prefix = data_prefix
        self._commit_bytes = commit_bytes
        self._profile = profile
        self._on_commit = on_commit
        self._describes = describes
        self._context = kvstore_context(profile, writing=True, synced=synced)
        if continues:
            _adopt(directory, self._context, profile)
        self._writer = self._new_writer()
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
        self._writer = self._new_writer()
        self._pending_bytes = 0

    def _new_writer(self) -> CellWriter:
        return CellWriter(self._directory, self._profile, context=self._context, data_prefix=self._data_prefix)


def merge_processes(directory: str, count: int, profile: DurableProfile, *, data_prefix: str | None = None) -> None:
    """One database of those of all processes, which stay where they are: the result refers to their data files."""
    context = kvstore_context(profile, writing=True)
    transaction = ts.Transaction(atomic=True)

    def opened(url: str, *, writing: bool) -> Any:
        spec = kvstore_spec(url, profile, writing=writing, data_prefix=data_prefix)
        return _opened(spec, url, context, profile)

    whole = opened(directory, writing=True).with_transaction(transaction)
    parts = [opened(process_directory(directory, each), writing=False) for each in range(count)]
    awaited([part.experimental_copy_range_to(whole) for part in parts], profile, directory)
    awaited([transaction.commit_async()], profile, directory, needs="create")
    publish(directory, context, profile, mode="create")


def publish(directory: str, context: ts.Context, profile: DurableProfile, *, mode: PutMode) -> None:
    """Makes what was written under `context` the database of a directory in a bucket: one put, `create` or `replace`.

    TensorStore would add to an existing database: a writer that timed out long ago would change a later writer's
    commit. On a disk a step that is written has a directory of its own, and TensorStore has done it.
    """
    if properties_of(directory).atomic_rename:
        return
    store = small_objects(directory, profile)
    found = ts.KvStore.open(_UNPUBLISHED, context=context).result().read(OCDBT_MANIFEST).result()
    if found.state == "missing":  # nothing was written: on a disk TensorStore makes no database then either
        if mode == "replace":
            store.delete(OCDBT_MANIFEST)
    elif mode == "create":
        put_new(store, OCDBT_MANIFEST, found.value)
    else:
        store.put(OCDBT_MANIFEST, found.value)


def _adopt(directory: str, context: ts.Context, profile: DurableProfile) -> None:
    """Continues the existing database in a bucket, if there is one. On a disk TensorStore does so itself."""
    if not properties_of(directory).atomic_rename:
        with suppress(FileNotFoundError):
            manifest = small_objects(directory, profile).get(OCDBT_MANIFEST)
            ts.KvStore.open(_UNPUBLISHED, context=context).result().write(OCDBT_MANIFEST, manifest).result()


def process_directory(directory: str, process: int) -> str:
    """Where one process of several writes its part of an item, under Orbax's name for it."""
    return f"{directory}/ocdbt.process_{process}"


@lru_cache(maxsize=1024)  # a model has few shapes
def zarr_text(dtype: str, shape: tuple[int, ...], cell: tuple[int, ...], codec: Codec | None = None) -> bytes:
    """`.zarray` of a leaf."""
    compressor = None if codec is None else COMPRESSORS[codec]
    own = {"shape": list(shape), "chunks": list(cell), "compressor": compressor}
    return json.dumps({**_zarr_template(dtype), **own}).encode()


@lru_cache(maxsize=64)
def can_hold(dtype: str) -> bool:
    """Whether TensorStore's zarr driver has a dtype. Cost: a small array in memory, once for each dtype."""
    try:
        _zarr_template(dtype)
    except (ValueError, TypeError):
        return False
    return True


def cell_key(prefix: str, leaf: LeafRecord, cell: Box) -> str:
    """The key of a cell below its leaf's."""
    index = [start // rows for start, rows in zip(cell.start, leaf.cell, strict=True)]
    return prefix + (".".join(map(str, index)) or "0")


@lru_cache(maxsize=64)
def _zarr_template(dtype: str) -> dict[str, Any]:
    """The name that TensorStore writes for a dtype: zarr 2 has no name of its own for bfloat16 and similar dtypes."""
    memory = ts.Context()
    kvstore = {"driver": "memory", "path": "a/"}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": {"compressor": None}, "create": True}
    ts.open(spec, dtype=ts.dtype(np.dtype(dtype)), shape=[1], context=memory).result()
    text = ts.KvStore.open({"driver": "memory"}, context=memory).result().read("a/.zarray").result().value
    return json.loads(text)


def _cell_value(leaf: LeafRecord, part: np.ndarray) -> bytes:
    """A cell as zarr stores it: whole, with zeros after the end of the array."""
    if part.shape != leaf.cell:
        whole = np.zeros(leaf.cell, part.dtype)
        whole[tuple(slice(rows) for rows in part.shape)] = part
        part = whole
    return part.tobytes()


def _opened(spec: dict[str, Any], directory: str, context: ts.Context, profile: DurableProfile) -> Any:
    return awaited([ts.KvStore.open(spec, context=context)], profile, directory)[0]
