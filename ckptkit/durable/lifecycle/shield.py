"""The mark that keeps stock Orbax from deleting `_ckptkit`, where pins, epochs and leases are.

Where a mark commits a step, Orbax takes every directory of a root without one for a save that was cut off, and
`cleanup_tmp_directories=True` deletes it.
"""

from __future__ import annotations

from ckptkit.model import paths
from ckptkit.store import Store

SHIELD_KEY = f"{paths.SIDECAR_DIR}/{paths.COMMIT_MARK}"
_TEXT = b"Not a step: the records of ckptkit. This file keeps cleanup_tmp_directories of Orbax from deleting them."


def shield_records(store: Store, *, marked: bool = False) -> None:
    """Puts the mark below a root's `_ckptkit` where it is absent: in a bucket, and on a disk whose steps are `marked`.

    Cost: a look, and one put in the life of a root. Raises `StoreError`.
    """
    if (marked or not store.properties.atomic_rename) and store.stat(SHIELD_KEY) is None:
        store.put(SHIELD_KEY, _TEXT)
