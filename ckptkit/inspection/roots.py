"""Questions of commands about a root, and the errors for a path where there is none.

Which directories are steps is decided in `ckptkit.durable.lifecycle.listing`, for the manager too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress

from ckptkit.durable.lifecycle.classify import PROCESS_TREE
from ckptkit.durable.lifecycle.epochs import Ancestry, EpochRecords
from ckptkit.durable.lifecycle.leases import announced_deletions
from ckptkit.durable.lifecycle.listing import RootSteps, read_root
from ckptkit.durable.lifecycle.places import (
    Place,
    content_in,
    item_kind,
    local_kind,
    nothing_at,
    place_around,
    readable,
)
from ckptkit.durable.lifecycle.root_record import RootRecord, certified_saves, read_root_record
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StepNotFoundError
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import Store
from ckptkit.store.backends import properties_of
from ckptkit.store.roots import root_url
from ckptkit.util.words import first_of

_TIMEOUT_S = 20.0
_LOOKS = 16  # directories of a place without steps that are looked into
_NAMES_MAX = 20  # of steps in an error
_STEPS_SHOWN = 8  # next to a path that does not exist


def read_ancestry(place: Place) -> tuple[Ancestry, list[str]]:
    """The rollbacks that a root records; where the record is damaged, none and the reason."""
    try:
        with readable(f"{place.url}/{paths.EPOCHS_DIR}"):
            ancestry, problems = EpochRecords(place.store).check()
            return ancestry, [f"{problem}; the other copy was read" for problem in problems]
    except CorruptCheckpointError as error:
        return Ancestry(), [f"{error}; which steps a rollback abandoned is not known"]


def root_record_of(store: Store) -> RootRecord:
    """The record of a root, for a reader: where it is damaged or missing, with the id in the epoch records. Cost: a
    small read, and then what `EpochRecords.read` costs. Raises `CorruptCheckpointError` where no record has the id."""
    with suppress(CorruptCheckpointError):
        if (found := read_root_record(store)).id:
            return found
    records = EpochRecords(store)
    return records.root_record(records.read(), create=False)


def certified_in(place: Place) -> frozenset[SaveId]:
    """The saves of a root that a replay came to. Cost: a listing, where a run of ours has saved."""
    return certified_saves(place.store) if f"{paths.SIDECAR_DIR}/" in place.names() else frozenset()


def step_in(root: str, step: int, *, timeout_s: float = _TIMEOUT_S) -> str:
    """The directory of a step of a root: the committed one where several have its number. Cost: as `read_root`.

    Raises `StepNotFoundError` where it has none, with the steps that it has.
    """
    place = Place.open(root_url(root), timeout_s=timeout_s)
    in_root = read_root(place, read_ancestry(place)[0])
    require_root(place, in_root)
    steps = in_root.steps
    found = sorted((each for each in steps if each.step == step), key=lambda each: each.state != "committed")
    if not found:
        there = first_of(sorted({each.step for each in steps}, reverse=True), _NAMES_MAX) or "none"
        raise nothing_at(place.url, f"it has no step {step}; its steps are {there}")
    return found[0].place.url


def require_root(place: Place, found: RootSteps) -> None:
    """Raises `StepNotFoundError` if the directory does not exist, or has neither a step nor a record of a run. An empty
    directory is a root: its run has saved nothing yet. Cost: where it raises, a look into a few directories."""
    names = place.names()
    shown = found.steps or set(found.left_out) - {"nothing", "root"}  # a name alone shows nothing
    if shown or f"{paths.SIDECAR_DIR}/" in names:
        return
    if names:
        below = [name for name in place.directories()[:_LOOKS] if content_in(place.below(name)) == "root"]
        which = f"name one of the roots in it: {first_of(below, 5)}" if below else "name the directory with the steps"
        raise nothing_at(place.url, f"it has no step, and no record of a run; {which}")
    if not os.path.isdir(place.url):
        raise no_directory(place.url, "there is no such root; check the path")


def require_whole(place: Place) -> None:
    """Raises `StepNotFoundError` for what one process wrote of an item, which has the name of such a part: others have
    the rest."""
    if place.name.startswith(PROCESS_TREE) and (around := place_around(place)) is not None:
        raise nothing_at(place.url, f"it is the part of {around.at} that one process wrote; name {around.at}")


def no_directory(url: str, why: str) -> StepNotFoundError:
    """The error for a path that must be a directory. For a file, the error reports that instead of `why`."""
    is_file = properties_of(url).file_system and local_kind(url) == stat.S_IFREG
    if is_file:
        return nothing_at(url, "it is a file, and a directory with steps is expected")
    return nothing_there(url, why)


def nothing_there(url: str, why: str) -> StepNotFoundError:
    """The error for a path that does not exist. Where it has the name of a step, it names the steps that do exist.

    Cost then: a listing of the directory above.
    """
    above, _, name = url.rpartition("/")
    if paths.step_of_name(name) is not None:
        beside: list[str] = []
        with suppress(CheckpointError, OSError):
            beside = Place.open(above, timeout_s=_TIMEOUT_S).directories()
        steps = [each for each in beside if paths.step_of_name(each, temporary=False) is not None]
        if steps:
            steps.sort(key=lambda each: (paths.step_of_name(each) or 0, each), reverse=True)
            why = f"{why}. The steps in {above} are {first_of(steps, _STEPS_SHOWN)}"
    return nothing_at(url, why)


def are_deleted(root: str, steps: Collection[tuple[int, str]]) -> bool:
    """Whether one of these steps of a root, each with its directory, is not there any more, or a process deletes it
    now. Cost: a listing, and what `announced_deletions` costs. Raises `StoreError`."""
    place = Place.open(root_url(root), timeout_s=_TIMEOUT_S)
    there = set(place.directories())
    gone = any(path.rpartition("/")[2] not in there for _, path in steps)
    return gone or bool(announced_deletions(place.store, [step for step, _ in steps]))


def require_free_name(target: str, *, timeout_s: float = _TIMEOUT_S) -> None:
    """Raises `CheckpointError` for a new file or directory under the name of a step in the root of a run: the save of
    the step of this number would fail. Cost: nothing for other names; else a listing of the directory above, and what
    `read_root` costs there."""
    above, _, name = target.rpartition("/")
    if paths.step_of_name(name) is None:
        return
    place = Place.open(above, timeout_s=timeout_s)
    found = read_root(place, read_ancestry(place)[0])
    is_root = found.steps or f"{paths.SIDECAR_DIR}/" in place.names()
    is_free = found.steps and found.names.step_of(name) is None  # without steps, the format of names is not known
    if is_root and not is_free:
        raise CheckpointError(
            f"{target}: the job of the root {above} may save a step of this name; name a place outside", path=target
        )


def deleted_step(url: str, *, timeout_s: float = _TIMEOUT_S) -> str | None:
    """The step directory that a path is in, where its root has it no more or a process deletes it now; None where it is
    there, or the path is in no step.

    A reader that finds damage asks this before it reports it: a deletion is not damage. Cost: two listings, and what
    `announced_deletions` costs. Raises `StoreError`.
    """
    root, _, name = url.rstrip("/").rpartition("/")
    while root and not root.endswith(":/"):
        step = paths.step_of_name(name, temporary=False)
        place = Place.open(root, timeout_s=timeout_s)
        in_step = item_kind(place) is not None or paths.STEP_METADATA in place.names()
        if step is not None and not in_step and _may_be_root(place):
            is_there = name in place.names() or bool(place.below(name).names())  # a file may have such a name
            return None if is_there and step not in announced_deletions(place.store, [step]) else f"{root}/{name}"
        root, _, name = root.rpartition("/")
    return None


def _may_be_root(place: Place) -> bool:
    return any(each == paths.SIDECAR_DIR or paths.step_of_name(each) is not None for each in place.directories())
