"""Slots: preallocated, memory-mapped files that are reused from save to save. One arena is one process's.

Order is sacred. Writing: unlink the slot's manifest, sync the directory (disk), overwrite the bytes, sync them,
rename the new manifest into place, sync the directory. A manifest therefore never names bytes that are not its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from ckptkit import layout
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StoreFullError, TierUnusableError
from ckptkit.manifest import MANIFEST_BYTES_MAX, BoxRecord, LeafRecord, Manifest, SaveId, copy_proven
from ckptkit.sharding import Box
from ckptkit.store import LocalStore
from ckptkit.store.local import sync_directory

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: fault pages in without touching what they hold


@dataclass(eq=False, slots=True)
class Slot:
    """One reusable block of host memory. `memory` is a flat uint8 view; no jax.Array may reference it."""

    name: str
    memory: np.ndarray
    save_id: SaveId | None = None  # what a committed manifest says it holds
    leases: int = 0  # who reads or writes it now


@final
class Arena:
    """The slots of one process on one tier, or anonymous ones (`directory=None`) that are only a staging area.

    A slot is handed out for writing only while nobody holds a lease on it and it does not hold the protected save,
    which is the newest one committed by all processes. Safe from several threads.
    """

    def __init__(self, directory: Path | None, *, slots: int, synced: bool, lock_fd: int | None = None):
        self.directory = directory
        self.synced = synced
        self._lock_fd = lock_fd
        self._changed = threading.Condition()
        self._slots = [Slot(layout.slot_name(i), np.empty(0, np.uint8)) for i in range(slots)]
        self._maps: dict[str, mmap.mmap] = {}
        self._protected: SaveId | None = None
        self._store = LocalStore(directory, durable=synced) if directory is not None else None
        self._retired: list[Slot] = []  # of a run with more slots: kept until a newer save is protected
        if directory is not None:
            self._take_over(directory)

    @classmethod
    def open(cls, host_dir: Path, local_rank: int, *, slots: int, synced: bool) -> Arena:
        """The arena of this process below its host's directory, mode 0700, held by `flock` until `close`.

        A directory that another process still holds (one of the previous run that has not died yet) is left to
        it, and the next free name is taken. Raises `TierUnusableError` where the directory cannot be used.
        """
        for attempt in range(100):
            directory = host_dir / (f"{local_rank}" if attempt == 0 else f"{local_rank}.{attempt}")
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                fd = os.open(directory / layout.LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise TierUnusableError(
                    f"tier directory {directory} cannot be used: {error.strerror}; give a directory that this user "
                    "may write",
                    path=str(directory),
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            return cls(directory, slots=slots, synced=synced, lock_fd=fd)
        raise TierUnusableError(f"every slot directory below {host_dir} is held by another process", path=str(host_dir))

    def reserve(self, size_bytes: int) -> None:
        """Makes every free slot at least `size_bytes` large and faults its pages in; for a background thread.

        Costs a first touch of that memory, 0.3 to 5 GB/s, which a save would otherwise pay. A slot is leased while
        it is made; one that holds a save keeps it and is only mapped. Raises `StoreFullError` with the bytes needed
        and free; slots that were made before it stay.
        """
        for slot in self._slots:
            with self._changed:
                if slot.leases or not self._may_reserve(slot, size_bytes):
                    continue
                slot.leases = 1
            try:
                self._grow(slot, size_bytes)
            finally:
                self.release(slot)

    def check_room(self, size_bytes: int) -> None:
        """Raises `StoreFullError` where the slots cannot all have `size_bytes`, with the bytes needed and free."""
        if self.directory is None:
            return
        missing_bytes = sum(max(0, size_bytes - _allocated_bytes(self.directory / slot.name)) for slot in self._slots)
        free_bytes = _free_bytes(self.directory)
        if missing_bytes > free_bytes:
            raise StoreFullError(
                f"{self.directory} needs {missing_bytes} more bytes for {len(self._slots)} slots of {size_bytes}, "
                f"{free_bytes} are free; mount a larger ramdisk, give fewer slots, or leave this tier out",
                path=str(self.directory),
            )

    def acquire(self, size_bytes: int, *, timeout_s: float = 0.0) -> Slot | None:
        """A leased slot of at least `size_bytes` to write, its old manifest gone; None when all are in use.

        Waits up to `timeout_s` for a lease to end. Prefers empty slots, then the one with the oldest save.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._reusable() is not None, timeout_s)
            slot = self._reusable()
            if slot is None:
                return None
            slot.leases = 1
        try:
            self._forget(slot)
            self._grow(slot, size_bytes)
        except BaseException:
            self.release(slot)
            raise
        return slot

    def commit(self, slot: Slot, manifest: Manifest) -> None:
        """Makes `manifest` the truth about `slot`: data synced first (disk), then the manifest, then its name."""
        if self._store is not None:
            if self.synced and slot.name in self._maps:
                self._maps[slot.name].flush()
            try:
                self._store.put(_manifest_name(manifest.save_id), manifest.to_bytes(), mode="create")
            except FileExistsError:
                raise  # another save's: never taken back
            except BaseException:
                with suppress(CheckpointError, OSError):  # its name may be there: nothing may stay that names this slot
                    self._store.delete(_manifest_name(manifest.save_id))
                raise
        with self._changed:
            slot.save_id = manifest.save_id

    def discard(self, slot: Slot) -> None:
        """Forgets what `slot` holds: its manifest goes."""
        with self._changed:
            self._forget(slot)

    def forget_step(self, step: int) -> None:
        """Forgets every save of `step`: their manifests go, their slots are free."""
        with self._changed:
            for slot in [*self._slots, *self._retired]:
                if slot.save_id is not None and slot.save_id.step == step:
                    self._forget(slot)
            self._changed.notify_all()

    def protect(self, save_id: SaveId) -> None:
        """Says that `save_id` is the newest save committed by all processes: it is kept until the next such call."""
        with self._changed:
            self._protected = save_id
            self._drop_retired()
            self._changed.notify_all()

    def lease(self, slot: Slot) -> None:
        """Keeps `slot` from being overwritten until `release`."""
        with self._changed:
            slot.leases += 1

    def release(self, slot: Slot) -> None:
        """Ends one lease."""
        with self._changed:
            slot.leases -= 1
            assert slot.leases >= 0
            self._changed.notify_all()

    def held(self) -> list[SaveId]:
        """The saves that committed slots hold."""
        with self._changed:
            slots = [*self._slots, *self._retired]
            return [slot.save_id for slot in slots if slot.save_id is not None]

    def manifests(self) -> list[Manifest]:
        """The committed manifests of this arena; damaged ones are left where they are and left out."""
        return [manifest for _, manifest in read_manifests([self.directory] if self.directory else [])[0]]

    def close(self, *, remove: bool = False) -> None:
        """Unmaps the slots and gives up the lock; with `remove`, deletes the slots and manifests too."""
        with self._changed:
            for slot in self._slots:
                slot.memory = np.empty(0, np.uint8)
            for mapping in self._maps.values():
                with suppress(BufferError):  # a view is still held somewhere: unmapped when that goes
                    mapping.close()
            self._maps.clear()
            if remove and self.directory is not None:
                _remove_slots(self.directory)
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def _take_over(self, directory: Path) -> None:
        """Finds what the process before left here: committed slots, slots beyond today's count, unfinished puts."""
        held = {manifest.slot: manifest.save_id for manifest in reversed(self.manifests())}
        self._protected = max(held.values(), default=None)
        for slot in self._slots:
            slot.save_id = held.get(slot.name)
        mine = {slot.name for slot in self._slots}
        for name in sorted(os.listdir(directory)):
            if layout.slot_index(name) is not None and name not in mine:
                self._retired.append(Slot(name, np.empty(0, np.uint8), save_id=held.get(name)))
            elif name.startswith(".put-"):
                (directory / name).unlink(missing_ok=True)
        self._drop_retired()

    def _drop_retired(self) -> None:
        for slot in list(self._retired):
            if self.directory is not None and (slot.save_id is None or slot.save_id != self._protected):
                self._forget(slot)
                (self.directory / slot.name).unlink(missing_ok=True)
                self._retired.remove(slot)

    def _may_reserve(self, slot: Slot, size_bytes: int) -> bool:
        if self.directory is None or slot.save_id is None:
            return True
        return _allocated_bytes(self.directory / slot.name) >= size_bytes

    def _reusable(self) -> Slot | None:
        free = [
            slot
            for slot in self._slots
            if slot.leases == 0 and (slot.save_id is None or slot.save_id != self._protected)
        ]
        return min(free, key=lambda slot: slot.save_id or SaveId(-1, -1, -1), default=None)

    def _grow(self, slot: Slot, size_bytes: int) -> None:
        size_bytes = max(layout.PAGE_BYTES, -(-size_bytes // layout.PAGE_BYTES) * layout.PAGE_BYTES)
        if slot.memory.nbytes >= size_bytes:
            return
        slot.memory = np.empty(0, np.uint8)
        if self.directory is None:
            mapping = mmap.mmap(-1, size_bytes)
        else:
            mapping = _map_file(self.directory / slot.name, size_bytes)
        with suppress(OSError):  # an old kernel: pages are faulted in by the first copy instead
            mapping.madvise(_POPULATE_WRITE)
        self._maps[slot.name] = mapping
        slot.memory = np.frombuffer(mapping, np.uint8)

    def _forget(self, slot: Slot) -> None:
        if slot.save_id is not None and self._store is not None:
            self._store.delete(_manifest_name(slot.save_id))
        slot.save_id = None


def _manifest_name(save_id: SaveId) -> str:
    return layout.manifest_name(save_id.step, save_id.epoch, save_id.number)


def _map_file(path: Path, size_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size_bytes = max(size_bytes, os.fstat(fd).st_size)  # a larger slot of an earlier state is kept
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StoreFullError(
                f"slot {path} needs {size_bytes} bytes, {_free_bytes(path.parent)} are free in {path.parent}; "
                "mount a larger ramdisk, give fewer slots, or leave this tier out",
                path=str(path),
            ) from error
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def _allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _free_bytes(directory: Path) -> int:
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize


def _remove_slots(directory: Path) -> None:
    names = sorted(os.listdir(directory))
    for name in [n for n in names if layout.save_of_manifest(n)] + [
        n for n in names if layout.slot_index(n) is not None
    ]:
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)


def slot_directories(host_dir: Path) -> list[Path]:
    """The slot directories of this host's processes; no other host's directory is opened."""
    with suppress(OSError):  # not there, or not ours to read: this host holds nothing then
        return sorted(Path(entry.path) for entry in os.scandir(host_dir) if entry.is_dir(follow_symlinks=False))
    return []


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`; raises `CorruptCheckpointError` where it is damaged or implausibly large."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CorruptCheckpointError(f"manifest {path} is no regular file", path=str(path))
    if path.stat().st_size > MANIFEST_BYTES_MAX:
        raise CorruptCheckpointError(f"manifest {path} is larger than {MANIFEST_BYTES_MAX} bytes", path=str(path))
    manifest = Manifest.from_bytes(path.read_bytes(), path=str(path))
    if layout.slot_index(manifest.slot) is None or _manifest_name(manifest.save_id) != path.name:
        raise CorruptCheckpointError(
            f"manifest {path} names slot {manifest.slot!r} and save {manifest.save_id}", path=str(path)
        )
    return manifest


def read_manifests(
    directories: Iterable[Path],
) -> tuple[list[tuple[Path, Manifest]], list[CorruptCheckpointError]]:
    """Every readable manifest with its directory, newest first, and the errors of those that are not."""
    found: list[tuple[Path, Manifest]] = []
    damaged: list[CorruptCheckpointError] = []
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError as error:
            damaged.append(CorruptCheckpointError(f"slot directory {directory}: {error}", path=str(directory)))
            continue
        for name in names:
            if layout.save_of_manifest(name) is None:
                continue
            try:
                found.append((directory, read_manifest(directory / name)))
            except FileNotFoundError:  # superseded between the listing and the read
                continue
            except OSError as error:
                damaged.append(CorruptCheckpointError(f"manifest {directory / name}: {error}", path=str(directory)))
            except CorruptCheckpointError as error:
                damaged.append(error)
    return sorted(found, key=lambda pair: pair[1].save_id, reverse=True), damaged


@final
class SlotReader:
    """Reads boxes of one committed manifest, in this process or another; never an alias of the slot's memory.

    Manifest, bytes, manifest again: `gone()` says whether the slot has been reused since, in which case what did
    not match its digest was superseded, not corrupt.
    """

    def __init__(self, directory: Path, manifest: Manifest):
        self._manifest = manifest
        self._manifest_path = directory / _manifest_name(manifest.save_id)
        self._path = directory / manifest.slot
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # no link, no pipe
        try:
            self._memory = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)

    def read(self, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        """Copies the part of `wanted` that `record.box` holds into `into`; raises `CorruptCheckpointError`."""

        def fetch(cell: Box, start: int, stop: int) -> np.ndarray:
            del cell
            if record.offset + stop > self._memory.nbytes:
                raise CorruptCheckpointError(
                    f"{self._path} has {self._memory.nbytes} bytes, leaf {leaf.name} ends at {record.offset + stop}",
                    path=str(self._path),
                )
            return self._memory[record.offset + start : record.offset + stop]

        copy_proven(leaf, record, wanted, into, fetch, where=str(self._path))

    def gone(self) -> bool:
        """Whether the manifest is no longer there: the slot may hold a newer save by now."""
        return not self._manifest_path.exists()
