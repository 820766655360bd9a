"""Deletions by a command: announced while it works, and finished for commands that were killed."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable
from typing import final

from ckptkit.durable.abandoned import empty_leaving
from ckptkit.durable.commit import intents, remove_uncommitted
from ckptkit.durable.lifecycle.leases import Beating, announced_deletions, drop_dead
from ckptkit.errors import store_error
from ckptkit.model import paths
from ckptkit.store import Store
from ckptkit.util import clock


@final
class DeletionNotice(Beating):
    """Steps that a command is about to delete, announced until `release`; context manager. Once it is `lost`, a reader
    may not see it any more: nothing more may be deleted.

    The steps that somebody reads, or has pinned, are looked for after it is written: `PruneGuard.leased`. Raises
    `StoreError` where it cannot be written.
    """

    def __init__(self, store: Store, steps: Iterable[int], *, monotonic_s: Callable[[], float] = clock.monotonic_s):
        key = f"{paths.LEASES_DIR}/doomed-{uuid.uuid4().hex}.json"
        super().__init__(store, key, {"steps": sorted(steps)}, monotonic_s)


def finish_deletions(store: Store) -> None:
    """Removes the leases and notices of processes that have died, and the rest of each step that they were deleting.
    Removes nothing that any process writes, reads or deletes now.

    Cost: that of `drop_dead`, and two listings; for each rest that of `announced_deletions`, and in a bucket three
    requests. Raises `StoreError`.
    """
    drop_dead(store)
    if store.properties.file_system:
        left = {name: paths.step_of_name(name.rpartition("-")[0]) for name in store.list(paths.LEAVING_DIR)}
        live = announced_deletions(store, {step for step in left.values() if step is not None}) if left else ()
        try:
            empty_leaving(store, [name for name, step in left.items() if step not in live], shutil.rmtree)
        except OSError as error:
            raise store_error(error, error.filename or store.url) from error
    if not store.properties.atomic_rename:
        for _, name in intents(store):
            _, step_name = paths.intent_of_name(name) or (0, "")
            step = paths.step_of_name(step_name)
            if name == paths.going_name(step_name) and step is not None and not announced_deletions(store, [step]):
                _finish_in_bucket(store, step_name)


def _finish_in_bucket(store: Store, step_name: str) -> None:
    going = paths.going_name(step_name)
    objects = store.stat_all(step_name)
    writers = [name for _, name in intents(store) if (paths.intent_of_name(name) or (0, ""))[1] == step_name]
    if writers == [going]:  # whoever saves the number anew removes what is in the way
        remove_uncommitted(store, step_name, objects)
        store.delete(f"{paths.INTENTS_DIR}/{going}")
