"""Slots: preallocated, memory-mapped files that are reused from save to save. One arena is one process's.

Order is sacred. Writing: unlink the slot's manifest, sync the directory (disk), overwrite the bytes, sync them,
rename the new manifest into place, sync the directory. A manifest therefore never names bytes that are not its own.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

import numpy as np

from ckptkit import layout
from ckptkit.clock import Deadline
from ckptkit.disk_file import DiskFile, Method
from ckptkit.errors import CheckpointError, StoreFullError, TierUnusableError
from ckptkit.host_memory import HostMemory, Room, mount_room, refuse_beyond, store_full
from ckptkit.manifest import Manifest, SaveId
from ckptkit.pages import map_file, populate
from ckptkit.slot_reader import manifest_name_of, read_manifests
from ckptkit.store import LocalStore
from ckptkit.store.local import sync_directory

_T = TypeVar("_T")
ALL = "committed by all"
_LESS_ON_MOUNT = "give fewer slots, or leave this tier out"


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

    def __init__(
        self,
        directory: Path | None,
        *,
        slots: int,
        synced: bool,
        lock_fd: int | None = None,
        memory: HostMemory | None = None,
    ):
        self.directory = directory
        self._memory = memory  # whose limits the slots keep; None for a disk
        self.synced = synced
        self._lock_fd = lock_fd
        self._changed = threading.Condition()
        self._slots = [Slot(layout.slot_name(i), np.empty(0, np.uint8)) for i in range(slots)]
        self._maps: dict[str, mmap.mmap] = {}  # of slots in memory
        self._files: dict[str, DiskFile] = {}  # of slots on a disk
        self.method: Method = "direct"  # how these are written, where the file system allows it
        self._probed = False
        self._protected: dict[str, SaveId] = {}  # by the reason
        self._store = LocalStore(directory, durable=synced) if directory is not None else None
        self._retired: list[Slot] = []  # of a run with more slots: kept until a newer save is protected
        if directory is not None:
            self._take_over(directory)
        if memory is not None:
            memory.add_taker(lambda: sum(map(self._allocated_bytes, self._slots)))

    @classmethod
    def open(
        cls, host_dir: Path, local_rank: int | str, *, slots: int, synced: bool, memory: HostMemory | None = None
    ) -> Arena:
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
            return cls(directory, slots=slots, synced=synced, lock_fd=fd, memory=memory)
        raise TierUnusableError(f"every slot directory below {host_dir} is held by another process", path=str(host_dir))

    def reserve(self, size_bytes: int) -> None:
        """Makes every free slot at least `size_bytes` large and faults its pages in; for a background thread.

        Costs a first touch of that memory, 0.3 to 5 GB/s, which a save would otherwise pay. A slot is leased while
        it is made; one that holds a save keeps it and is only mapped. Raises `StoreFullError` with the bytes needed
        and free; slots that were made before it stay. On a disk, new slots are written once with zeros, and the first
        one that is empty shows which method is faster.
        """
        for slot in self._slots:
            with self._changed:
                if slot.leases or not self._may_reserve(slot, size_bytes):
                    continue
                slot.leases = 1
            try:
                self._grow(slot, size_bytes)
                if self.synced:
                    self._warm_up(slot)
            finally:
                self.release(slot)

    def missing_bytes(self, size_bytes: int) -> int:
        """What is still to be allocated until every slot has `size_bytes`."""
        slot_bytes = _whole_pages(size_bytes)
        return sum(max(0, slot_bytes - self._allocated_bytes(slot)) for slot in self._slots)

    def check_room(self, size_bytes: int, *, beside_bytes: int = 0) -> None:
        """Raises `StoreFullError` where the slots cannot all have `size_bytes`, with the bytes needed and free.

        `beside_bytes` are those that other arenas on the same mount need too.

        Asks the mount, and for host memory also the control groups and the setting (`HostMemory`).
        """
        slot_bytes = _whole_pages(size_bytes)
        missing_bytes = self.missing_bytes(size_bytes) + beside_bytes
        copies = f" and {beside_bytes} of them for copies of other hosts" if beside_bytes else ""
        refuse_beyond(
            self._room(),
            missing_bytes,
            f"{self._name} needs {missing_bytes} more bytes for {len(self._slots)} slots of {slot_bytes}{copies}",
            self._less,
        )

    def acquire(self, size_bytes: int, *, timeout_s: float = 0.0) -> Slot | None:
        """A leased slot of at least `size_bytes` to write, its old manifest gone; None when all are in use.

        Waits up to `timeout_s` for a lease to end. Prefers empty slots, then the one with the oldest save; a slot
        for which there is no room is passed over, and raises `StoreFullError` only where no other can be had.
        """
        deadline = Deadline(timeout_s)
        full: dict[str, StoreFullError] = {}

        def settled() -> bool:
            others = [slot for slot in self._slots if slot.name not in full]
            return self._reusable(full) is not None or not any(slot.leases for slot in others)

        while True:
            with self._changed:
                self._changed.wait_for(settled, deadline.left_s)
                slot = self._reusable(full)
                if slot is None and full:
                    raise next(iter(full.values()))
                if slot is None:
                    return None
                slot.leases = 1
            try:
                self._grow(slot, size_bytes)  # before its save is forgotten: what cannot grow keeps what it has
                self._forget(slot)
            except StoreFullError as error:
                full[slot.name] = error
                self.release(slot)
            except BaseException:
                self.release(slot)
                raise
            else:
                return slot

    def write(self, slot: Slot, source: np.ndarray, start: int) -> None:
        """Overwrites a leased slot on a disk from byte `start` (of a page) with flat, page-aligned bytes.

        By `method`, and without the GIL, so that several threads may write at the same time; `commit` syncs it.
        """
        self._files[slot.name].write(source, start, self.method)

    def commit(self, slot: Slot, save_id: SaveId, manifest: bytes) -> None:
        """Makes `manifest`, of `save_id` and of this slot's name, the truth about `slot`.

        Data is synced first (disk), then the manifest, then its name.
        """
        if self._store is not None:
            if slot.name in self._files:
                self._files[slot.name].sync()
            try:
                self._store.put(manifest_name_of(save_id), manifest, mode="create")
            except FileExistsError:
                raise  # another save's: never taken back
            except BaseException:
                with suppress(CheckpointError, OSError):  # its name may be there: nothing may stay that names this slot
                    self._store.delete(manifest_name_of(save_id))
                raise
        with self._changed:
            slot.save_id = save_id

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

    def protect(self, save_id: SaveId, why: str = ALL) -> None:
        """Keeps `save_id` until the next such call with the same reason: it is the newest save that all processes have
        committed here (`ALL`), or that others rely on for what `why` names."""
        with self._changed:
            self._protected[why] = save_id
            self._drop_retired()
            self._changed.notify_all()

    def lease(self, slot: Slot) -> None:
        """Keeps `slot` from being overwritten until `release`."""
        with self._changed:
            slot.leases += 1

    def hold(self, save_id: SaveId) -> Slot | None:
        """The slot that holds a save, leased until `release`; None where none does any more."""
        with self._changed:
            for slot in [*self._slots, *self._retired]:
                if slot.save_id == save_id:
                    slot.leases += 1
                    return slot
        return None

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
            for file in self._files.values():
                file.close()
            self._files.clear()
            if remove and self.directory is not None:
                _remove_slots(self.directory)
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def _take_over(self, directory: Path) -> None:
        """Finds what the process before left here: committed slots, slots beyond today's count, unfinished puts."""
        held = {manifest.slot: manifest.save_id for manifest in reversed(self.manifests())}
        if held:
            self._protected[ALL] = max(held.values())
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
            if self.directory is not None and slot.save_id not in self._protected.values() and not slot.leases:
                self._forget(slot)
                (self.directory / slot.name).unlink(missing_ok=True)
                self._retired.remove(slot)

    def _may_reserve(self, slot: Slot, size_bytes: int) -> bool:
        return slot.save_id is None or self._allocated_bytes(slot) >= size_bytes

    def _reusable(self, passed_over: Collection[str] = ()) -> Slot | None:
        free = [
            slot
            for slot in self._slots
            if slot.leases == 0 and slot.save_id not in self._protected.values() and slot.name not in passed_over
        ]
        return min(free, key=lambda slot: slot.save_id or SaveId(-1, -1, -1), default=None)

    def _grow(self, slot: Slot, size_bytes: int) -> None:
        size_bytes = _whole_pages(size_bytes)
        if slot.memory.nbytes >= size_bytes:
            return
        missing_bytes = size_bytes - self._allocated_bytes(slot)
        # Asked first: to find out by filling a ramdisk takes as long as filling it.
        refuse_beyond(
            self._room(), missing_bytes, f"slot {self._name}/{slot.name} needs {size_bytes} bytes", self._less
        )
        slot.memory = np.empty(0, np.uint8)
        if self.synced and self.directory is not None:
            if slot.name in self._files:
                self._files.pop(slot.name).close()
            self._files[slot.name] = _allocated(DiskFile, self.directory / slot.name, size_bytes)
            slot.memory = self._files[slot.name].memory
            return
        if self.directory is None:
            mapping = mmap.mmap(-1, size_bytes)
        else:
            mapping = _allocated(map_file, self.directory / slot.name, size_bytes)
        self._maps[slot.name] = mapping
        slot.memory = np.frombuffer(mapping, np.uint8)
        populate(slot.memory)  # an old kernel cannot: pages are faulted in by the first copy then

    def _warm_up(self, slot: Slot) -> None:
        """Writes a new slot once, and finds the faster method with the first that holds nothing."""
        file = self._files[slot.name]
        if slot.save_id is not None:
            return
        if file.is_new:
            file.fill()
        if not self._probed:
            self.method, self._probed = file.faster_method(), True

    @property
    def _name(self) -> str:
        return str(self.directory or "the staging memory")

    @property
    def _less(self) -> str:
        if self.directory is None:
            return "lower in_flight_max, or shard the state over more processes"
        return _LESS_ON_MOUNT

    def _room(self) -> Room | None:
        """The narrowest of the limits."""
        rooms = self._memory.rooms(self._memory.taken_bytes) if self._memory is not None else []
        if self.directory is not None:
            rooms.append(mount_room(self.directory))
        return min(rooms, key=lambda room: room.free_bytes, default=None)

    def _allocated_bytes(self, slot: Slot) -> int:
        if self.directory is None:
            return slot.memory.nbytes
        try:
            return (self.directory / slot.name).stat().st_size
        except FileNotFoundError:
            return 0

    def _forget(self, slot: Slot) -> None:
        if slot.save_id is not None and self._store is not None:
            self._store.delete(manifest_name_of(slot.save_id))
        slot.save_id = None


def _allocated(make: Callable[[Path, int], _T], path: Path, size_bytes: int) -> _T:
    """What `make` gives; raises `StoreFullError` where the mount has no room for it."""
    try:
        return make(path, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise store_full(mount_room(path.parent), f"slot {path} needs {size_bytes} bytes", _LESS_ON_MOUNT) from error


def _whole_pages(size_bytes: int) -> int:
    return max(layout.PAGE_BYTES, -(-size_bytes // layout.PAGE_BYTES) * layout.PAGE_BYTES)


def _remove_slots(directory: Path) -> None:
    names = sorted(os.listdir(directory))
    for name in [n for n in names if layout.save_of_manifest(n)] + [
        n for n in names if layout.slot_index(n) is not None
    ]:
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)
