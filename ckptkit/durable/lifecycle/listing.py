"""Which steps a durable root holds: a delimiter listing, and in a bucket the markers of those that are asked about.

There is no index object, which could go stale: what is listed is what is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckptkit.model.paths import COMMIT_MARK, step_of_name
from ckptkit.store import Store, open_store
from ckptkit.store.roots import root_url

_LOOKS = 16  # markers that are looked for at a time


def latest_step(root: str) -> int | None:
    """The newest committed step of a durable root, under any of Orbax's standard names; None where there is none.

    Cost in a bucket: a request per 1,000 names, then one for each look at a marker, newest first: three requests for
    a run with 1,000 steps. Raises `StoreError` where the root cannot be read.
    """
    store = open_store(root_url(root))
    named = sorted(((step, name) for name, step in _step_directories(store)), reverse=True)
    return next((step for step, name in named if _is_committed(store, name)), None)


StepListing = dict[int, list[str] | None]  # committed steps, each with the names right below it, if they were listed


def committed_steps(root: str, name_format: Any, known: Iterable[int] = ()) -> StepListing:
    """The committed steps whose names are those of `name_format`, ascending; those of `known` are not looked into.

    Cost in a bucket: a request per 1,000 names, and one for each step that is not known.
    """
    store, trusted = open_store(root), set(known)
    named = {step: name for name, step in _step_directories(store) if name_format.build_name(step) == name}
    if store.properties.atomic_rename:
        return dict.fromkeys(sorted(named))
    unknown = sorted(set(named) - trusted)
    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="ckptkit-list") as pool:
        looked = dict(zip(unknown, pool.map(lambda step: store.list(named[step]), unknown), strict=True))
    committed = {step: below for step, below in looked.items() if COMMIT_MARK in below}
    return {step: committed.get(step) for step in sorted({*committed, *(trusted & set(named))})}


def _step_directories(store: Store) -> list[tuple[str, int]]:
    names = [name[:-1] for name in store.list("") if name.endswith("/")]
    return [(name, step) for name in names if (step := step_of_name(name, temporary=False)) is not None]


def _is_committed(store: Store, name: str) -> bool:
    """On a disk the name says it: what is not committed has another one. In a bucket the marker does, and a listing
    of the step answers in one request also where it is missing."""
    return store.properties.atomic_rename or COMMIT_MARK in store.list(name)
