"""Every deletion of a step: what makes it a committed one goes before its bytes.

A run that dies meanwhile, or a storage that refuses, leaves what is no step for anybody.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from ckptkit.layout import COMMIT_MARK, TEMPORARY
from ckptkit.store import open_store
from ckptkit.store.local import sync_directory
from ckptkit.store.roots import is_remote


def remove_step(where: str, remove_directory: Callable[[str], None]) -> None:
    """Deletes the step at `where`: its mark, then the rest, in a bucket in batches, on a disk by `remove_directory`.

    A bucket is asked afresh what there is: what Orbax remembers of its listings may be out of date. What is gone
    already is no error. Raises what `_take_mark` and `remove_directory` raise.
    """
    place = _take_mark(where)
    if is_remote(place):
        store = open_store(place)
        store.delete_many(store.list_all(""))
    elif os.path.lexists(place):
        remove_directory(place)


def _take_mark(where: str) -> str:
    """Takes the mark of its commit from the step at `where`; returns where its bytes stand then.

    On a disk the mark is the name, in a bucket an object. A step that is not there, or has no mark, is no error. Raises
    `StoreError`, `OSError`. Cost: one rename and a sync, or one request.
    """
    if is_remote(where):
        open_store(where).delete(COMMIT_MARK)
        return where
    leaving = where + TEMPORARY  # as if it had never been finished: the next save replaces it
    if os.path.lexists(where):
        shutil.rmtree(leaving, ignore_errors=True)
        os.rename(where, leaving)
        sync_directory(os.path.dirname(where))
    return leaving
