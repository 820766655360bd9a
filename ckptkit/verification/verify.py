"""`verify`: reads every byte of a checkpoint and compares it with the digests of its save. Writes nothing, takes no
lock, needs no device."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptkit.durable.lifecycle.listing import read_root
from ckptkit.durable.lifecycle.places import Place, is_step, item_kind, local_kind, nothing_at
from ckptkit.durable.lifecycle.step_records import read_sidecars, sidecar_processes
from ckptkit.errors import StepNotFoundError, StoreError, with_damage
from ckptkit.inspection.roots import no_directory, nothing_there, read_ancestry, require_whole
from ckptkit.model import paths
from ckptkit.model.paths import COMMIT_MARK
from ckptkit.store.backends import properties_of
from ckptkit.store.roots import root_url
from ckptkit.verification.durable import judged_step, prove_step
from ckptkit.verification.pool import MEMORY_BYTES_MAX, THREADS, Limits
from ckptkit.verification.records import StepProof, Verification, VerifyProgress
from ckptkit.verification.slots import prove_slots, slot_directories_below


def verify(
    path: str,
    step: int | None = None,
    *,
    step_prefix: str | None = None,
    threads: int = THREADS,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    timeout_s: float = 20.0,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> Verification:
    """Proves every save at `path`, or those of `step`: each cell is read and compared with its digest.

    `path` is a fast tier, or a job's, host's or slot directory in one; a durable root, a step or an item in one, or an
    item outside of a step (`Verification.item`). `step_prefix` chooses which directories of a root are its steps
    (`ckptkit steps` lists them with the rest). A save that is replaced while it is read is superseded (a note), never
    corrupt. A step of stock Orbax has no digests: its structure is checked, every chunk must be there and decode, and
    it is called `unproven`. A step is also `unproven` if a chunk needs more memory than `memory_bytes_max`, or if an
    item has no digests.

    Cost: every byte is read once, on `threads` threads, with at most `memory_bytes_max` bytes of array data held.
    `progress` is called after every cell, from any of the threads, one call at a time.

    Raises `StepNotFoundError` where nothing of the kind is there, `StoreError` where it cannot be reached or read
    (unreachable is not corrupt), `ValueError` for limits below 1.
    """
    limits = Limits(threads=threads, memory_bytes_max=memory_bytes_max, progress=progress)
    url = root_url(path)
    if properties_of(url).file_system:
        kind = local_kind(url)
        if kind is None or kind != stat.S_IFDIR:
            raise no_directory(url, "there is no such directory; check the path")
        directories = slot_directories_below(Path(url))
        if directories:
            return _of_slots(url, directories, step, limits)
    return _of_durable(Place.open(url, timeout_s=timeout_s), step, step_prefix, limits, timeout_s)


def _of_slots(url: str, directories: Sequence[Path], step: int | None, limits: Limits) -> Verification:
    notes: list[str] = []
    proofs = prove_slots(directories, step, limits, notes)
    _require(proofs, notes, url, step, "it holds no committed save")
    return Verification(path=url, steps=tuple(proofs), notes=tuple(notes))


def _of_durable(
    place: Place, step: int | None, step_prefix: str | None, limits: Limits, timeout_s: float
) -> Verification:
    notes: list[str] = []
    names = place.names()
    if not names:
        on_disk = place.store.properties.file_system
        raise nothing_there(place.url, "it is empty" if on_disk else "there is nothing; check the path")
    require_whole(place)
    if item_kind(place) is not None or paths.STEP_METADATA in names or COMMIT_MARK in names or is_step(place):
        return _of_step(place, step, limits, timeout_s)
    ancestry, problems = read_ancestry(place)
    found_in_root = read_root(place, ancestry, step_prefix=step_prefix)
    steps = found_in_root.steps
    notes += found_in_root.notes
    proofs: list[StepProof] = []
    unread: list[Exception] = []
    for each in steps:
        if step in (None, each.step):
            try:
                proofs += judged_step(each.place, each.step, limits, notes, timeout_s=timeout_s)
            except (StoreError, OSError) as error:  # unreachable is not corrupt, and the others are still read
                unread.append(error)
    with with_damage([*problems, *(f"{each.path}: {each.problem}" for proof in proofs for each in proof.findings)]):
        for error in unread:
            raise error
    if not steps and not problems and _is_bare_step(place):
        return _of_step(place, step, limits, timeout_s)
    if not problems and not steps and notes:
        raise nothing_at(place.url, "; ".join(["it has no step that is verified", *notes]))
    if not problems:
        _require(proofs, notes, place.url, step, "neither a step, a root with steps, nor a fast tier with slots")
    return Verification(path=place.url, steps=tuple(proofs), notes=tuple(notes), problems=tuple(problems))


def _of_step(place: Place, step: int | None, limits: Limits, timeout_s: float) -> Verification:
    """A step, or an item, at its own path."""
    notes: list[str] = []
    found, of_run = _step_number(place)
    proofs = prove_step(place, found, limits, notes, timeout_s=timeout_s) if step in (None, found) else []
    _require(proofs, notes, place.url, step, "no such step")
    item = None if of_run else place.name
    return Verification(path=place.url, steps=tuple(proofs), notes=tuple(notes), item=item)


def _is_bare_step(place: Place) -> bool:
    """Whether a directory without Orbax's step metadata is a step: early versions wrote none."""
    named = paths.step_of_name(place.name) is not None and bool(place.directories())
    return named or any(item_kind(place.below(name)) for name in place.directories())


def _require(proofs: Sequence[StepProof], notes: Sequence[str], url: str, step: int | None, why: str) -> None:
    if proofs or (notes and step is None):
        return
    if step is not None:
        raise StepNotFoundError("; ".join([f"{url}: step {step} does not exist", *notes]), step=step, path=url)
    raise nothing_at(url, why)


def _step_number(place: Place) -> tuple[int, bool]:
    """The step of a directory, and whether that is the step of a run. A step directory has it in its name, an item in
    the directory above it or in its sidecar. For an item outside of a step it is unknown: 0, or the number that a
    conversion wrote."""
    above = place.url.rstrip("/").rpartition("/")[0].rpartition("/")[2]
    names = (place.name, above) if item_kind(place) is None else (above, place.name)  # an item may be called model_1
    steps = [step for name in names if (step := paths.step_of_name(name)) is not None]
    processes = sidecar_processes(place)
    if processes and len(set(steps)) != 1:
        save_id = read_sidecars(place, processes[:1], extent="head")[processes[0]].save_id
        of_run = save_id.epoch > 0  # a run's first is 1
        if not steps:
            return save_id.step, of_run
        if not of_run and save_id.step in steps:  # a tree by itself, in a root whose own name is a number
            return save_id.step, True
    return (steps[0], True) if steps else (0, False)
