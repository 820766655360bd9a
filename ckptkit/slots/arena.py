"""Slots: preallocated, memory-mapped files that are reused from save to save. One arena is one process's.

Order is sacred. Writing: unlink the slot's manifest, sync the directory (disk), overwrite the bytes, sync them,
rename the new manifest into place, sync the directory. A manifest therefore never names bytes that are not its own.
Last, `newest.json` names the save: so that a manifest which is lost later is missed.

A slot is the file that its directory names. One that was unlinked, replaced or hidden by a mount takes no commit, and
`acquire` makes it anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import final

import numpy as np

from ckptkit.errors import CheckpointError, NewerFormatError, StoreFullError
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, SaveId, refuse_unreadable
from ckptkit.slots.directory import (
    give_up,
    remove_directory,
    remove_slots,
    remove_unfinished,
    retake,
    take_directory,
    take_left,
)
from ckptkit.slots.files import UNKNOWN, Slot, SlotFiles, file_bytes, reusable
from ckptkit.slots.host_memory import HostMemory, SlotRoom
from ckptkit.slots.latest_pointer import Newest
from ckptkit.slots.reader import manifest_name_of, read_manifests, readable_slot_directories
from ckptkit.store import LocalStore
from ckptkit.util.clock import Deadline
from ckptkit.util.disk_file import Method
from ckptkit.util.words import count_text, size_text

ALL = "committed by all"
_CROWD_WAIT_S = 5.0  # of a first save, for another process of the host that removes what a job of another size left
_CROWD_LOOK_S = 0.02
_TOUCH_S = 1.0  # of a save whose last free slot is being made: `reserve` leaves it between two pieces


@final
class Arena:
    """The slots of one process on one tier, or anonymous ones (`directory=None`) that are only a staging area.

    A slot is handed out for writing only without a lease on it, and without a protected save in it: the newest one
    committed by all processes, and other kept saves. Safe from several threads.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        slots: int,
        synced: bool,
        lock_fd: int | None = None,
        memory: HostMemory | None = None,
        keeps_found: bool = False,
        processes: int | None = None,
    ):
        self.directory = directory
        self._processes = processes  # of the job
        self._room = SlotRoom(directory, memory, is_disk=synced)
        self.synced = synced
        self._lock_fd = lock_fd
        self._changed = threading.Condition()
        self._slots = [Slot(paths.slot_name(i), np.empty(0, np.uint8)) for i in range(slots)]
        self._touched: Slot | None = None  # leased by `reserve`
        self._files = SlotFiles(directory, synced=synced)
        self.on_lost: Callable[[CheckpointError], None] = lambda error: None  # told what `acquire` made anew
        self._protected: dict[str, frozenset[SaveId]] = {}  # by the reason
        self._adopted: list[Arena] = []  # without slots of their own: nothing is saved there
        self._outgrown: set[str] = set()  # slots that a job of another size made, until they are made anew
        # Until the first save that all commit, the state of such a job takes room on this host: each process makes one
        # slot, so that every one of them can commit.
        self.crowded = False
        self._has_committed = False
        self._store = LocalStore(directory, durable=synced) if directory is not None else None
        self._retired: list[Slot] = []  # beyond today's count: they stay while what they hold is protected
        self._newest = Newest(directory, synced=synced) if directory is not None else None
        if directory is not None:
            self._take_over(directory, keeps_found)
        if memory is not None:
            memory.add_taker(lambda: sum(self._files.allocated_bytes(slot) for slot in self._slots))

    @classmethod
    def open(
        cls,
        host_dir: Path,
        local_rank: int | str,
        *,
        slots: int,
        synced: bool,
        memory: HostMemory | None = None,
        keeps_found: bool = False,
        processes: int | None = None,
    ) -> Arena:
        """The arena of this process below its host's directory, mode 0700, held by `flock` until `close`.

        A directory that another process still holds (one of the previous run that has not died yet) is left to
        it, and the next free name is taken. Until the first `protect` the newest save that is found is protected, or
        every one (`keeps_found`). Slots that a job of another size than `processes` made are removed as soon as the
        saves in them are not protected. Raises `TierUnusableError` where the directory cannot be used.
        """
        directory, fd = take_directory(host_dir, str(local_rank), synced=synced)
        try:
            return cls(
                directory,
                slots=slots,
                synced=synced,
                lock_fd=fd,
                memory=memory,
                keeps_found=keeps_found,
                processes=processes,
            )
        except BaseException:
            give_up(fd)
            raise

    def adopt(self) -> None:
        """Takes the directories of this host that no process holds, with what ended processes of a larger job left.

        To be called by one process of a host, when all have opened their arenas. A restore finds the saves there. Those
        that this arena does not protect are removed by the next `protect`, or for the first save, which leaves at least
        one in each directory. A directory is removed once it holds none. If this process dies, the next one finds the
        rest.
        """
        if self.directory is None:
            return
        with self._changed:
            for directory, fd in take_left(self.directory.parent):
                try:
                    self._adopted.append(Arena(directory, slots=0, synced=self.synced, lock_fd=fd, keeps_found=True))
                except NewerFormatError:  # it stays as it is; a restore raises, on all processes
                    give_up(fd)
            self._remove_adopted()

    def reserve(self, size_bytes: int, turn: Callable[[bool], bool] = lambda within: True) -> None:
        """Makes every free slot at least `size_bytes` large and faults its pages in; for a background thread.

        Costs a first touch of that memory, 0.3 to 5 GB/s, which a save would otherwise pay. A slot is leased while
        it is made; one that holds a save keeps it and is only mapped. Raises `StoreFullError` with the bytes needed
        and free; slots that were made before it stay. On a disk, new slots are written once with zeros, and the first
        one that is empty shows which method is faster. `turn` is called between pieces of the work, and may wait; it
        is told whether it is within a slot, which is left as it is where it returns False: a save may wait for it.
        """
        for made, slot in enumerate(self._slots):
            if self.crowded and made:
                return  # to be called again
            turn(False)
            with self._changed:
                would_lose = slot.save_id is not None and self._files.allocated_bytes(slot) < size_bytes
                if slot.leases or slot not in self._slots or would_lose:
                    continue
                slot.leases, self._touched = 1, slot
            try:
                self._grow(slot, size_bytes)
                self._files.fault_in(slot, partial(turn, True))
            finally:
                with self._changed:
                    self._touched = None
                    self.release(slot)

    def missing_bytes(self, size_bytes: int) -> int:
        """The bytes still to allocate until every slot has `size_bytes`."""
        slot_bytes = file_bytes(size_bytes)
        return sum(max(0, slot_bytes - self._files.allocated_bytes(slot)) for slot in self._slots)

    def check_room(self, size_bytes: int, *, others: Sequence[Arena] = (), transfer_bytes: int = 0) -> None:
        """Raises `StoreFullError` where the slots cannot all have `size_bytes`, with the bytes needed and free.

        Asks the mount, and for host memory also the control groups and the setting (`HostMemory`). `others` are arenas
        on the same mount that need slots of this size too, `transfer_bytes` what transfers from devices take of host
        memory during a save. Slots may be made meanwhile.
        """
        slot_bytes = file_bytes(size_bytes)
        room, host_room = self._room.narrowest(), self._room.narrowest(on_mount=False)
        beside_bytes = sum(each.missing_bytes(size_bytes) for each in others)
        missing_bytes = max(0, self.missing_bytes(size_bytes) + beside_bytes - self._left_bytes(slot_bytes))
        slots = f"{count_text(len(self._slots), 'slot')} of {size_text(slot_bytes)}"
        needs = f"{self._room.name} needs {size_text(missing_bytes)} more for {slots}"
        if beside_bytes:
            needs += f", {size_text(beside_bytes)} of it for copies of other hosts"
        self._room.refuse_beyond(room, missing_bytes, needs)
        if transfer_bytes:
            needs += f", and {size_text(transfer_bytes)} for transfers from devices"
            self._room.refuse_beyond(host_room, missing_bytes + transfer_bytes, needs)

    def acquire(self, size_bytes: int, *, timeout_s: float = 0.0) -> Slot | None:
        """A leased slot of at least `size_bytes` to write, its old manifest gone; None when all are in use.

        Waits up to `timeout_s` for a lease to end, and for one of `reserve` a second at least. Prefers empty slots,
        then the one with the oldest save; a slot without room is skipped, and raises `StoreFullError` only if no other
        is available.
        """
        deadline = Deadline(timeout_s)
        full: dict[str, StoreFullError] = {}
        crowd = Deadline(_CROWD_WAIT_S)
        self._make_room()

        def settled() -> bool:
            others = [slot for slot in self._slots if slot.name not in full]
            is_over = deadline.passed and not least_s()
            return self._reusable(full) is not None or is_over or not any(slot.leases for slot in others)

        def least_s() -> float:
            is_free_soon = self._touched is not None and self._touched.save_id not in self.protected
            return _TOUCH_S if is_free_soon else 0.0

        while True:
            with self._changed:
                self._changed.wait_for(settled, max(least_s(), deadline.left_s))
                slot = self._reusable(full)
                if slot is None and full:
                    raise next(iter(full.values()))
                if slot is None:
                    return None
                slot.leases = 1
            try:
                self._renew(slot)
                self._grow(slot, size_bytes)  # before its save is forgotten: what cannot grow keeps what it has
                self._forget(slot)
            except StoreFullError as error:
                self.release(slot)
                if self.crowded and not crowd.passed:
                    time.sleep(_CROWD_LOOK_S)
                else:
                    full[slot.name] = error
            except BaseException:
                self.release(slot)
                raise
            else:
                return slot

    def write(self, slot: Slot, source: np.ndarray, start: int) -> None:
        """Overwrites a leased slot on a disk from byte `start` (of a page) with flat, page-aligned bytes.

        By `method`, and without the GIL, so that several threads may write at the same time; `commit` syncs it.
        """
        self._files.write(slot, source, start)

    @property
    def method(self) -> Method:
        """How slots on a disk are written, where the file system allows it."""
        return self._files.method

    def commit(self, slot: Slot, save_id: SaveId, manifest: bytes) -> None:
        """Makes `manifest`, of `save_id` and of this slot's name, the truth about `slot`.

        Data is synced first (disk), then the manifest, then its name. Raises `TierUnusableError` if the slot's file is
        no longer in its directory.
        """
        if self._store is not None:
            refuse_unreadable(len(manifest))
            if (lost := self._files.lost([slot])) is not None:
                raise lost  # the manifest would name other bytes; `acquire` makes the slot anew
            self._files.sync(slot)
            try:
                self._store.put(manifest_name_of(save_id), manifest, mode="create")
            except FileExistsError:
                raise  # another save's: never taken back
            except BaseException:
                slot.save_id = save_id  # its name may be there: it goes now, or before the slot is written again
                with suppress(CheckpointError, OSError):
                    self.discard(slot)
                raise
        with self._changed:
            slot.save_id, self._has_committed = save_id, True
            if self._newest is not None:
                self._newest.committed(save_id)

    def discard(self, slot: Slot) -> None:
        """Forgets what `slot` holds: its manifest goes."""
        with self._changed:
            self._forget(slot)

    def forget_step(self, step: int) -> None:
        """Forgets every save of `step`: their manifests go, their slots are free."""
        self.forget({save_id for save_id in self.held() if save_id.step == step})

    def forget(self, save_ids: Collection[SaveId]) -> None:
        """Forgets these saves: their manifests go; a slot is free once nobody reads it any more."""
        with self._changed:
            for slot in [*self._slots, *self._retired]:
                if slot.save_id in save_ids:
                    self._forget(slot)
            for each in self._adopted:
                each.forget(save_ids)
            self._remove_adopted()
            self._changed.notify_all()

    @property
    def protected(self) -> frozenset[SaveId]:
        """The saves that are kept, for whatever reason."""
        return frozenset().union(*self._protected.values())

    def protect(self, *save_ids: SaveId, why: str = ALL) -> None:
        """Sets the saves that are kept until the next such call for the same reason `why`.

        With `ALL` they are the newest one that all processes have committed here, and those that a policy keeps. With
        another reason they are those that others need. All other saves stay until their slots are needed.
        """
        with self._changed:
            self._protected[why] = frozenset(save_ids)
            self.crowded = self.crowded and not (why == ALL and self._has_committed)
            self._drop_retired()
            if why == ALL:
                self._prune_adopted()
            self._changed.notify_all()

    def resize(self, slots: int) -> bool:
        """Uses so many slots from now on; returns whether that is news. New ones are made by `reserve` or `acquire`,
        those beyond go with the first `protect` that does not name what they hold."""
        with self._changed:
            if slots == len(self._slots):
                return False
            every = {slot.name: slot for slot in [*self._slots, *self._retired]}
            names = [paths.slot_name(i) for i in range(slots)]
            self._slots = [every.pop(name, None) or Slot(name, np.empty(0, np.uint8)) for name in names]
            self._retired = list(every.values())
            self._changed.notify_all()
            return True

    def lease(self, slot: Slot) -> None:
        """Keeps `slot` from being overwritten until `release`."""
        with self._changed:
            slot.leases += 1

    def forget_contents(self, save_id: SaveId) -> None:
        """The next save in the slot of a save writes every byte, because some of them are damaged."""
        with self._changed:
            for slot in self._slots:
                if slot.save_id == save_id:
                    slot.contents = UNKNOWN

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
        """Unmaps the slots and releases the lock; with `remove`, deletes the slots and manifests too."""
        with self._changed:
            for slot in [*self._slots, *self._retired]:
                self._files.unmap(slot)
            if remove and self.directory is not None:
                remove_slots(self.directory)
            for each in self._adopted:
                each.close(remove=remove)
            self._adopted = []
            if self._lock_fd is not None:
                give_up(self._lock_fd)
                self._lock_fd = None

    def _take_over(self, directory: Path, keeps_found: bool) -> None:
        """Finds what the process before left here: committed slots, slots beyond today's count, unfinished puts
        and items."""
        found = self.manifests()
        held = {manifest.slot: manifest.save_id for manifest in reversed(found)}
        self._protected[ALL] = frozenset(held.values() if keeps_found else sorted(held.values())[-1:])
        for slot in self._slots:
            slot.save_id = held.get(slot.name)
        mine = {slot.name for slot in self._slots}
        for name in sorted(os.listdir(directory)):
            if paths.slot_index(name) is not None and name not in mine:
                self._retired.append(Slot(name, np.empty(0, np.uint8), save_id=held.get(name)))
        remove_unfinished(directory)
        self._drop_retired()
        if self._processes is not None and any(each.writer.count != self._processes for each in found):
            self._outgrown = mine  # only now: a restore may ask for what is not protected
        others = [each for each in readable_slot_directories(directory.parent) if each != directory]
        self.crowded = bool(self._outgrown) or (not found and any(any(each.glob("slot-*")) for each in others))

    def _renew(self, own: Slot) -> None:
        """Takes the directory again, and forgets lost slots, but those leased by others than the caller, who has `own`.
        They are made anew when they are needed. Tells `on_lost`."""
        with self._changed:
            slots = [*self._slots, *self._retired]
            lost = self._files.lost(slots)
            if lost is None or self.directory is None:
                return
            self._retake(self.directory)
            there = {manifest.slot: manifest.save_id for manifest in self.manifests()}
            for slot in slots:
                if (slot is own or not slot.leases) and self._files.lost([slot]) is not None:
                    self._files.unmap(slot)
                    slot.contents = UNKNOWN
                    self._forget(slot)  # a manifest that outlived its bytes goes too
                elif there.get(slot.name) != slot.save_id:
                    slot.save_id = None
        self.on_lost(lost)

    def _retake(self, directory: Path) -> None:
        """Holds the lock of the directory that has the name now."""
        if self._lock_fd is None or self._files.lost([]) is None:
            return
        fd = retake(directory, synced=self.synced)
        give_up(self._lock_fd)
        self._lock_fd = fd
        self._files.take_lock()

    def _drop_retired(self) -> None:
        """Removes the slots beyond today's count, and the files of slots that a job of another size made, where nothing
        reads or protects what they hold."""
        outgrown = [slot for slot in self._slots if slot.name in self._outgrown]
        for slot in [*self._retired, *outgrown]:
            if slot.leases == 0 and slot.save_id not in self.protected:
                with suppress(CheckpointError, OSError):  # a disk that fails: the next `protect` tries again
                    self._forget(slot)
                    self._files.remove(slot)
                    if slot in self._retired:
                        self._retired.remove(slot)
                    self._outgrown.discard(slot.name)

    def _make_room(self) -> None:
        """Before the first save: removes what was found and is not protected, where a job of another size left it."""
        with self._changed:
            if self._outgrown:
                self._drop_retired()
            self._prune_adopted(or_newest=True)

    def _prune_adopted(self, *, or_newest: bool = False) -> None:
        """Removes the adopted saves that are not protected; `or_newest`: the newest one stays in a directory that has
        no protected one."""
        for each in self._adopted:
            if held := frozenset(each.held()):
                each.protect(*(held & self.protected or ({max(held)} if or_newest else ())))
        self._remove_adopted()

    def _remove_adopted(self) -> None:
        """Removes the adopted directories that hold nothing, and releases their locks. Damaged manifests stay until
        this run has committed: until then a restore has to report them."""
        for each in [each for each in self._adopted if not each.held()]:
            directory, fd = each.directory, each._lock_fd
            assert directory is not None
            assert fd is not None
            with suppress(CheckpointError, OSError):  # a disk that fails: the next call tries again
                if self._has_committed or not any(directory.glob("step-*.json")):
                    remove_directory(directory, fd)
                    self._adopted.remove(each)

    def _left_bytes(self, slot_bytes: int) -> int:
        """The bytes that jobs of another size have left on this host, of which the next commit frees the last."""
        if self.directory is None or not self.crowded:
            return 0
        allocated = [self._files.allocated_bytes(slot) for slot in [*self._slots, *self._retired]]
        own = sum(max(0, nbytes - slot_bytes) for nbytes in allocated)
        others = [each for each in readable_slot_directories(self.directory.parent) if each != self.directory]
        left = {place for place, found in read_manifests(others)[0] if found.writer.count != self._processes}
        return own + sum(path.stat().st_size for place in left for path in place.glob("slot-*"))

    def _reusable(self, passed_over: Collection[str] = ()) -> Slot | None:
        return reusable([slot for slot in self._slots if slot.name not in passed_over], self.protected)

    def _grow(self, slot: Slot, size_bytes: int) -> None:
        size_bytes = file_bytes(size_bytes)
        if slot.memory.nbytes >= size_bytes:
            return
        # Asked first: to find out by filling a ramdisk takes as long as filling it.
        room, missing_bytes = self._room.narrowest(), size_bytes - self._files.allocated_bytes(slot)
        needs = f"slot {self._room.name}/{slot.name} needs {size_text(size_bytes)}"
        self._room.refuse_beyond(room, missing_bytes, needs)
        self._files.make(slot, size_bytes)

    def _forget(self, slot: Slot) -> None:
        if slot.save_id is not None and self._store is not None and self._newest is not None:
            self._newest.forgetting(slot.save_id, [each.save_id for each in (*self._slots, *self._retired)])
            self._store.delete(manifest_name_of(slot.save_id))
        slot.save_id = None
