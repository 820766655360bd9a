"""Certificates: which saves of a root a replay came to. Empty files; the name of each names one save.

A save that replaces a certified one under the same step has another name, and is not certified by it.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptkit.durable.lifecycle.root_record import shield_records
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import Store


def certified_saves(store: Store) -> frozenset[SaveId]:
    """The certified saves of a durable root. Cost: a listing. Raises `StoreError`."""
    found = (paths.save_of_certificate(name) for name in store.list(paths.CERTIFIED_DIR))
    return frozenset(SaveId(*named) for named in filter(None, found))


def certify_saves(store: Store, saves: Collection[SaveId], *, held: Collection[SaveId]) -> None:
    """Records that a replay came to `saves`; removes certificates of saves that are older than every save in `held`.

    Cost: a put for each, a listing. Raises `StoreError`.
    """
    shield_records(store)
    for save in saves:
        store.put(_key(save), b"")
    known = (*held, *saves)
    for save in certified_saves(store) if known else ():
        if save < min(known):
            store.delete(_key(save))


def _key(save: SaveId) -> str:
    return f"{paths.CERTIFIED_DIR}/{paths.certificate_name(save.epoch, save.step, save.number, save.run)}"
