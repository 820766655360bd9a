"""The data that a process serves to others: the committed shares on its host, and only the boxes of their slots."""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ckptkit.errors import CheckpointError
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import Manifest, SaveId
from ckptkit.slots.reader import manifest_name_of, read_manifest, readable_slot_directories

RANGE_BYTES_MAX = 8 << 20  # of one answer, which is in memory: a stalled client does not block a slot
_KNOWN_MAX = 16
NAMED_SAVE = r"([0-9]{1,8}\.[0-9]{1,12}\.[0-9]{1,8}(?:\.[0-9a-f]{16})?)"  # in the path of a request


def save_name(save_id: SaveId) -> str:
    """How a request names a save."""
    return ".".join(map(str, (save_id.epoch, save_id.step, save_id.number, save_id.run))).removesuffix(".")


def save_named(name: str) -> SaveId:
    """The save that a request names."""
    return SaveId.from_list(name.split("."))


class NotHeldError(CheckpointError):
    """Nothing of that name is on this host."""


class SupersededError(CheckpointError):
    """It was here: the slot holds, or will hold, a newer save."""


class BadRangeError(CheckpointError):
    """No such bytes are in a box of the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    path: Path  # of the manifest
    identity: tuple[int, ...]
    slot: Path
    text: bytes
    tag: str
    starts: Sequence[int]  # of the boxes in the slot, ascending
    stops: Sequence[int]


@final
class ShareIndex:
    """Reads only what a committed manifest below `host_dirs` names. No word of a request becomes part of a path.

    Safe from several threads.
    """

    def __init__(self, host_dirs: Mapping[str, Path]):
        self._host_dirs = host_dirs
        self._lock = threading.RLock()
        self._metadata_index: dict[tuple[SaveId, int], _Share] = {}

    def manifest(self, save_id: SaveId, process: int) -> tuple[str, bytes]:
        """A tag that names it and the size of its slot (`slot_bytes_of`), and the manifest of what `process` wrote of a
        save, from the fastest tier that has it.

        Raises `NotHeldError`.
        """
        share = self._find(save_id, process)
        return share.tag, share.text

    def read(self, save_id: SaveId, process: int, tag: str, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)` of the slot of the manifest that `tag` names; they lie in one box of it.

        Takes no lease, so no save waits for it. The manifest is looked at again after the copy: a save deletes it
        before it overwrites the slot. At most `RANGE_BYTES_MAX`. Raises `NotHeldError`, `SupersededError`,
        `BadRangeError`.
        """
        share = self._find(save_id, process)
        if share.tag != tag:
            raise SupersededError(f"save {save_id} of process {process} has moved to another slot")
        _check_range(share, start, stop)
        try:
            data = _read(share.slot, start, stop)
        except OSError as error:  # a lost sector, for example: the client has other sources
            raise NotHeldError(f"cannot be read: {error.strerror}: {share.slot}") from error
        if _identity(share.path) != share.identity:
            raise SupersededError(f"save {save_id} of process {process} was superseded while it was read")
        if len(data) != stop - start:
            raise NotHeldError(f"{share.slot} ends before byte {stop}")
        return data

    def _find(self, save_id: SaveId, process: int) -> _Share:
        key = (save_id, process)
        with self._lock:
            known = self._metadata_index.get(key)
        if known is not None and _identity(known.path) == known.identity:
            return known
        for host_dir in self._host_dirs.values():
            for directory in readable_slot_directories(host_dir):
                found = _share_at(directory, save_id, process)
                if found is not None:
                    with self._lock:
                        self._metadata_index[key] = found
                        while len(self._metadata_index) > _KNOWN_MAX:
                            del self._metadata_index[next(iter(self._metadata_index))]
                    return found
        raise NotHeldError(f"no slot here holds save {save_id} of process {process}")


def slot_bytes_of(tag: str) -> int:
    """The size of the slot whose manifest a tag names: no box lies beyond it. 0 if it is not a tag."""
    named = re.fullmatch(r"[0-9a-f]+-([0-9]{1,18})", tag)
    return int(named[1]) if named else 0


def _share_at(directory: Path, save_id: SaveId, process: int) -> _Share | None:
    try:
        path = directory / manifest_name_of(save_id)
        identity = _identity(path)
        if identity is None:
            return None
        manifest = read_manifest(path)
        text = path.read_bytes()
        slot_bytes = (directory / manifest.slot).lstat().st_size
        if (manifest.save_id, manifest.writer.process) != (save_id, process) or _identity(path) != identity:
            return None
    except (OSError, ValueError, CheckpointError):  # another tier may have it whole
        return None
    extents = sorted(_extents(manifest))
    return _Share(
        path=path,
        identity=identity,
        slot=directory / manifest.slot,
        text=text,
        tag=f"{digest_of(text)}-{slot_bytes}",
        starts=[start for start, _ in extents],
        stops=[stop for _, stop in extents],
    )


def _extents(manifest: Manifest) -> Iterator[tuple[int, int]]:
    for leaves in manifest.arrays.values():
        for leaf in leaves:
            for record in leaf.boxes:
                if record.offset >= 0:
                    yield record.offset, record.offset + record.box.size * leaf.itemsize


def _check_range(share: _Share, start: int, stop: int) -> None:
    at = bisect_right(share.starts, start) - 1
    # Boxes without elements share their place with the next one, which sorts after them.
    if not 0 <= start < stop or stop - start > RANGE_BYTES_MAX or at < 0 or stop > share.stops[at]:
        raise BadRangeError(f"bytes {start} to {stop} are not within one box, or more than {RANGE_BYTES_MAX}")


def _read(slot: Path, start: int, stop: int) -> bytes:
    fd = os.open(slot, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.pread(fd, stop - start, start)  # not mapped: a file that is cut short must not kill the job
    finally:
        os.close(fd)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
