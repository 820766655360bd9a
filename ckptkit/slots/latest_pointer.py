"""`newest.json`, next to the manifests of a slot directory: the save that was committed last, so that its loss is
noticed.

It proves nothing and restores nothing. If a manifest is removed by anything but the arena, this file still names it, so
the loss is noticed. Without this file the directory would seem to hold only an older save.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import final

from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import SaveId
from ckptkit.store import LocalStore

_BYTES_MAX = 4096


class LostManifestError(CorruptCheckpointError):
    """The save that a slot directory committed last has lost its manifest, so the place of its bytes is unknown."""

    def __init__(self, directory: Path, save_id: SaveId):
        self.save_id = save_id
        path = _manifest_path(directory, save_id)
        super().__init__(
            f"manifest {path} is missing: {paths.NEWEST_NAME} records that save {save_id} was committed here last",
            step=save_id.step,
            path=str(path),
        )


@final
class Newest:
    """The record of one directory, written by the process that holds its lock. Cost: 60 microseconds per save.

    Written after a manifest is in place and unsynced: what a power failure takes back names an older save, which is not
    an alarm. Written before a manifest is deleted, and synced where the deletion is.
    """

    def __init__(self, directory: Path, *, synced: bool):
        self._directory = directory
        self._synced = synced
        self._save_id = read_newest(directory)

    def committed(self, save_id: SaveId) -> None:
        """The manifest of `save_id` is in place."""
        self._write(save_id, durable=False)

    def forgetting(self, save_id: SaveId, others: Iterable[SaveId | None]) -> None:
        """The manifest of `save_id` is about to be deleted; those of `others` stay."""
        if save_id == self._save_id:
            left = (other for other in others if other is not None and other != save_id)
            self._write(max(left, default=None), durable=self._synced)

    def _write(self, save_id: SaveId | None, *, durable: bool) -> None:
        store = LocalStore(self._directory, durable=durable)
        with suppress(CheckpointError, OSError):  # no room, for example: a save does not fail for it
            if save_id is None:
                store.delete(paths.NEWEST_NAME)
            else:
                newest = save_id.to_list()
                digest = digest_of(json.dumps(newest).encode())
                store.put(paths.NEWEST_NAME, json.dumps({"digest": digest, "newest": newest}).encode())
        self._save_id = save_id


def read_newest(directory: Path) -> SaveId | None:
    """The save that the record names; None where there is none that is whole."""
    path = directory / paths.NEWEST_NAME
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > _BYTES_MAX:
            return None
        record = json.loads(path.read_bytes())
        if record["digest"] == digest_of(json.dumps(record["newest"]).encode()):
            save_id = SaveId.from_list(record["newest"])
            _manifest_path(directory, save_id)  # numbers that a name can have
            return save_id
    return None


def lost_newest(directory: Path, found: Iterable[SaveId]) -> LostManifestError | None:
    """Finds whether the newest save of a directory has lost its manifest, given the saves that have one.

    Called after the directory was listed: a save that was committed since has its manifest, and one that was taken
    back since is no longer the newest.
    """
    newest = read_newest(directory)
    if newest is None or newest <= max(found, default=SaveId(-1, -1, -1)):
        return None
    if os.path.lexists(_manifest_path(directory, newest)) or read_newest(directory) != newest:
        return None
    return LostManifestError(directory, newest)


def forget_newest(directory: Path, save_id: SaveId) -> bool:
    """A save that somebody has dealt with is not missed any more; whether it was. The arena's lock is held. `save_id`
    needs no run: it is that of a manifest's name."""
    newest = read_newest(directory)
    if newest is None or _manifest_path(directory, newest) != _manifest_path(directory, save_id):
        return False
    LocalStore(directory).delete(paths.NEWEST_NAME)
    return True


def _manifest_path(directory: Path, save_id: SaveId) -> Path:
    return directory / paths.manifest_name(save_id.step, save_id.epoch, save_id.number)
