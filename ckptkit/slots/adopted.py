"""Slot directories of processes that ended: one process of their host holds them until no save in them is needed."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import final

from ckptkit.errors import CheckpointError, NewerFormatError
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.slots.directory import give_up, remove_directory, remove_slots, remove_unfinished, take_left
from ckptkit.slots.latest_pointer import Newest
from ckptkit.slots.reader import manifest_name_of, read_manifests
from ckptkit.store import LocalStore


@final
class AdoptedDirectories:
    """The slot directories that a larger job left on a host. A restore finds their saves; nothing is saved there.

    Every save stays until the first `keep`. A directory is removed once it holds none. Not safe from several threads:
    the arena that adopts calls under its lock. If this process dies, the next one finds the rest.
    """

    def __init__(self, *, synced: bool):
        self._synced = synced
        self._directories: list[_Directory] = []
        self.has_committed = False  # whether this run has: until then a restore has to report damaged manifests

    def take(self, host_dir: Path) -> None:
        """Takes those that no process holds."""
        for directory, fd in take_left(host_dir):
            try:
                self._directories.append(_Directory(directory, fd, synced=self._synced))
            except NewerFormatError:  # it stays as it is; a restore raises, on all processes
                give_up(fd)
        self._remove_empty()

    def keep(self, save_ids: Collection[SaveId], *, or_newest: bool = False) -> None:
        """Removes all saves but these; `or_newest`: the newest one stays in a directory that has none of them."""
        for each in self._directories:
            if held := each.held():
                each.keep(held.intersection(save_ids) or ({max(held)} if or_newest else ()))
        self._remove_empty()

    def forget(self, save_ids: Collection[SaveId]) -> None:
        """Removes the manifests of these saves."""
        for each in self._directories:
            each.forget(save_ids)
        self._remove_empty()

    def _remove_empty(self) -> None:
        """Removes the directories that hold nothing, and releases their locks."""
        for each in [each for each in self._directories if not each.held()]:
            with suppress(CheckpointError, OSError):  # a disk that fails: the next call tries again
                if self.has_committed or not any(each.path.glob("step-*.json")):
                    remove_directory(each.path, each.lock_fd)
                    self._directories.remove(each)

    def close(self, *, remove: bool) -> None:
        """Releases the locks; with `remove`, deletes the slots and manifests too."""
        for each in self._directories:
            if remove:
                remove_slots(each.path)
            give_up(each.lock_fd)
        self._directories = []


@final
class _Directory:
    """One directory, and which of its slots holds which save."""

    def __init__(self, path: Path, lock_fd: int, *, synced: bool):
        self.path = path
        self.lock_fd = lock_fd
        self._store = LocalStore(path, durable=synced)
        self._newest = Newest(path, synced=synced)
        found = {manifest.slot: manifest.save_id for _, manifest in reversed(read_manifests([path])[0])}
        remove_unfinished(path)
        self._slots = {name: found.get(name) for name in sorted(os.listdir(path)) if paths.slot_index(name) is not None}
        self.keep(found.values())  # removes the slots that hold nothing

    def held(self) -> frozenset[SaveId]:
        return frozenset(save_id for save_id in self._slots.values() if save_id is not None)

    def keep(self, save_ids: Collection[SaveId]) -> None:
        for name in [name for name, save_id in self._slots.items() if save_id not in save_ids]:
            with suppress(CheckpointError, OSError):  # a disk that fails: the next call tries again
                self._forget(name)
                (self.path / name).unlink(missing_ok=True)
                del self._slots[name]

    def forget(self, save_ids: Collection[SaveId]) -> None:
        for name in [name for name, save_id in self._slots.items() if save_id in save_ids]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """The manifest goes first: it never names bytes that are not its own."""
        if (save_id := self._slots[name]) is not None:
            self._newest.forgetting(save_id, self._slots.values())
            self._store.delete(manifest_name_of(save_id))
        self._slots[name] = None
