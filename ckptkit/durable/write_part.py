"""The part of a step, or of a tree at a path of its own, that one process writes: files, cells, and a sidecar."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import jax
import numpy as np

from ckptkit.durable.cells.pacing import Pace
from ckptkit.durable.cells.sharing import Sharing
from ckptkit.durable.cells.tensorstore_wait import large_objects, small_objects
from ckptkit.durable.cells.writer import CellWriter, process_directory
from ckptkit.durable.orbax.file_items import FilesSave
from ckptkit.durable.orbax.files import process_files, tree_files
from ckptkit.durable.orbax.host_shards import HostShards, HostTreeSave, shards_of
from ckptkit.durable.orbax.partial import names_in
from ckptkit.durable.sidecars import marker_text
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord
from ckptkit.store import Store, put_new
from ckptkit.store.backends import properties_of
from ckptkit.store.local import LocalStore
from ckptkit.util.gc_pause import collection_paused

_PUTS = 8  # small files in flight at a time, in addition to the data

DurableItem = HostTreeSave | FilesSave


@final
class PartWriter:
    """Writes the part of process `process` of `count`. Raises what stores and TensorStore raise."""

    def __init__(self, process: int, count: int, sharing: Sharing, pace: Pace, *, mode: int = 0o777):
        self._process, self._count = process, count
        self._sharing, self._pace = sharing, pace
        self._mode = mode  # of directories; the process's umask applies

    def write(
        self,
        place: str,
        items: Mapping[str, DurableItem],
        profile: DurableProfile,
        left_out: Collection[str] = (),
    ) -> None:
        """Everything of this process but the files `left_out`. An item without a name is in `place` itself."""
        # On a disk all is synced at the end, side by side: one by one takes a turn of the disk for each file.
        on_disk = properties_of(place).file_system
        store = LocalStore(place, durable=False) if on_disk else small_objects(place, profile)
        with ThreadPoolExecutor(min(_PUTS, profile.write_concurrency), thread_name_prefix="ckptkit-step") as pool:
            puts: list[Future[None]] = []

            def put_file(key: str, data: Any) -> None:
                if isinstance(data, np.ndarray) and not on_disk:
                    put(large_objects(place, profile, data.nbytes), key, data.tobytes())
                else:
                    whole: Any = data.data if isinstance(data, np.ndarray) else data  # no copy of a large one
                    put(store, key, whole)

            for item, args in items.items():
                if isinstance(args, FilesSave):
                    for file, data in args.files.items():
                        if f"{item}/{file}" not in left_out:
                            puts.append(pool.submit(put_file, f"{item}/{file}", data))
                    if self._process == 0:
                        puts.append(pool.submit(put_file, *item_mark(item, place)))
                    continue
                files = self._side_files(args)
                puts += [pool.submit(put_file, _key(item, file), data) for file, data in files.items()]
                del files  # each put frees its own: a manifest is large
                record = self._write_arrays(place, item, args.item, of_item(profile, args))
                if record is not None:
                    name = paths.unchanged_name(self._process)
                    puts.append(pool.submit(put_file, _key(item, f"{paths.SIDECAR_DIR}/{name}"), record))
                args.on_written()
            for each in puts:
                each.result()
            if on_disk:
                list(pool.map(sync, _written_below(place)))

    def _write_arrays(self, place: str, item: str, tree: Any, profile: DurableProfile) -> bytes | None:
        """Returns the record of the files that the next step may take over; None where there are none."""
        process, count, directory = self._process, self._count, f"{place}/{item}".rstrip("/")
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        part = directory if count == 1 else process_directory(directory, process)
        if properties_of(part).file_system:
            os.makedirs(part, mode=self._mode, exist_ok=True)
        own = [
            (leaf.record, leaf.blocks) if isinstance(leaf, HostShards) else _host_leaf(keypath, leaf)
            for keypath, leaf in leaves
            if isinstance(leaf, HostShards) or (process == 0 and not isinstance(leaf, str))
        ]
        below = part.removeprefix(place)
        plan = self._sharing.take_over(item, [record for record, _ in own], place, below, profile)
        taken = plan.taken_leaves
        apart = [(record, blocks) for record, blocks in own if record.name in plan.apart]
        rest = [(record, () if record.name in taken | plan.apart else blocks) for record, blocks in own]
        cells = CellWriter(part, profile, self._pace, expected=[*apart, *rest], sharing=plan)
        try:
            for record, blocks in apart:
                cells.add(record, blocks, describe=False)
            if apart:
                cells.end_apart()
            for record, blocks in rest:
                cells.add(record, blocks, describe=process == 0)
            cells.commit()
            group = cells.group({record.name: record.held_bytes for record, _ in apart}) if apart else None
        except Exception:
            cells.give_up()
            raise
        return self._sharing.wrote(item, below, plan, group)

    @collection_paused()
    def _side_files(self, args: HostTreeSave) -> dict[str, bytes]:
        files = process_files(shards_of(args.item), self._process, args.sidecar)
        if self._process == 0:
            files |= tree_files(args.item, args.custom_metadata)
        return files


def _key(item: str, file: str) -> str:
    return f"{item}/{file}" if item else file


def item_mark(item: str, place: str) -> tuple[str, bytes]:
    """The files that Orbax leaves in each finished item, for readers of a single item."""
    return f"{item}/{paths.COMMIT_MARK}", marker_text(f"{place}/{item}").encode()


def of_item(profile: DurableProfile, args: HostTreeSave) -> DurableProfile:
    """The profile for an item, which may have data files of another size."""
    own = args.data_file_bytes
    return profile if own is None else dataclasses.replace(profile, data_file_bytes=own)


def put(store: Store, key: str, data: bytes) -> None:
    """Puts a file of a step. Only this attempt knows a directory that is renamed at the end; elsewhere an existing
    object is not replaced."""
    if store.properties.atomic_rename:
        store.put(key, data)
    else:
        put_new(store, key, data)


def _written_below(place: str) -> list[str]:
    """The files and directories of a step on a disk that TensorStore has not synced itself."""
    found = []
    for directory, _, names in os.walk(place):
        found.append(directory)
        above, name = os.path.split(directory)
        if name != "d" or not os.path.exists(os.path.join(above, paths.OCDBT_MANIFEST)):
            found += [os.path.join(directory, name) for name in names]
    return found


def sync(path: str) -> None:
    """Syncs a file or a directory, if it is there."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # another process's, under its temporary name: that process syncs it
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _host_leaf(keypath: Any, leaf: Any) -> tuple[LeafRecord, list[tuple[Box, np.ndarray]]]:
    """A leaf of host memory as Orbax stores it: one cell, or none for an array without elements."""
    block = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
    record = LeafRecord(
        path=names_in(keypath),
        keys="",
        kind="numpy",
        shape=block.shape,
        dtype=block.dtype.name,
        cell=tuple(max(1, rows) for rows in block.shape),
    )
    return record, [(Box.whole(block.shape), block)] if block.size else []
