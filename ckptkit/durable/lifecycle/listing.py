"""Which steps a durable root holds: a delimiter listing, and in a bucket the markers of those that are asked about.

No index object exists, since it could go stale: the listing itself is the truth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from ckptkit.durable.lifecycle.classify import content_of, has_several_formats, is_committed, run_format
from ckptkit.errors import OutsideRootError
from ckptkit.model.paths import COMMIT_MARK, SIDECAR_DIR, step_of_name
from ckptkit.store import Store, open_store

_LOOKS = 16  # directories that are looked into at a time


def steps_by_name(store: Store) -> dict[str, int]:
    """The directories of a root whose names are those of its steps, under any of Orbax's standard names. Cost: a
    listing; where names have several formats, also a look into each directory."""
    names = _candidates(store)
    if has_several_formats(names):  # all are looked into: which have a step in them decides
        names = [name for name in names if _look(store, name) is not None]
    step_of = run_format(names, lambda name: _read(store, name, COMMIT_MARK)).step_of
    return {name: step for name in names if (step := step_of(name)) is not None}


def holds_step(store: Store, name: str) -> bool:
    """Whether a directory of a root is a committed step of a manager. Cost: a listing, and a look at the mark."""
    return _look(store, name) is not None


StepListing = dict[int, list[str] | None]  # committed steps, each with the names right below it, if they were listed


def committed_steps(root: str, name_format: Any, known: Iterable[int] = ()) -> StepListing:
    """The committed steps whose names are those of `name_format`, ascending; those of `known` are not looked into.

    Steps are recognised as in `ckptkit.inspection.roots.read_root`. A directory that only has the name of a step is not
    one, nor is a link, nor a tree that was saved without a manager. Cost: a listing, and one for each unknown step.
    """

    def step_of(name: str) -> int | None:
        step = step_of_name(name, temporary=False)
        return step if step is not None and name_format.build_name(step) == name else None

    store, trusted = open_store(root), set(known)
    named = {step: name for name in _candidates(store) if (step := step_of(name)) is not None}
    unknown = sorted(set(named) - trusted)
    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="ckptkit-list") as pool:
        looked = dict(zip(unknown, pool.map(lambda step: _look(store, named[step]), unknown), strict=True))
    committed = {step: below for step, below in looked.items() if below is not None}
    return {step: committed.get(step) for step in sorted({*committed, *(trusted & set(named))})}


def is_there(store: Store, name: str) -> bool:
    """Whether a directory of a root is a committed step. Cost: a listing, and what `is_committed` costs."""
    return _has_commit(store, name, store.list(name))


def _candidates(store: Store) -> list[str]:
    """The directories, not links, whose names any step could have."""
    names = [name[:-1] for name in store.list("") if name.endswith("/")]
    named = [name for name in names if step_of_name(name, temporary=False) is not None and name != SIDECAR_DIR]
    if store.properties.file_system:
        return [name for name in named if not os.path.islink(f"{store.url}/{name}")]
    return named


def _look(store: Store, name: str) -> list[str] | None:
    """The names in a directory that is a committed step of a manager; None for any other.

    On a disk the directory's name shows the commit, because what is not committed has another name. In a bucket, and on
    a mount that renames like one, the mark does (`is_committed`).
    """
    names = store.list(name)
    if not _has_commit(store, name, names):
        return None
    return names if content_of(names, _below(store, name)) == "step" else None


def _has_commit(store: Store, name: str, names: list[str]) -> bool:
    return is_committed(name, names, store.properties, partial(_read, store, name))


def _read(store: Store, name: str, file: str) -> bytes | None:
    with suppress(FileNotFoundError):
        return store.get(f"{name}/{file}")
    return None


def _below(store: Store, name: str) -> Callable[[str], list[str]]:
    def below(item: str) -> list[str]:
        try:
            return store.list(f"{name}/{item}")
        except OutsideRootError:  # an item that is a link
            return []

    return below
