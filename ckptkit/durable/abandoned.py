"""Leftovers of dead runs in a durable root: recognised, named, and removed once no process can commit them.

A durable root has no lock, so no process knows whether a writer is alive. But it can know whether the writer can still
commit. An attempt of ckptkit records its epoch (`commit`). Once a later epoch has begun, removing the attempt's name or
intent fences its writer off in one operation: its later bytes belong to no step. A leftover without an epoch is
Orbax's, which has no fence: it is named and stays. In a bucket, the next save of its number replaces it; Orbax's
`cleanup_tmp_directories` removes it on the caller's request.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from ckptkit.durable.commit import intents, remove_uncommitted
from ckptkit.durable.lifecycle.delete import move_away
from ckptkit.model import paths
from ckptkit.store import Store, put_new


def left_behind(store: Store, committed: Collection[int]) -> list[str]:
    """The names of directories in a root that are steps without a commit, or deletions that were cut off.

    On a disk such a step has a temporary name, in a bucket it has no mark. On a mount that does not rename in one step
    it is either of them. `committed`: the steps that have a commit.

    Cost: two listings, in a bucket one. Raises `StoreError`.
    """
    names, left = store.list(""), list[str]()
    if store.properties.file_system:
        left += [name.rstrip("/") for name in names if paths.TEMPORARY in name]
        left += [f"{paths.LEAVING_DIR}/{name.rstrip('/')}" for name in store.list(paths.LEAVING_DIR)]
    if store.properties.atomic_rename:
        return left
    steps = ((name[:-1], paths.step_of_name(name[:-1], temporary=False)) for name in names if name.endswith("/"))
    return [*left, *(name for name, step in steps if step is not None and step not in committed)]


def clean_left(store: Store, epoch: int, remove_directory: Callable[[str], None]) -> list[str]:
    """Removes what attempts before `epoch` have left, and what deletions have; gives the names of what went.

    For process 0 of the run that has recorded `epoch`, while it writes and deletes nothing itself. The commit is taken
    away first, so a writer that still lives fails, and a crash in between leaves less of the same. Cost: two listings,
    in a bucket one and six requests for each that is found. Raises `StoreError`, `OSError`.
    """
    cleaned = _clean_disk(store, epoch, remove_directory) if store.properties.file_system else []
    return cleaned if store.properties.atomic_rename else [*cleaned, *_clean_bucket(store, epoch)]


def clean_unmarked(store: Store, name_format: Any) -> list[str]:
    """Deletes the steps of a bucket or a mount that have no mark, of any writer: `cleanup_tmp_directories`, on the
    caller's word. Only directories that have the name of a step, and whose objects are those of a save.

    Gives their names. Cost: a listing, and two requests for each directory with the name of a step. Raises
    `StoreError`.
    """
    cleaned = []
    for name in (name[:-1] for name in store.list("") if name.endswith("/")):
        if store.properties.file_system and paths.TEMPORARY in name:  # what stock Orbax has not renamed yet
            shutil.rmtree(f"{store.url}/{name}")
            cleaned.append(name)
            continue
        step = paths.step_of_name(name, temporary=False)
        if step is None or name_format.build_name(step) != name:
            continue
        objects = store.stat_all(name)
        if objects and remove_uncommitted(store, name, objects):
            cleaned.append(name)
    return cleaned


def _clean_disk(store: Store, epoch: int, remove_directory: Callable[[str], None]) -> list[str]:
    cleaned = []
    for name in (name.rstrip("/") for name in store.list("")):
        of = paths.epoch_of_temporary(name)
        if of is not None and of < epoch:
            move_away(f"{store.url}/{name}")
            cleaned.append(name)
    empty_leaving(store, store.list(paths.LEAVING_DIR), remove_directory)
    return cleaned


def empty_leaving(store: Store, names: Iterable[str], remove_directory: Callable[[str], None]) -> None:
    """Removes the rests of deletions on a disk, which were moved aside under these names. Raises `OSError`."""
    for name in names:
        place = f"{store.url}/{paths.LEAVING_DIR}/{name.rstrip('/')}"
        with suppress(FileNotFoundError):  # another process removes it too: what it leaves is found the next time
            if os.path.islink(place) or not os.path.isdir(place):
                os.unlink(place)
            else:
                remove_directory(place)


def _clean_bucket(store: Store, epoch: int) -> list[str]:
    found: dict[str, list[tuple[int, str]]] = {}
    for of, name in intents(store):
        _, step_name = paths.intent_of_name(name) or (0, "")
        found.setdefault(step_name, []).append((of, name))
    cleaned = []
    for step_name, left in found.items():
        if any(of >= epoch for of, _ in left):  # somebody writes it now
            continue
        # One of our own first: after a crash in mid-deletion, the remaining objects must still show the owner.
        own = f"{paths.INTENTS_DIR}/{paths.intent_name(step_name, epoch, uuid.uuid4().hex)}"
        put_new(store, own, b"")  # no other process has its name
        store.delete_many([f"{paths.INTENTS_DIR}/{name}" for _, name in left])
        objects = store.stat_all(step_name)
        if not _is_later(store, step_name, epoch) and remove_uncommitted(store, step_name, objects):
            cleaned.append(step_name)
        store.delete(own)
    return cleaned


def _is_later(store: Store, step_name: str, epoch: int) -> bool:
    """Whether a run of a later epoch has begun to write the step meanwhile."""
    return any(of > epoch and (paths.intent_of_name(name) or ("", ""))[1] == step_name for of, name in intents(store))
