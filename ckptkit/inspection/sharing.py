"""The files that a durable step has in common with other steps of its root. On a disk they are names of one file; in a
bucket every object has bytes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ckptkit.inspection.sizes import local_files
from ckptkit.model.paths import step_of_name
from ckptkit.store.backends import properties_of

_STEPS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file of a step that has other names too.

    `steps` of the same root have it. `elsewhere` counts its names in quarantine, in a save that is being written, or
    outside of the root.
    """

    size_bytes: int
    steps: tuple[int, ...]
    elsewhere: int


def shared_files(url: str) -> dict[str, SharedFile]:
    """The files of a step, or of an item in one, that have other names too, by their path below it. Empty in a bucket.

    Cost: a walk through the step. If it shares files: a listing of its root, and for each of them a look into every
    other step, which has a shared file under the same path. Raises `StoreError` if `url` cannot be read.
    """
    if not properties_of(url).file_system:
        return {}
    own = url.removeprefix("file://").rstrip("/")
    linked = {os.path.relpath(path, own): at for path, at in local_files(own) if at.st_nlink > 1}
    steps = _other_steps(own) if linked else {}
    found = {}
    for path, at in linked.items():
        with_it = [step for step, place in steps.items() if _is_file(f"{place}/{path}", at)]
        elsewhere = at.st_nlink - 1 - len(with_it)
        found[path] = SharedFile(size_bytes=at.st_size, steps=tuple(sorted(with_it)), elsewhere=elsewhere)
    return found


def sharing_words(files: Mapping[str, SharedFile]) -> str:
    """The other names of these files: `steps 1, 2 and 2 names outside of steps`."""
    steps = sorted({step for file in files.values() for step in file.steps})
    elsewhere = max((file.elsewhere for file in files.values()), default=0)
    words = [steps_words(steps)] if steps else []
    if elsewhere:
        words.append(f"{elsewhere} {'names' if elsewhere > 1 else 'name'} outside of steps")
    return " and ".join(words)


def steps_words(steps: Iterable[int]) -> str:
    """`step 1`, `steps 1, 2`; of many the first ones."""
    known = list(steps)
    shown = ", ".join(map(str, known[:_STEPS_SHOWN])) + ", ..." * (len(known) > _STEPS_SHOWN)
    return f"{'steps' if len(known) > 1 else 'step'} {shown}"


def _other_steps(own: str) -> dict[int, str]:
    """The places in the other steps of the root that a step's directory, or an item's, has in its own."""
    (root, name), item = os.path.split(own), ""
    if step_of_name(name) is None:
        (root, name), item = os.path.split(root), f"/{name}"
    found = {}
    with suppress(OSError):  # without a permission for the root every other name is elsewhere
        for each in os.listdir(root):
            step = step_of_name(each, temporary=False)
            if step is not None and each != name:
                found[step] = f"{root}/{each}{item}"
    return found


def _is_file(path: str, at: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), at)
    return False
