"""Every deletion of a step: what makes it a committed one goes before its bytes.

If the run dies meanwhile, or the storage refuses, the leftovers are not a step for any reader.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ckptkit.errors import StoreError
from ckptkit.model.paths import COMMIT_MARK, INTENTS_DIR, LEAVING_DIR, STEP_METADATA, going_name
from ckptkit.store import Store, open_store
from ckptkit.store.backends import properties_of
from ckptkit.store.local import make_directory, remove_empty, sync_directory


def remove_step(where: str, remove_directory: Callable[[str], None], is_it: Callable[[], bool] = lambda: True) -> bool:
    """Deletes the step at `where`: its marker, then the rest, in a bucket in batches, on a disk by `remove_directory`.
    A directory that cannot be renamed in one step is emptied like a bucket. In a bucket, returns False and deletes
    nothing if the step is already gone, or if `is_it` returns False for the objects to delete.

    A bucket is listed anew: Orbax's cached listings may be out of date. Missing objects are not an error, and objects
    put after that listing stay (see `Store.delete_unchanged`). If this process dies, the next run removes the rest
    (`abandoned`). Raises `StoreError`, `OSError`, and the errors of `remove_directory`.
    """
    if properties_of(where).atomic_rename:
        with suppress(FileNotFoundError):
            remove_directory(move_away(where))
        return True
    root, _, name = where.rstrip("/").rpartition("/")
    removed = _remove_objects(open_store(root), name, is_it)
    if properties_of(where).file_system:
        remove_empty(where)
    return removed


def _remove_objects(store: Store, name: str, is_it: Callable[[], bool]) -> bool:
    found = store.stat_all(name)
    if not found or not is_it():
        return False
    going = f"{INTENTS_DIR}/{going_name(name)}"
    with suppress(StoreError):  # a bucket whose quota is reached takes nothing, and has to be emptied all the same
        store.put(going, b"")
    # By the metadata alone a directory of a mount may be a step of stock Orbax: it is removed next (`is_committed`).
    for key in (f"{name}/{COMMIT_MARK}", f"{name}/{STEP_METADATA}"):
        if (sign := found.pop(key, None)) is not None:
            store.delete_unchanged({key: sign})
    store.delete_unchanged(found)
    with suppress(StoreError):  # the next run deletes it
        store.delete(going)
    return True


def move_away(where: str) -> str:
    """Renames a directory right below a root on a disk, so that it is no longer a step; returns its new place.

    No process reads or writes there, so any that finds it may remove it. Raises `FileNotFoundError` where there is
    nothing, `OSError`, `StoreError`. Cost: a rename and a sync.
    """
    root, name = os.path.split(where)
    os.lstat(where)
    leaving = Path(root, LEAVING_DIR)
    if os.path.realpath(leaving) != os.path.join(os.path.realpath(root), LEAVING_DIR):
        raise StoreError(f"{leaving} is a link, or below one; remove it: nothing was moved there", path=str(leaving))
    make_directory(leaving, synced=False)  # what is lost of it with the power is garbage
    target = leaving / f"{name}-{uuid.uuid4().hex}"
    os.rename(where, target)
    sync_directory(root)
    return str(target)
