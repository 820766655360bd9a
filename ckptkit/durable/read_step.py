"""Reads boxes of a durable step that has our sidecars, and compares every cell that it returns with its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.pacing import Pace, spread_start
from ckptkit.durable.cells.placed import PlacedCells, PlacedRanges, Places
from ckptkit.durable.cells.reader import CellReader, Wanted
from ckptkit.durable.cells.tensorstore_wait import (
    awaited,
    base_of,
    large_objects,
    small_objects,
    undamaged,
)
from ckptkit.durable.lifecycle.places import Place, item_handlers
from ckptkit.durable.lifecycle.step_records import (
    had_sidecars,
    marked_in,
    own_sidecars,
    read_sidecar,
    save_in_metadata,
)
from ckptkit.durable.sidecars import (
    incomplete,
    lost_sidecars,
    missing_items,
    require_custom,
    several_saves,
    wrong_step,
)
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.cells import copy_proven
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.handler_files import is_file, with_file_leaves
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, ManifestDepth, SaveId
from ckptkit.store import Store, all_of
from ckptkit.store.base import checked_key

_KEYS_MAX = 500_000  # of a database whose places are read as a whole; of a larger one TensorStore finds those wanted
_JOINED_BYTES = 64 << 20  # of a joined record of a large job: it may take as long as so much


def identity_metadata(save_id: SaveId) -> dict[str, Any]:
    """The identity of a save in Orbax's own step metadata, for a step without arrays and so without a sidecar."""
    return {paths.SAVE_ID_FIELD: save_id.to_list()}


def without_identity(metadata: Any) -> Any:
    """The custom metadata of a step as the caller gave it."""
    if not isinstance(metadata, dict):
        return metadata
    return {name: value for name, value in metadata.items() if name != paths.SAVE_ID_FIELD}


class DurableReader:
    """One step directory. `manifests` are the sidecars of all processes that wrote it, by item."""

    def __init__(
        self,
        step_url: str,
        *,
        step: int | None,
        item: str | None = None,
        profile: DurableProfile = DurableProfile(),  # noqa: B008  frozen
        pace: Pace | None = None,
    ):
        """`step` None: that of its sidecars. `item`: the only item to read, so that the step need not be listed. `pace`
        is that of several readers together."""
        self._url = step_url.rstrip("/")
        self._step = step
        self._item = item
        self._profile = profile
        self._pace = pace or Pace(profile.read_bytes_per_s)
        self._store: Store = small_objects(self._url, profile)
        self._cells = CellReader(self._url, profile)
        self._places = Places(self._url, profile, _KEYS_MAX if self.round_trips else None)
        self._placed = (PlacedRanges if self.round_trips else PlacedCells)(self._places)
        self._ahead: Future[list[Manifest]] | None = None
        self.without_sidecars: tuple[str, ...] = ()  # items, once `manifests` has returned
        self._last_file = ("", b"")
        self._lock = threading.Lock()
        self._arrays: dict[tuple[str, str], ts.TensorStore] = {}
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 100_000_000}})

    @property
    def url(self) -> str:
        """The step's directory."""
        return self._url

    def look_ahead(self, names: Sequence[str] | None = None) -> None:
        """`manifests(to_read=True)` now: what it gives or raises is kept for the first caller. `names` are those
        right below the step, where somebody has listed them already."""
        self._ahead = Future()
        try:
            self._ahead.set_result(self._manifests(names, to_read=True))
        except Exception as error:  # noqa: BLE001  raised to the first caller
            self._ahead.set_exception(error)

    def manifests(self, *, to_read: bool = False) -> list[Manifest]:
        """The sidecars of every process, all items; empty for a step that stock Orbax wrote. Before cells are read
        (`to_read`), their places are looked up at the same time.

        Cost in a bucket: three round trips; for an item of several processes a listing and two reads, and without a
        joined record a read for each process. Raises `CorruptCheckpointError` where one is damaged, or a process's
        sidecar is missing, or all of an item's.
        """
        ahead, self._ahead = self._ahead, None
        return self._manifests(None, to_read) if ahead is None else ahead.result()

    def _manifests(self, names: Sequence[str] | None, to_read: bool) -> list[Manifest]:
        if to_read:
            spread_start(self._profile, self._url)
        items = self.item_names() if names is None else _directories(names)
        found = dict(
            zip(items, all_of(self._url, [partial(self._gathered, item, to_read) for item in items]), strict=True)
        )
        self.without_sidecars = tuple(item for item, own in found.items() if not own)
        self._require_sidecars(self.without_sidecars)
        if self._item is None and not any(found.values()) and marked_in(Place(self._store)) is not None:
            self.require_all_items(items)  # a step of ours without any sidecar has no arrays, or has lost their items
        return with_file_leaves(self._of_one_step({item: own for item, own in found.items() if own}))

    def _gathered(self, item: str, to_read: bool) -> dict[int, Manifest]:
        def joined(key: str) -> bytes:
            return large_objects(self._url, self._profile, _JOINED_BYTES).get(f"{item}/{key}")

        def on_listed() -> None:
            if to_read:
                self._places.of(item)

        return own_sidecars(Place(self._store, item), joined=joined, on_listed=on_listed)

    def _of_one_step(self, found: Mapping[str, Mapping[int, Manifest]]) -> list[Manifest]:
        """The sidecars of all items, if they are all that one save has."""
        manifests = [manifest for own in found.values() for manifest in own.values()]
        whys = [self._wrong_step(item, manifest) for item, own in found.items() for manifest in own.values()]
        whys += [incomplete(f"{self._url}/{item}", own, own, item=item) for item, own in found.items()]
        whys.append(several_saves(self._url, (manifest.save_id for manifest in manifests)))
        if any(whys):
            raise self._corrupt("; ".join(filter(None, whys)))
        return manifests

    def _require_sidecars(self, without: Sequence[str]) -> None:
        """An item without sidecars is stock Orbax's, unless its metadata records that it had some."""
        lost = [lost_sidecars(f"{self._url}/{item}") for item in without if had_sidecars(Place(self._store, item))]
        if lost:
            raise self._corrupt("; ".join(lost))

    def require_all_items(self, items: Sequence[str] | None = None) -> None:
        """Raises `CorruptCheckpointError` if the step has lost the directory of an item. `items` are those that it has,
        where they are known. Cost: a small read."""
        items = self.item_names() if items is None else items
        if (why := missing_items(self._url, item_handlers(Place(self._store)), items)) is not None:
            raise self._corrupt(why)

    def _corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(why, step=self._step, path=self._url)

    def save_id(self) -> SaveId | None:
        """Which save the step is; None for one that stock Orbax wrote.

        Cost: a small read of the marker; if that names no save, a listing and a read of a sidecar. Raises
        `CorruptCheckpointError` if the marker names no save, and a sidecar is damaged or all are missing.
        """
        named = marked_in(Place(self._store))
        if named is not None and named.step == self._step:
            return named
        items = self.item_names()
        for item in items:
            if (first := self._first_sidecar(item, "head")) is not None:
                return first.save_id
        self._require_sidecars(items)
        with suppress(CorruptCheckpointError):
            return save_in_metadata(Place(self._store))
        return None

    def check_custom(self, metadata: Any) -> None:
        """Raises `CorruptCheckpointError` where `metadata`, the custom metadata of the step, is not what was saved.

        Verifies nothing in a step of stock Orbax or of an earlier version. Cost: a listing and a small read.
        """
        for item in self.item_names():
            if (first := self._first_sidecar(item, "head")) is not None:
                require_custom(without_identity(metadata), first.custom, where=self._url, step=self._step)
                return

    def names(self) -> list[str]:
        """The entries right below the step; directories end in `/`."""
        return self._store.list("")

    def item_names(self) -> list[str]:
        """The items of the step: its directories."""
        if self._item is not None:
            return [self._item]
        return _directories(self.names())

    @property
    def round_trips(self) -> bool:
        """Whether reads wait for an answer: many at a time."""
        return self._store.properties.round_trips

    def inline(self, item: str) -> dict[str, bytes]:
        """The small values of the tree of an item, by key; none where it is not understood. Cost: its nodes, once."""
        return self._places.inline(item)

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Begins to read what `read` will be asked for, within `DurableProfile.read_ahead_bytes`."""
        self._cells.expect(self._placed.expect(each for each in wanted if not is_file(each[1])))

    def read(self, item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        """Copies `wanted` (a part of `record.box`) into `into`, whose shape is `wanted.shape`.

        Reads whole cells (of a handler's files in a bucket: whole files), and checks each against its digest; raises
        `CorruptCheckpointError` naming leaf and box.
        """

        def fetch(cell: Box, start: int, stop: int, target: np.ndarray) -> np.ndarray:
            self._pace.take(stop - start)
            if is_file(leaf):
                return self._of_file(item, leaf, start, stop)
            if self._placed.fill(item, leaf, cell, target):
                return target
            stored = self._undamaged(lambda: self._cells.fetch(item, leaf, cell), leaf)
            return self.read_cell(item, leaf, cell) if stored is None else stored

        where = f"step {self._step} in {self._url}, item {item}"
        copy_proven(leaf, record, wanted, into, fetch, where=where)

    def read_cell(self, item: str, leaf: LeafRecord, cell: Box) -> np.ndarray:
        """The elements of one cell as stored, not verified yet: to compare with a digest.

        Raises `CorruptCheckpointError` where they cannot be decoded, `StoreError` where they cannot be reached.
        """
        if is_file(leaf):
            return self._of_file(item, leaf, cell.start[0], cell.stop[0])
        if self._places.describes(item, leaf):  # TensorStore would give these bytes, ten times as slowly
            found = np.empty(cell.shape, np.dtype(leaf.dtype))
            if self._placed.fill(item, leaf, cell, found.reshape(-1).view(np.uint8)):
                return found
        array = self._open(item, leaf)
        return self._undamaged(lambda: self._awaited(array[cell.slices()].read()), leaf)

    def _undamaged(self, operation: Callable[[], Any], leaf: LeafRecord) -> Any:
        return undamaged(operation, self._url, f"{self._url}: leaf {leaf.name}")

    def _of_file(self, item: str, leaf: LeafRecord, start: int, stop: int) -> np.ndarray:
        """Bytes of a file that a handler wrote. In a bucket the whole file is read."""
        size, path = leaf.shape[0], f"{item}/{leaf.path[1]}"
        where = f"{self._url}/{path}"
        try:
            if self._store.properties.file_system:
                with open(f"{self._url.removeprefix('file://')}/{checked_key(path)}", "rb") as file:
                    file.seek(start)
                    data = file.read(stop - start)
            else:
                data = self._object(path, size)[start:stop]
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{where} is missing", step=self._step, path=where) from error
        except ValueError as error:  # a name that is not below the item
            raise CorruptCheckpointError(str(error), step=self._step, path=where) from error
        if len(data) != stop - start:
            raise CorruptCheckpointError(f"{where} ends before byte {stop}", step=self._step, path=where)
        return np.frombuffer(data, np.uint8)

    def _object(self, path: str, size: int) -> bytes:
        """A whole file: the last one is kept, as its cells are asked for one after the other."""
        known, data = self._last_file
        if known != path:
            data = large_objects(self._url, self._profile, size).get(path)
            self._last_file = (path, data)
        return data

    def _awaited(self, future: Any) -> Any:
        return awaited([future], self._profile, self._url, nbytes=self._profile.read_ahead_bytes)[0]

    def _first_sidecar(self, item: str, extent: ManifestDepth) -> Manifest | None:
        """The sidecar of process 0; None if there is none."""
        found = read_sidecar(Place(self._store, item), 0, extent=extent)
        if found is not None and (why := self._wrong_step(item, found)) is not None:
            raise self._corrupt(why)
        return found

    def _wrong_step(self, item: str, found: Manifest) -> str | None:
        return None if self._step is None else wrong_step(f"{self._url}/{item}", found.save_id, self._step)

    def _opened(self, item: str, leaf: LeafRecord, prefix: str) -> Any:
        kvstore = {"driver": "ocdbt", "base": base_of(f"{self._url}/{item}"), "path": prefix}
        opening = partial(ts.open, {"driver": "zarr", "kvstore": kvstore}, open=True, read=True, context=self._context)
        return self._undamaged(lambda: self._awaited(opening()), leaf)

    def _open(self, item: str, leaf: LeafRecord) -> Any:
        with self._lock:
            key = (item, leaf.name)
            if key not in self._arrays:
                try:
                    self._arrays[key] = self._opened(item, leaf, paths.array_prefix(leaf.name))
                except CorruptCheckpointError:
                    if leaf.path != ("",):
                        raise
                    self._arrays[key] = self._opened(item, leaf, "/")  # as versions up to 0.1 wrote it
            array = self._arrays[key]
        if tuple(array.shape) != leaf.shape or array.dtype.numpy_dtype != np.dtype(leaf.dtype):
            raise CorruptCheckpointError(
                f"step {self._step} in {self._url}: leaf {item}:{leaf.name} is {array.dtype.name}{list(array.shape)} "
                f"in its zarr metadata, {leaf.describe()} in the sidecar",
                step=self._step,
                path=self._url,
            )
        return array


def _directories(names: Iterable[str]) -> list[str]:
    return [name.rstrip("/") for name in names if name.endswith("/")]
