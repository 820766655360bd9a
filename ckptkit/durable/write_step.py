"""Writes one Orbax step with as few operations as it has parts: data, side files, then the marker that commits it.

On a disk the step is written next to its place and renamed. In a bucket, and on a mount that renames file by file, it
is written in place, and becomes a step with `commit_success.txt`, which only one writer can create (`commit`). There,
each object is created and never replaced: a writer that timed out long ago cannot change a later writer's objects. The
leftovers of a crash are not a step for stock Orbax (on such a mount: if its options ask for the mark). The next run
that saves removes them (`abandoned`), or Orbax does so as for its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp

from ckptkit.durable.cells.pacing import Pace, spread_start
from ckptkit.durable.cells.sharing import Last, Sharing
from ckptkit.durable.cells.tensorstore_wait import large_objects, small_objects
from ckptkit.durable.cells.writer import CellWriter, can_hold, merge_processes, process_directory
from ckptkit.durable.commit import DiskAttempt, MarkAttempt, make_attempt
from ckptkit.durable.orbax import files as orbax_files
from ckptkit.durable.orbax.file_items import FilesSave
from ckptkit.durable.orbax.host_shards import HostShards, HostTreeSave, shards_of
from ckptkit.durable.orbax.manager import METRICS_ITEM
from ckptkit.durable.orbax.partial import names_in
from ckptkit.durable.orbax.text_leaf import STRINGS_FILE, strings_text
from ckptkit.durable.sidecars import join_sidecars, written_sidecar
from ckptkit.errors import CheckpointError, TransientStoreError
from ckptkit.job.coordination import Coordinator
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord, SaveId
from ckptkit.store import Store, all_of, put_new
from ckptkit.store.backends import properties_of
from ckptkit.store.local import LocalStore
from ckptkit.util.gc_pause import collection_paused

_PUTS = 8  # small files in flight at a time, in addition to the data


def is_writable(items: Mapping[str, Any]) -> bool:
    """Whether these save arguments are of the kinds that are written here: trees of `host_tree`, JSON, and files."""
    return all(isinstance(item, HostTreeSave | ocp.args.JsonSave | FilesSave) for item in items.values())


def refuse_unwritable(records: Iterable[LeafRecord]) -> None:
    """Raises ValueError with every leaf of a dtype that zarr does not have: no durable step can hold it."""
    found = sorted(f"{leaf.name} ({leaf.dtype})" for leaf in records if not can_hold(leaf.dtype))
    if found:
        raise ValueError(
            f"arrays of these dtypes cannot be saved to the durable tier: {', '.join(found)}; cast them, or view them "
            "as integers of the same size"
        )


@final
class StepWriter:
    """Writes steps below one root, all processes together. Raises what stores and TensorStore raise."""

    def __init__(
        self,
        url: str,
        coordinator: Coordinator,
        profile: DurableProfile,
        *,
        mode: int | None = None,
        pace: Pace | None = None,
    ):
        self._url = url
        self._coordinator = coordinator
        self._profile = profile
        self._pace = pace or Pace(profile.write_bytes_per_s)
        self._sharing = Sharing(url, coordinator.process, coordinator.count)
        self._mode = 0o777 if mode is None else mode  # of directories; the process's umask applies

    @property
    def shared(self) -> Mapping[str, int]:
        """See `DurableSteps.shared`."""
        return self._sharing.shared

    def write(
        self,
        name: str,
        save_id: SaveId,
        items: Mapping[str, Any],
        handlers: Mapping[str, str],
        custom_metadata: Any,
        check_epoch: Callable[[], None] = lambda: None,
        *,
        last: Last = lambda: None,
    ) -> Callable[[], None]:
        """Writes and commits the step in the directory `name`; returns once it is committed, on every process.

        The returned function removes what the attempt needs no more: on process 0, at any time, or never. `handlers`
        are the names of Orbax's handlers by item; `check_epoch` is asked on process 0 right before the commit, and
        raises where a later run has begun. Before the first step of a process, `last` names the step whose data
        files it may use again. Cost in a bucket: three listings, five requests for each item of arrays and
        one for another, the data, and four; one after the other are the data and six. Raises `StepAlreadyExistsError`,
        and `TransientStoreError` where another process could not write its part: the step is not committed then.
        """
        init_ns = time.time_ns()
        begun: list[DiskAttempt | MarkAttempt] = []  # on process 0
        beginning: Future[None] | None = None

        def start(told: list[tuple[str | None, list[str]]]) -> tuple[str, Any, int, list[list[str]]]:
            nonlocal beginning
            _refuse_different([alone for alone, _ in told], name)
            attempt = make_attempt(self._url, name, save_id, self._mode)
            begun.append(attempt)
            beginning = aside.submit(attempt.begin)
            if self._coordinator.count > 1 or properties_of(self._url).file_system:
                beginning.result()  # others put files into the place once they know it, or it has to exist
            elsewhere = _written_elsewhere([files for _, files in told])
            return attempt.place, self._profile.compression, self._profile.copied_bytes, elsewhere

        def finish(place: str) -> None:
            self._finish(place, items, handlers, init_ns, custom_metadata, check_epoch)
            begun[0].commit()

        with ThreadPoolExecutor(1, thread_name_prefix="ckptkit-attempt") as aside:
            try:
                # Process 0 describes the leaves: the others must encode them in the same way.
                own = (
                    _digest_of_lone(items),
                    [_short(key) for key in _file_keys(items)] if self._coordinator.count > 1 else [],
                )
                place, compression, copied_bytes, elsewhere = self._coordinator.agree("step-begun", own, start)
                profile = dataclasses.replace(self._profile, compression=compression, copied_bytes=copied_bytes)
                ready = beginning.result if beginning is not None else lambda: None
                left_out = {key for key in _file_keys(items) if _short(key) in elsewhere[self._coordinator.process]}
                self._sharing.begin(save_id, last)
                self._write_at(place, items, profile, ready, finish, left_out)
            except BaseException:
                for attempt in begun:
                    attempt.give_up()
                raise
        self._sharing.committed(f"{self._url}/{name}", save_id.step)
        return begun[0].tidy if begun else lambda: None

    def _write_at(
        self,
        place: str,
        items: Mapping[str, Any],
        profile: DurableProfile,
        ready: Callable[[], None],
        finish: Callable[[str], None],
        left_out: Collection[str],
    ) -> None:
        error = None

        def write_own() -> None:
            nonlocal error
            try:
                spread_start(profile, place)
                self._write_part(place, items, profile, ready, left_out)
            except Exception as caught:  # noqa: BLE001  reported to the other processes, which would wait for this part
                error = caught

        self._in_turn(write_own)

        def finish_together(failures: list[str | None]) -> None:
            for process, failure in enumerate(failures):
                if failure is not None:
                    # Raised everywhere: whoever wrote its own part well would take the step for committed, and prune.
                    raise TransientStoreError(f"process {process} has not written its part of {place}: {failure}")
            finish(place)

        try:
            self._coordinator.agree(
                "step-written", None if error is None else f"{type(error).__name__}: {error}", finish_together
            )
        finally:
            if error is not None:
                raise error  # the error; all processes decide together whether to retry

    def _in_turn(self, write: Callable[[], None]) -> None:
        """Calls `write` once, in this process's turn: the job may have fewer writes in flight than processes."""
        process, count = self._coordinator.process, self._coordinator.count
        at_once = self._profile.writers_at_once(count)
        for first in range(0, count, at_once):
            if first <= process < first + at_once:
                write()
            if first + at_once < count:  # the last turn is followed by an exchange anyway
                self._coordinator.agree(f"step-turn-{first}", None, lambda _: None)

    def _small(self, place: str) -> Store:
        return small_objects(place, self._profile)

    # On every process.

    def _write_part(
        self,
        place: str,
        items: Mapping[str, Any],
        profile: DurableProfile,
        ready: Callable[[], None],
        left_out: Collection[str],
    ) -> None:
        """Everything of this process but the files `left_out`, encoded meanwhile, once `ready` has returned."""
        # On a disk all is synced at the end, side by side: one by one takes a turn of the disk for each file.
        on_disk = properties_of(place).file_system
        store = LocalStore(place, durable=False) if on_disk else self._small(place)
        with ThreadPoolExecutor(min(_PUTS, profile.write_concurrency), thread_name_prefix="ckptkit-step") as pool:
            puts: list[Future[None]] = []

            def put(key: str, data: bytes) -> None:
                ready()
                _put(store, key, data)

            def put_file(key: str, data: Any) -> None:
                ready()
                if isinstance(data, np.ndarray) and not on_disk:
                    _put(large_objects(place, profile, data.nbytes), key, data.tobytes())
                else:
                    whole: Any = data.data if isinstance(data, np.ndarray) else data  # no copy of a large one
                    _put(store, key, whole)

            for item, args in items.items():
                if isinstance(args, ocp.args.JsonSave):
                    if self._coordinator.process == 0:
                        # Orbax names the file of its metrics after their item.
                        file = METRICS_ITEM if item == METRICS_ITEM else paths.JSON_VALUE
                        puts.append(pool.submit(put, f"{item}/{file}", json.dumps(args.item).encode()))
                        puts.append(pool.submit(put, *_item_mark(item, place)))
                    continue
                if isinstance(args, FilesSave):
                    for file, data in args.files.items():
                        if f"{item}/{file}" not in left_out:
                            puts.append(pool.submit(put_file, f"{item}/{file}", data))
                    if self._coordinator.process == 0:
                        puts.append(pool.submit(put, *_item_mark(item, place)))
                    continue
                files = self._side_files(args)
                puts += [pool.submit(put, f"{item}/{file}", data) for file, data in files.items()]
                del files  # a manifest and more: it goes with the put
                record = self._write_arrays(place, item, args.item, _of_item(profile, args), ready)
                if record is not None:
                    name = paths.unchanged_name(self._coordinator.process)
                    puts.append(pool.submit(put, f"{item}/{paths.SIDECAR_DIR}/{name}", record))
                args.on_written()
            ready()
            for each in puts:
                each.result()
            if on_disk:
                list(pool.map(_sync, _written_below(place)))

    def _write_arrays(
        self, place: str, item: str, tree: Any, profile: DurableProfile, ready: Callable[[], None]
    ) -> bytes | None:
        """Returns the record of the files that the next step may take over; None where there are none."""
        process, count, directory = self._coordinator.process, self._coordinator.count, f"{place}/{item}"
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
        plan = self._sharing.take_over(item, [record for record, _ in own], place, below, profile, ready)
        taken = plan.taken_leaves
        apart = [(record, blocks) for record, blocks in own if record.name in plan.apart]
        rest = [(record, () if record.name in taken | plan.apart else blocks) for record, blocks in own]
        cells = CellWriter(part, profile, self._pace, ready=ready, expected=[*apart, *rest], sharing=plan)
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
    def _side_files(self, args: Any) -> dict[str, bytes]:
        process, shards = self._coordinator.process, shards_of(args.item)
        metadatas = orbax_files.array_metadatas_text(shards, has_sidecar=args.sidecar is not None)
        files = {f"{paths.ARRAY_METADATAS}/process_{process}": metadatas.encode()}
        if args.sidecar is not None:
            files[f"{paths.SIDECAR_DIR}/{paths.sidecar_name(process)}"] = args.sidecar
        if process == 0:
            files[paths.TREE_METADATA] = orbax_files.tree_text(args.item, args.custom_metadata).encode()
            for file, text in (
                (paths.SHARDINGS, orbax_files.shardings_text(shards)),
                (STRINGS_FILE, strings_text(_texts_of(args.item))),
            ):
                files |= {} if text is None else {file: text.encode()}
        return files

    # On process 0.

    def _finish(
        self,
        place: str,
        items: Mapping[str, Any],
        handlers: Mapping[str, str],
        init_ns: int,
        custom_metadata: Any,
        check_epoch: Callable[[], None],
    ) -> None:
        """Joins the parts, and marks each item and the step as complete; the step is not committed yet."""
        store = self._small(place)
        trees = [item for item, args in items.items() if isinstance(args, HostTreeSave)]
        puts = [_item_mark(item, place) for item in trees]
        for item in trees if self._coordinator.count > 1 else ():
            profile = _of_item(self._profile, items[item])
            acts = [partial(merge_processes, f"{place}/{item}", self._coordinator.count, profile)]
            if items[item].sidecar is not None:
                acts.append(partial(self._join_sidecars, place, item, profile))
            all_of(place, acts)
            if store.properties.file_system:  # the names that the merge has made
                for directory in (f"{place}/{item}/d", f"{place}/{item}"):
                    _sync(directory)
        text = orbax_files.step_text(handlers, init_ns, time.time_ns(), custom_metadata)
        puts.append((paths.STEP_METADATA, text.encode()))
        all_of(place, [*(partial(_put, store, *each) for each in puts), check_epoch])

    def _join_sidecars(self, place: str, item: str, profile: DurableProfile) -> None:
        """Puts the joined record of an item's sidecars, unless they are too large. Cost: a small read for each."""
        read = partial(written_sidecar, self._small(place).get, place, item)
        with ThreadPoolExecutor(profile.read_concurrency, thread_name_prefix="ckptkit-join") as pool:
            joined = join_sidecars(pool.map(read, range(self._coordinator.count)))
        if joined is not None:
            _put(large_objects(place, profile, len(joined)), f"{item}/{paths.JOINED_SIDECARS}", joined)


def _item_mark(item: str, place: str) -> tuple[str, bytes]:
    """The files that Orbax leaves in each finished item, for readers of a single item."""
    return f"{item}/{paths.COMMIT_MARK}", f"Checkpoint commit was successful to {place}/{item}".encode()


def _digest_of_lone(items: Mapping[str, Any]) -> str | None:
    """Names the leaves that one process alone holds, and that process; None where there are none."""
    alone = {name: args.of_one_process for name, args in items.items() if getattr(args, "of_one_process", ())}
    return digest_of(json.dumps(alone, sort_keys=True).encode()) if alone else None


def _of_item(profile: DurableProfile, args: HostTreeSave) -> DurableProfile:
    own = args.data_file_bytes
    return profile if own is None else dataclasses.replace(profile, data_file_bytes=own)


def _file_keys(items: Mapping[str, Any]) -> list[str]:
    """The files that handlers have written on this process, by their keys in the step."""
    return [f"{item}/{file}" for item, args in items.items() if isinstance(args, FilesSave) for file in args.files]


def _short(key: str) -> str:
    return digest_of(key.encode())[:16]


def _written_elsewhere(files: Sequence[Sequence[str]]) -> list[list[str]]:
    """For each process, those of its files that a process before it has too: the first one's holds, as in a restore."""
    seen: set[str] = set()
    elsewhere = []
    for own in files:
        elsewhere.append([name for name in own if name in seen])
        seen.update(own)
    return elsewhere


def _refuse_different(alone: Sequence[str | None], name: str) -> None:
    """Raises `CheckpointError` where processes differ in which one holds a leaf alone: each would write its own."""
    different = [process for process, found in enumerate(alone) if found != alone[0]]
    if different:
        raise CheckpointError(
            f"step {name}: process 0 and {', '.join(map(str, different[:8]))} have different shardings for the leaves "
            "that one process alone holds; make them global arrays of one mesh, or NumPy arrays"
        )


def _put(store: Store, key: str, data: bytes) -> None:
    """Nobody else knows a directory that is renamed at the end."""
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


def _sync(path: str) -> None:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # another process's, under its temporary name: that process syncs it
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _texts_of(tree: Any) -> dict[str, str]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(names_in(keypath)): leaf for keypath, leaf in flat if isinstance(leaf, str)}


def _host_leaf(keypath: Any, leaf: Any) -> tuple[LeafRecord, list[tuple[Box, np.ndarray]]]:
    """A leaf of host memory as Orbax stores it: one cell."""
    block = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
    record = LeafRecord(
        path=names_in(keypath),
        keys="",
        kind="numpy",
        shape=block.shape,
        dtype=block.dtype.name,
        cell=tuple(map(int, block.shape)),
    )
    return record, [(Box.whole(block.shape), block)]
