"""The newest step of a durable root, for scripts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ckptkit.durable.lifecycle.epochs import EpochRecords
from ckptkit.durable.lifecycle.listing import holds_step, steps_by_name
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CorruptCheckpointError
from ckptkit.store import open_store
from ckptkit.store.roots import root_url

_LOOKS = 16  # steps that are looked at at a time


def latest_step(root: str) -> int | None:
    """The step of the newest save in a durable root, which a restart without fast tiers would take; None without one.

    The newest save is the one made last, and no rollback has abandoned it. Cost: the epoch record, a listing, and a
    small read for each step, 16 at a time. Steps without a mark of ours are looked into from the highest number on,
    until one is a step: stock Orbax saves in the order of the numbers. Raises `StoreError` where the root cannot be
    read, `CorruptCheckpointError` for damaged epoch records.
    """
    store = open_store(root_url(root))
    ancestry, named = EpochRecords(store).read(), steps_by_name(store)
    readers = {name: DurableReader(f"{store.url}/{name}", step=step) for name, step in named.items()}
    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="ckptkit-look") as pool:
        marked = dict(zip(named, pool.map(lambda reader: reader.marked(), readers.values()), strict=True))
    saves = [ancestry.identity(named[name], save) for name, save in marked.items() if save is not None]
    saves = [save for save in saves if not ancestry.superseded(save)]
    for name in sorted((name for name, save in marked.items() if save is None), key=named.__getitem__, reverse=True):
        with suppress(CorruptCheckpointError):
            if holds_step(store, name):
                save = ancestry.identity(named[name], readers[name].save_id())
                if not ancestry.superseded(save):
                    saves.append(save)
                    break
    return max(saves).step if saves else None
