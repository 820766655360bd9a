"""The bytes of slots: a file for each, or anonymous memory, which is made, mapped, grown, written and synced."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, final

import numpy as np

from ckptkit.errors import TierUnusableError
from ckptkit.model import paths
from ckptkit.slots.directory import FileIdentity, identity_of
from ckptkit.slots.host_memory import LESS_ON_MOUNT, mount_room, store_full
from ckptkit.store.local import sync_directory
from ckptkit.util.disk_file import DiskFile, Method, open_slot
from ckptkit.util.pages import PAGE_BYTES, populate, whole_pages

_T = TypeVar("_T")


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

    def make(self, name: str, size_bytes: int, turn: Callable[[], None] = lambda: None) -> np.ndarray:
        """The memory of a slot of whole pages, which is made or grown; what its file holds stays. No view of it may be
        held. Raises `StoreFullError` if the mount has no room for it."""
        if self._synced and self._directory is not None:
            self.unmap(name)
            self._files[name] = _allocated(DiskFile, self._directory / name, size_bytes)
            self._made[name] = identity_of(self._directory / name)
            sync_directory(self._directory)  # no manifest may reach the disk before the name of its slot
            return self._files[name].memory
        if self._directory is None:
            mapping = mmap.mmap(-1, size_bytes)
        else:
            mapping = _allocated(_map_file, self._directory / name, size_bytes)
            self._made[name] = identity_of(self._directory / name)
        self._maps[name] = mapping
        memory = np.frombuffer(mapping, np.uint8)
        populate(memory, turn)  # an old kernel cannot: pages are faulted in by the first copy then
        return memory

    def warm_up(self, name: str) -> None:
        """Writes a new file of a disk once, and finds the faster method with the first. The slot holds nothing."""
        file = self._files[name]
        if file.is_new:
            file.fill()
        if not self._probed:
            self.method, self._probed = file.faster_method(), True

    def write(self, name: str, source: np.ndarray, start: int) -> None:
        """Overwrites a file of a disk from byte `start` (of a page) with flat, page-aligned bytes, by `method`."""
        self._files[name].write(source, start, self.method)

    def is_on_disk(self, name: str) -> bool:
        """Whether the slot has a file that `sync` has to bring to a disk."""
        return name in self._files

    def sync(self, name: str) -> None:
        """Returns once what was written is on the disk."""
        self._files[name].sync()

    def unmap(self, name: str) -> None:
        """Closes a slot's file; its bytes stay."""
        if name in self._files:
            self._files.pop(name).close()
        with suppress(BufferError):  # a view is still held somewhere: unmapped when that goes
            if (mapping := self._maps.pop(name, None)) is not None:
                mapping.close()

    def remove(self, name: str) -> None:
        """Closes and deletes a slot's file. Its manifest has to be deleted before."""
        self.unmap(name)
        self._made.pop(name, None)
        if self._directory is not None:
            (self._directory / name).unlink(missing_ok=True)

    def forget_lost(self, name: str) -> None:
        """Closes the file of a slot that is `lost`: it is made anew when it is needed."""
        self.unmap(name)
        del self._made[name]

    def lost(self, names: Iterable[str]) -> TierUnusableError | None:
        """The error of slots, or of the lock, whose files are no longer those of the directory. Cost: a `stat` each."""
        if self._directory is None:
            return None
        looked = [paths.LOCK_NAME, *names]
        gone = [n for n in looked if (made := self._made.get(n)) and identity_of(self._directory / n) != made]
        if not gone:
            return None
        return TierUnusableError(
            f"tier directory {self._directory} has lost {', '.join(gone)}: something removed or replaced these files "
            "while the job ran. Exempt the directory from cleaners, set RemoveIPC=no in logind.conf for a job of a "
            "login user, and mount nothing over it",
            path=str(self._directory),
        )

    def allocated_bytes(self, name: str) -> int:
        """The bytes that a slot has now, mapped or not."""
        if self._directory is None:
            return len(self._maps.get(name, b""))
        try:
            return (self._directory / name).stat().st_size
        except FileNotFoundError:
            return 0


def _allocated(make: Callable[[Path, int], _T], path: Path, size_bytes: int) -> _T:
    """The result of `make`; raises `StoreFullError` if the mount has no room for it."""
    try:
        return make(path, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise store_full(mount_room(path.parent), f"slot {path} needs {size_bytes} bytes", LESS_ON_MOUNT) from error


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
