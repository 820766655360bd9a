"""Slots and their bytes: a file for each, or anonymous memory, which is made, mapped, grown, written and synced."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, final

import numpy as np

from ckptkit.errors import TierUnusableError
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.slots.directory import FileIdentity, identity_of
from ckptkit.slots.host_memory import LESS_ON_MOUNT, mount_room, store_full
from ckptkit.store.local import sync_directory
from ckptkit.util.disk_file import DiskFile, Method, open_slot
from ckptkit.util.pages import PAGE_BYTES, populate, whole_pages
from ckptkit.util.words import size_text

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Contents:
    """The bytes of a slot on a disk, as far as they are known: a digest for each cell, by its byte range. `kept_saves`:
    how many saves in a row have left some of them as they were."""

    digests: Mapping[tuple[int, int], str]
    kept_saves: int = 0


UNKNOWN: Final = Contents({})


@dataclass(eq=False, slots=True)
class Slot:
    """One reusable block of host memory. `memory` is a flat uint8 view; no jax.Array may reference it."""

    name: str
    memory: np.ndarray
    save_id: SaveId | None = None  # the save in its committed manifest
    leases: int = 0  # who reads or writes it now
    contents: Contents = UNKNOWN  # whoever writes the slot sets it; unknown again where a write or a sync fails


def reusable(slots: Iterable[Slot], protected: Collection[SaveId]) -> Slot | None:
    """The slot to be written next: an empty one, or the one with the oldest save. None while all are leased or hold
    a protected save."""
    free = [slot for slot in slots if slot.leases == 0 and slot.save_id not in protected]
    return min(free, key=lambda slot: slot.save_id or SaveId(-1, -1, -1), default=None)


def file_bytes(size_bytes: int) -> int:
    """The bytes of a slot's file for a save that takes `size_bytes`: whole pages, at least one."""
    return max(PAGE_BYTES, whole_pages(size_bytes))


@final
class SlotFiles:
    """The bytes of the slots of one directory, or of anonymous ones (`directory=None`), by the names of the slots.

    `synced`: they are on a disk, and written through `write`. Others are mapped memory. A file that was unlinked,
    replaced or hidden by a mount since it was made is `lost`; so is the lock of the directory.
    """

    def __init__(self, directory: Path | None, *, synced: bool):
        self._directory = directory
        self._synced = synced
        self._maps: dict[str, mmap.mmap] = {}  # of slots in memory
        self._files: dict[str, DiskFile] = {}  # of slots on a disk
        self._made: dict[str, FileIdentity | None] = {}  # the files of slots, and the lock: as they were taken
        self.method: Method = "direct"  # how these are written, where the file system allows it
        self._probed = False
        self.take_lock()

    def take_lock(self) -> None:
        """The lock that the directory has now is the one that this process holds."""
        if self._directory is not None:
            self._made[paths.LOCK_NAME] = identity_of(self._directory / paths.LOCK_NAME)

    def make(self, slot: Slot, size_bytes: int) -> None:
        """Makes or grows the memory of a slot, in whole pages; what its file holds stays, and is not known any more.
        Raises `StoreFullError` if the mount has no room for it. Cost: 0.1 s for each GB; pages are faulted in by the
        first copy, or by `fault_in`."""
        slot.memory, slot.contents = np.empty(0, np.uint8), UNKNOWN
        if self._synced and self._directory is not None:
            self.unmap(slot)
            file = self._files[slot.name] = _allocated(DiskFile, self._directory / slot.name, size_bytes, is_disk=True)
            self._made[slot.name] = identity_of(self._directory / slot.name)
            sync_directory(self._directory)  # no manifest may reach the disk before the name of its slot
            slot.memory = file.memory
            return
        if self._directory is None:
            mapping = mmap.mmap(-1, size_bytes)
        else:
            mapping = _allocated(_map_file, self._directory / slot.name, size_bytes, is_disk=False)
            self._made[slot.name] = identity_of(self._directory / slot.name)
        self._maps[slot.name] = mapping
        slot.memory = np.frombuffer(mapping, np.uint8)

    def fault_in(self, slot: Slot, go_on: Callable[[], bool]) -> None:
        """Faults in the pages of a slot in memory, and writes a new file of a disk once, which finds the faster method
        with the first; such a slot holds no save. `go_on`: see `populate`."""
        if slot.name in self._maps:
            populate(slot.memory, go_on)  # an old kernel cannot
        elif slot.name in self._files and slot.save_id is None:
            self._warm_up(slot)

    def _warm_up(self, slot: Slot) -> None:
        slot.contents, file = UNKNOWN, self._files[slot.name]
        if file.is_new:
            file.fill()
        if not self._probed:
            self.method, self._probed = file.faster_method(), True

    def write(self, slot: Slot, source: np.ndarray, start: int) -> None:
        """Overwrites a file of a disk from byte `start` (of a page) with flat, page-aligned bytes, by `method`."""
        self._files[slot.name].write(source, start, self.method)

    def sync(self, slot: Slot) -> None:
        """Returns once what was written is on the disk; at once for memory. Where it fails, the contents are unknown: a
        later sync does not write what a failed one has lost."""
        if (file := self._files.get(slot.name)) is not None:
            contents, slot.contents = slot.contents, UNKNOWN
            file.sync()
            slot.contents = contents

    def unmap(self, slot: Slot) -> None:
        """Closes the file of a slot; its bytes stay. Until it is made again it is never `lost`."""
        slot.memory = np.empty(0, np.uint8)
        self._made.pop(slot.name, None)
        if slot.name in self._files:
            self._files.pop(slot.name).close()
        with suppress(BufferError):  # a view is still held somewhere: unmapped when that goes
            if (mapping := self._maps.pop(slot.name, None)) is not None:
                mapping.close()

    def remove(self, slot: Slot) -> None:
        """Closes and deletes a slot's file. Its manifest has to be deleted before."""
        self.unmap(slot)
        if self._directory is not None:
            (self._directory / slot.name).unlink(missing_ok=True)

    def lost(self, slots: Iterable[Slot]) -> TierUnusableError | None:
        """The error of slots, or of the lock, whose files are no longer those of the directory. Cost: a `stat` each."""
        if self._directory is None:
            return None
        looked = [paths.LOCK_NAME, *(slot.name for slot in slots)]
        gone = [n for n in looked if (made := self._made.get(n)) and identity_of(self._directory / n) != made]
        if not gone:
            return None
        return TierUnusableError(
            f"tier directory {self._directory} has lost {', '.join(gone)}: something removed or replaced these files "
            "while the job ran. Exempt the directory from cleaners, set RemoveIPC=no in logind.conf for a job of a "
            "login user, and mount nothing over it",
            path=str(self._directory),
        )

    def allocated_bytes(self, slot: Slot) -> int:
        """The bytes that a slot has now, mapped or not."""
        if self._directory is None:
            return len(self._maps.get(slot.name, b""))
        try:
            found = (self._directory / slot.name).stat()
        except FileNotFoundError:
            return 0
        return max(found.st_size, 512 * found.st_blocks)  # a file that is being allocated has no size yet


def _allocated(make: Callable[[Path, int], _T], path: Path, size_bytes: int, *, is_disk: bool) -> _T:
    """The result of `make`; raises `StoreFullError` if the mount has no room for it."""
    try:
        return make(path, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        room = mount_room(path.parent, is_disk=is_disk)
        raise store_full(room, f"slot {path} needs {size_text(size_bytes)}", LESS_ON_MOUNT) from error


def _map_file(path: Path, size_bytes: int) -> mmap.mmap:
    """Maps a file of at least `size_bytes`, allocated; what it holds stays."""
    fd = open_slot(path)
    try:
        size_bytes = max(size_bytes, os.fstat(fd).st_size)  # a larger slot of an earlier state is kept
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = mmap.mmap(fd, size_bytes)
        # Else the end of the process activates each page on the kernel's list of used pages: 3 GB of new slots
        # are unmapped in 0.25 s instead of 0.8 (Linux 6.18, load of 8). A launcher restarts the job only after that.
        mapping.madvise(mmap.MADV_SEQUENTIAL)
        return mapping
    finally:
        os.close(fd)
