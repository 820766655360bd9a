"""Keeps copies of other processes' shares: writes their bytes into its own slots, and verifies them before they count.

POST /copies/<save>/<process>            {"bytes": n}              a slot for a copy: its name
PUT  /copies/<save>/<process>/bytes      Content-Range, the bytes
POST /copies/<save>/<process>/manifest   the manifest              verified, then committed
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.cells import digested_cells
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.peers.server import Answer
from ckptkit.peers.share_index import NAMED_SAVE, RANGE_BYTES_MAX, save_named
from ckptkit.slots.arena import Arena
from ckptkit.slots.files import Slot

_COPY = re.compile(rf"/copies/{NAMED_SAVE}/([0-9]{{1,6}})(|/bytes|/manifest)")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/\*")
_SLOT_BYTES_MAX = 1 << 46


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A copy in flight; its slot is leased."""

    save_id: SaveId
    slot: Slot
    size_bytes: int


@final
class CopyReceiver:
    """One arena for each process whose copies this one keeps. Safe from several threads.

    An arena takes one copy at a time: a sender that begins again, after it died or gave up, ends what it began before.
    A copy is a committed slot, found by every later run, only once each cell matched its digest.
    """

    def __init__(self, peer_arenas: Mapping[int, Arena]):
        self._peer_arenas = peer_arenas
        self._locks = {process: threading.Lock() for process in peer_arenas}
        self._coming: dict[int, _Coming] = {}

    def __call__(self, method: str, path: str, content_range: str, body: bytes) -> Answer | None:
        """The answer to a request; None for one that is none of the above. Raises `StoreFullError`."""
        named = _COPY.fullmatch(path)
        if named is None:
            return None
        save_id, process = save_named(named[1]), int(named[2])
        peer_arena = self._peer_arenas.get(process)
        if peer_arena is None:
            return Answer(404, b"no copies of that process are kept here")
        with self._locks[process]:
            if (method, named[3]) == ("POST", ""):
                return self._begin(peer_arena, process, save_id, body)
            if (method, named[3]) == ("PUT", "/bytes"):
                return self._take(process, save_id, content_range, body)
            if (method, named[3]) == ("POST", "/manifest"):
                return self._commit(peer_arena, process, save_id, body)
        return None

    def end(self, save_id: SaveId) -> None:
        """The save is decided: transfers of it that still run are dropped, and its slots are free."""
        for process, peer_arena in self._peer_arenas.items():
            with self._locks[process]:
                coming = self._coming.get(process)
                if coming is not None and coming.save_id <= save_id:
                    self._drop(peer_arena, process)

    def _begin(self, peer_arena: Arena, process: int, save_id: SaveId, body: bytes) -> Answer:
        self._drop(peer_arena, process)
        try:
            size_bytes = int(json.loads(body)["bytes"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return Answer(400, b"how many bytes?")
        if not 0 <= size_bytes <= _SLOT_BYTES_MAX:
            return Answer(400, b"how many bytes?")
        slot = peer_arena.acquire(size_bytes)
        if slot is None:
            return Answer(503, b"no free slot")
        self._coming[process] = _Coming(save_id=save_id, slot=slot, size_bytes=size_bytes)
        return Answer(200, slot.name.encode())

    def _take(self, process: int, save_id: SaveId, content_range: str, body: bytes) -> Answer:
        coming = self._coming.get(process)
        if coming is None or coming.save_id != save_id:
            return Answer(412, b"no copy of that save is in flight")
        named = _RANGE.fullmatch(content_range)
        start, stop = (int(named[1]), int(named[2]) + 1) if named else (0, 0)
        fits = start < stop <= coming.size_bytes and len(body) == stop - start <= RANGE_BYTES_MAX
        if not fits:
            return Answer(416, b"not a range of the slot, or not its bytes")
        memoryview(coming.slot.memory)[start:stop] = body  # pyright: ignore[reportArgumentType]
        return Answer(200)

    def _commit(self, peer_arena: Arena, process: int, save_id: SaveId, body: bytes) -> Answer:
        coming = self._coming.get(process)
        if coming is None or coming.save_id != save_id:
            return Answer(200) if save_id in peer_arena.held() else Answer(412, b"no copy of that save is in flight")
        try:
            manifest = Manifest.from_bytes(body, path=f"copy of process {process}")
            _prove(manifest, coming, process)
            peer_arena.commit(coming.slot, save_id, body)
        except CorruptCheckpointError as error:
            self._drop(peer_arena, process)
            return Answer(422, str(error).encode())
        except BaseException:
            self._drop(peer_arena, process)
            raise
        del self._coming[process]
        peer_arena.release(coming.slot)
        return Answer(200)

    def _drop(self, peer_arena: Arena, process: int) -> None:
        coming = self._coming.pop(process, None)
        if coming is not None:
            peer_arena.release(coming.slot)


def _prove(manifest: Manifest, coming: _Coming, process: int) -> None:
    """Raises `CorruptCheckpointError` unless the slot matches the manifest bit for bit."""
    if (manifest.save_id, manifest.writer.process, manifest.slot) != (coming.save_id, process, coming.slot.name):
        raise CorruptCheckpointError(
            f"the manifest is of save {manifest.save_id}, process {manifest.writer.process}, {manifest.slot}"
        )
    for _, leaf, record, cell, start, stop, digest in digested_cells(manifest):
        if record.offset < 0 or record.offset + stop > coming.size_bytes:
            raise CorruptCheckpointError(f"leaf {leaf.name} lies outside of the slot")
        found = digest_of(coming.slot.memory[record.offset + start : record.offset + stop])
        if found != digest:
            raise CorruptCheckpointError(
                f"leaf {leaf.name}, cell {cell.start} came with digest {found}, expected {digest}"
            )
