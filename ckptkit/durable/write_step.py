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
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, final

from ckptkit.durable.cells.pacing import Pace, spread_start
from ckptkit.durable.cells.sharing import Last, Sharing
from ckptkit.durable.cells.tensorstore_wait import large_objects, small_objects
from ckptkit.durable.cells.writer import can_hold, merge_processes
from ckptkit.durable.commit import DiskAttempt, MarkAttempt, make_attempt
from ckptkit.durable.orbax import files as orbax_files
from ckptkit.durable.orbax.file_items import FilesSave
from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.sidecars import join_sidecars, written_sidecar
from ckptkit.durable.write_part import DurableItem, PartWriter, item_mark, of_item, put, sync
from ckptkit.errors import CheckpointError, TransientStoreError
from ckptkit.job.coordination import Coordinator
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord, SaveId
from ckptkit.store import Store, all_of


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
        self._sharing = Sharing(url, coordinator.process, coordinator.count)
        self._mode = 0o777 if mode is None else mode  # of directories; the process's umask applies
        pace = pace or Pace(profile.write_bytes_per_s)
        self._part = PartWriter(coordinator.process, coordinator.count, self._sharing, pace, mode=self._mode)

    @property
    def shared(self) -> Mapping[str, int]:
        """See `DurableSteps.shared`."""
        return self._sharing.shared

    def write(
        self,
        name: str,
        save_id: SaveId,
        items: Mapping[str, DurableItem],
        custom_metadata: Any,
        check_epoch: Callable[[], None] = lambda: None,
        *,
        last: Last = lambda: None,
    ) -> Callable[[], None]:
        """Writes and commits the step in the directory `name`; returns once it is committed, on every process.

        The returned function removes what the attempt needs no more: on process 0, at any time, or never.
        `check_epoch` is asked on process 0 right before the commit, and raises where a later run has begun. Before the
        first step of a process, `last` names the step whose data files it may use again. Cost in a bucket: three
        listings, five requests for each item of arrays, one for each file of another item and one more for the item,
        the data, and four; one after the other are the data and six. Raises `StepAlreadyExistsError`, and
        `TransientStoreError` where another process could not write its part: the step is not committed then.
        """
        init_ns = time.time_ns()
        begun: list[DiskAttempt | MarkAttempt] = []  # on process 0

        def start(told: list[tuple[str | None, list[str]]]) -> tuple[str, Any, int, list[list[str]]]:
            _refuse_different([alone for alone, _ in told], name)
            attempt = make_attempt(self._url, name, save_id, self._mode)
            begun.append(attempt)
            attempt.begin()
            elsewhere = _written_elsewhere([files for _, files in told])
            return attempt.place, self._profile.compression, self._profile.copied_bytes, elsewhere

        def finish(place: str) -> None:
            self._finish(place, items, init_ns, custom_metadata, check_epoch)
            begun[0].commit()

        try:
            # Process 0 describes the leaves: the others must encode them in the same way.
            own = (
                _digest_of_lone(items),
                [_short(key) for key in _file_keys(items)] if self._coordinator.count > 1 else [],
            )
            place, compression, copied_bytes, elsewhere = self._coordinator.agree("step-begun", own, start)
            profile = dataclasses.replace(self._profile, compression=compression, copied_bytes=copied_bytes)
            left_out = {key for key in _file_keys(items) if _short(key) in elsewhere[self._coordinator.process]}
            self._sharing.begin(save_id, last)
            self._write_at(place, items, profile, finish, left_out)
        except BaseException:
            for attempt in begun:
                attempt.give_up()
            raise
        self._sharing.committed(f"{self._url}/{name}", save_id.step)
        return begun[0].tidy if begun else lambda: None

    def _write_at(
        self,
        place: str,
        items: Mapping[str, DurableItem],
        profile: DurableProfile,
        finish: Callable[[str], None],
        left_out: Collection[str],
    ) -> None:
        error = None

        def write_own() -> None:
            nonlocal error
            try:
                spread_start(profile, place)
                self._part.write(place, items, profile, left_out)
            except Exception as caught:  # noqa: BLE001  reported to the other processes, which would wait for this part
                error = caught

        self._in_turn(write_own)

        def finish_together(failures: list[str | None]) -> None:
            for process, failure in enumerate(failures):
                if failure is not None:
                    # Raised everywhere: one that wrote its own part well would take the step for committed, and prune.
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

    # On process 0.

    def _finish(
        self,
        place: str,
        items: Mapping[str, DurableItem],
        init_ns: int,
        custom_metadata: Any,
        check_epoch: Callable[[], None],
    ) -> None:
        """Joins the parts, and marks each item and the step as complete; the step is not committed yet."""
        store = self._small(place)
        trees = {item: args for item, args in items.items() if isinstance(args, HostTreeSave)}
        puts = [item_mark(item, place) for item in trees]
        for item, args in trees.items() if self._coordinator.count > 1 else ():
            profile = of_item(self._profile, args)
            acts = [partial(merge_processes, f"{place}/{item}", self._coordinator.count, profile)]
            if args.sidecar is not None:
                acts.append(partial(self._join_sidecars, place, item, profile))
            all_of(place, acts)
            if store.properties.file_system:  # the names that the merge has made
                for directory in (f"{place}/{item}/d", f"{place}/{item}"):
                    sync(directory)
        handlers = {item: args.handler for item, args in items.items()}
        text = orbax_files.step_text(handlers, init_ns, time.time_ns(), custom_metadata)
        puts.append((paths.STEP_METADATA, text.encode()))
        all_of(place, [*(partial(put, store, *each) for each in puts), check_epoch])

    def _join_sidecars(self, place: str, item: str, profile: DurableProfile) -> None:
        """Puts the joined record of an item's sidecars, unless they are too large. Cost: a small read for each."""
        read = partial(written_sidecar, self._small(place).get, place, item)
        with ThreadPoolExecutor(profile.read_concurrency, thread_name_prefix="ckptkit-join") as pool:
            joined = join_sidecars(pool.map(read, range(self._coordinator.count)))
        if joined is not None:
            put(large_objects(place, profile, len(joined)), f"{item}/{paths.JOINED_SIDECARS}", joined)


def _digest_of_lone(items: Mapping[str, DurableItem]) -> str | None:
    """Names the leaves that one process alone holds, and that process; None where there are none."""
    trees = {name: args for name, args in items.items() if isinstance(args, HostTreeSave)}
    alone = {name: args.of_one_process for name, args in trees.items() if args.of_one_process}
    return digest_of(json.dumps(alone, sort_keys=True).encode()) if alone else None


def _file_keys(items: Mapping[str, DurableItem]) -> list[str]:
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
