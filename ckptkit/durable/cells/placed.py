"""Zarr cells of a step by their places in its data files: on a disk read straight from the files, in a bucket many in
one request. TensorStore would copy twice, and search in the tree for each cell.

Both readers are shortcuts that may decline: cells that they cannot get or understand are left to `CellReader`, which
reports the reason. Digests decide whether bytes are right.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
import tensorstore as ts

from ckptkit.durable.cells.ocdbt import places
from ckptkit.durable.cells.ocdbt_node import Placed
from ckptkit.durable.cells.reader import HEAD_BYTES, Wanted, copied_plain, may_be_encoded
from ckptkit.durable.cells.tensorstore_wait import awaited, base_of
from ckptkit.durable.cells.writer import cell_key, kvstore_context, zarr_text
from ckptkit.errors import CheckpointError, TransientStoreError
from ckptkit.model.boxes import Box, cells_of
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import LeafRecord
from ckptkit.model.paths import array_prefix
from ckptkit.util.disk_file import FileReads

_RANGE_BYTES = 8 << 20  # of a request, unless one cell has more: several at a time are faster than one
_GAP_BYTES = 1 << 20  # between two wanted ranges: read too, since another request costs more
_FILES_MAX = 64  # open at a time, with three descriptors each: a process may have 1,024

_Item = dict[str, Placed | bytes]
_Key = tuple[str, str]  # item, key of a cell


@final
class Places:
    """The places of the cells of each item of a step, read from its database once: none of one that is not understood,
    or has more keys than `keys_max`. Safe from several threads."""

    def __init__(self, step_url: str, profile: DurableProfile, keys_max: int | None = None):
        self.url, self.profile, self._keys_max = step_url, profile, keys_max
        self._context = kvstore_context(profile, writing=False)
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Lock] = {}
        self._bases: dict[str, Any] = {}
        self.known: dict[str, _Item] = {}

    def of(self, item: str) -> _Item:
        """Cost the first time: the nodes of its database, two round trips and 5 to 10 microseconds a key."""
        if (known := self.known.get(item)) is not None:
            return known
        with self._lock:
            reading = self._reading.setdefault(item, threading.Lock())
        with reading:
            if item not in self.known:
                self.known[item] = self._read(item)
            return self.known[item]

    def describes(self, item: str, leaf: LeafRecord) -> bool:
        """Whether a leaf's metadata in zarr is what we write for cells that are stored as they are. Cost: as `of`."""
        document = self.of(item).get(f"{array_prefix(leaf.name)}.zarray")
        return isinstance(document, bytes) and _is_plain(document, leaf.dtype, leaf.shape, leaf.cell)

    def inline(self, item: str) -> dict[str, bytes]:
        """The values that are in the tree of an item itself, by key. Cost: as `of`."""
        return {key: place for key, place in self.of(item).items() if isinstance(place, bytes)}

    def file_of(self, item: str, leaf: LeafRecord, cell: Box) -> str | None:
        """The file that holds a cell, by its path below the step; None where a tree holds it, or it is not known."""
        place = self.of(item).get(cell_key(array_prefix(leaf.name), leaf, cell))
        return f"{item}/{place.path}" if isinstance(place, Placed) else None

    def base(self, item: str) -> Any:
        """The key-value store of an item's files."""
        if item not in self._bases:
            opened = ts.KvStore.open(base_of(f"{self.url}/{item}"), context=self._context)
            self._bases[item] = self._finished(item, opened)
        return self._bases[item]

    def _read(self, item: str) -> _Item:
        with suppress(CheckpointError, OSError, ValueError, KeyError, TypeError, IndexError):
            return places(self.base(item), lambda future: self._finished(item, future), keys_max=self._keys_max)
        return {}

    def _finished(self, item: str, future: Any) -> Any:
        return awaited([future], self.profile, f"{self.url}/{item}")[0]


@lru_cache(maxsize=256)  # many leaves, few different documents
def _is_plain(document: bytes, dtype: str, shape: tuple[int, ...], cell: tuple[int, ...]) -> bool:
    with suppress(ValueError, TypeError, RecursionError):  # TypeError: a dtype that zarr does not have
        return json.loads(document) == json.loads(zarr_text(dtype, shape, cell))
    return False


@final
class PlacedCells:
    """The cells of a step on a disk. Safe from several threads."""

    def __init__(self, places: Places):
        self._directory = Path(places.url.removeprefix("file://"))
        self._places = places
        self._lock = threading.Lock()
        self._files: dict[tuple[str, str], FileReads | None] = {}

    def expect(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Gives back what `fill` will not fill: all of an item whose database it does not understand."""
        return [each for each in wanted if not self._places.of(each[0])]

    def fill(self, item: str, leaf: LeafRecord, cell: Box, target: np.ndarray) -> bool:
        """Fills flat `target` with the bytes of a cell that is stored as it is, whole; False where it is not."""
        size_bytes = leaf.cell_bytes
        if target.nbytes != size_bytes or cell.shape != leaf.cell:  # padded, at the end of an axis
            return False
        place = self._places.of(item).get(cell_key(array_prefix(leaf.name), leaf, cell))
        if isinstance(place, bytes):
            return copied_plain(place, target)
        if place is None or place.length != size_bytes:
            return False
        with suppress(OSError, EOFError, ValueError):
            if (file := self._file(item, place.path)) is not None:
                file.fill(target, place.start)
                return not may_be_encoded(target[:HEAD_BYTES].tobytes(), size_bytes, size_bytes)
        return False

    def stored(self, item: str, key: str, bytes_max: int) -> bytes | None:
        """The value of any key of an item's database, as it is stored; None where it cannot be read here, or is longer
        than `bytes_max`."""
        place = self._places.of(item).get(key)
        if isinstance(place, bytes):
            return place
        if place is None or place.length > bytes_max:
            return None
        found = np.empty(place.length, np.uint8)
        with suppress(OSError, EOFError, ValueError):
            if (file := self._file(item, place.path)) is not None:
                file.fill(found, place.start)
                return found.tobytes()
        return None

    def _file(self, item: str, path: str) -> FileReads | None:
        with self._lock:
            key = (item, path)
            if key not in self._files:
                self._files[key] = None  # once is enough for one that is not there
                self._files[key] = FileReads(self._directory / item / path)
            found = self._files[key]
            if len(self._files) > _FILES_MAX:
                del self._files[next(iter(self._files))]  # closed once nobody reads it
            return found


class _Range:
    """Bytes of one data object that are read together, and how many of the cells in it are still to be given."""

    def __init__(self, item: str, path: str, start: int):
        self.item, self.path, self.start, self.stop = item, path, start, start
        self.cells: list[tuple[_Key, Placed]] = []
        self.begun = False
        self.arriving = threading.Lock()  # one thread takes what arrives, the others have it then
        self.reading: Any = None  # until it is taken: TensorStore holds the bytes too
        self.value: memoryview | None = None

    @property
    def nbytes(self) -> int:
        """Of the request."""
        return self.stop - self.start


@final
class PlacedRanges:
    """The cells of a step in a bucket, as byte ranges of its data objects: neighbours are read together, ahead.

    Holds up to `DurableProfile.read_ahead_bytes`. Safe from several threads.
    """

    def __init__(self, places: Places):
        self._places, self._profile = places, places.profile
        self._lock = threading.Lock()
        self._waiting: deque[_Range] = deque()
        self._ranges: dict[_Key, tuple[_Range, Placed]] = {}
        self._begun_bytes = 0
        self._given_up = False

    def expect(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Begins to read what `fill` will be asked for, in about that order; gives back what it will not fill."""
        if self._given_up:
            return list(wanted)
        left: list[Wanted] = []
        expected: list[tuple[_Key, Placed]] = []
        for each in wanted:
            found = self._placed(each)
            if found is None:
                left.append(each)
            else:
                expected += found
        with self._lock:
            # One that several pieces are cut from is expected once, as it is given once.
            for made in _joined([each for each in expected if each[0] not in self._ranges]):
                self._waiting.append(made)
                self._ranges |= {key: (made, placed) for key, placed in made.cells}
            self._go_on()
        return left

    def fill(self, item: str, leaf: LeafRecord, cell: Box, target: np.ndarray) -> bool:
        """Fills flat `target` with the bytes of a cell that was expected; False where it cannot."""
        key = item, cell_key(array_prefix(leaf.name), leaf, cell)
        with self._lock:
            made, placed = self._ranges.pop(key, (None, None))
        if made is None or placed is None:
            return self._fill_inline(key, target)
        try:
            value = self._value(made)
            start = placed.start - made.start
            return value is not None and copied_plain(value[start : start + placed.length], target)
        finally:
            self._given(made)

    def _fill_inline(self, key: _Key, target: np.ndarray) -> bool:
        found = self._places.known.get(key[0], {}).get(key[1])
        return isinstance(found, bytes) and copied_plain(found, target)

    def _placed(self, wanted: Wanted) -> list[tuple[_Key, Placed]] | None:
        """The places of the wanted cells of a box, without those in the tree itself. None if some are not stored
        plainly: padded, encoded, or in a tree that is not understood."""
        item, leaf, record, box = wanted
        known, prefix, nbytes = self._places.of(item), array_prefix(leaf.name), leaf.cell_bytes
        found = []
        for cell in cells_of(record.box, leaf.cell):
            if record.box != box and cell.intersect(box) is None:
                continue
            place = known.get(key := cell_key(prefix, leaf, cell))
            if cell.shape != leaf.cell or place is None:
                return None
            if isinstance(place, bytes):
                continue
            if place.length != nbytes:
                return None
            found.append(((item, key), place))
        return found

    def _value(self, made: _Range) -> memoryview | None:
        """The bytes of a range; None where they do not come, are not there, or too few."""
        with self._lock:
            if self._given_up:
                return None
            if not made.begun:  # asked for before its turn
                self._waiting.remove(made)
                self._begin(made)
        with made.arriving:
            if made.reading is not None:
                made.value, made.reading = self._arrived(made), None
            return made.value

    def _arrived(self, made: _Range) -> memoryview | None:
        where = f"{self._places.url}/{made.item}"
        try:
            found = awaited([made.reading], self._profile, where, nbytes=self._begun_bytes)[0]
        except TransientStoreError:
            self._give_up()  # another client begins all of it again
            return None
        except ValueError:
            return None
        value = found.value if found.state == "value" else b""  # each access makes a copy of all of it
        return memoryview(value) if len(value) == made.nbytes else None

    def _give_up(self) -> None:
        with self._lock:
            self._given_up = True
            self._waiting.clear()

    def _given(self, made: _Range) -> None:
        """One cell of a range was delivered: frees the bytes of a range without further cells, and starts other
        ranges."""
        with self._lock:
            made.cells.pop()
            if not made.cells:
                made.value = None
                self._begun_bytes -= made.nbytes * made.begun
                self._go_on()

    def _go_on(self) -> None:
        while self._waiting and (
            not self._begun_bytes or self._begun_bytes + self._waiting[0].nbytes <= self._profile.read_ahead_bytes
        ):
            self._begin(self._waiting.popleft())

    def _begin(self, made: _Range) -> None:
        made.begun = True
        made.reading = self._places.base(made.item).read(made.path, byte_range=slice(made.start, made.stop))
        self._begun_bytes += made.nbytes


def _joined(expected: Iterable[tuple[_Key, Placed]]) -> list[_Range]:
    """Ranges of neighbours, in the order in which the first cell of each is expected; no cell is in two."""
    in_order = {key: (at, placed) for at, (key, placed) in enumerate(expected)}
    made: list[tuple[int, _Range]] = []
    for key, (at, placed) in sorted(in_order.items(), key=lambda each: (each[0][0], each[1][1])):
        last = made[-1][1] if made else None
        stop = placed.start + placed.length
        near = (
            last is not None
            and (last.item, last.path) == (key[0], placed.path)
            and placed.start - last.stop <= _GAP_BYTES
            and stop - last.start <= _RANGE_BYTES
        )
        if last is None or not near:
            last = _Range(key[0], placed.path, placed.start)
            made.append((at, last))
        last.cells.append((key, placed))
        last.stop = max(last.stop, stop)
        made[-1] = min(at, made[-1][0]), last
    return [each for _, each in sorted(made, key=lambda pair: pair[0])]
