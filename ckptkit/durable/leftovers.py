"""What a run that died left in a durable root: recognised and named, never taken for a step, and never removed here.

Whoever wrote it may still live: a durable root has no lock, and the fence of the epochs stops a commit, not a write.
The next save of the same number takes its place; Orbax's `cleanup_tmp_directories` removes it, on the caller's word.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptkit import layout
from ckptkit.store import Store
from ckptkit.store.roots import is_remote

_STEP_NAME = re.compile(r"(?:[^/]*_)?(\d{1,18})/")


def left_behind(store: Store, committed: Collection[int]) -> list[str]:
    """The names of directories in a root that are steps without a commit: temporary by name on a disk, without the
    mark on a bucket. `committed`: the steps that have one. Cost: one listing. Raises `StoreError`.
    """
    names = store.list("")
    if not is_remote(store.url):
        return [name.rstrip("/") for name in names if layout.TEMPORARY in name]
    steps = ((name, _STEP_NAME.fullmatch(name)) for name in names)
    return [name.rstrip("/") for name, match in steps if match and int(match[1]) not in committed]
