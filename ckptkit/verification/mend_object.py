"""Repairs a durable step in a bucket: writes a new copy, verifies it, and copies it over the step object by object.
So too on a mount that does not rename a directory in one step.

No bucket request changes two objects. So the data is written first, under new names, then the manifests that name it,
then the records. Every state in between is the damaged step, a less damaged one, or the repaired one; readers verify
digests, so they see no other data. An object is replaced only if it is still the one that was inspected: a step that
was saved anew under the same number is not touched.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Set
from contextlib import suppress

from ckptkit.durable.lifecycle.delete import remove_step
from ckptkit.durable.lifecycle.places import Place
from ckptkit.errors import StoreError
from ckptkit.model import paths
from ckptkit.store import PutMode, Store, open_store
from ckptkit.store.local import remove_empty
from ckptkit.store.quarantine import QUARANTINE_DIR
from ckptkit.util.clock import wall_s
from ckptkit.verification.durable import identity_of, prove_step
from ckptkit.verification.pool import Limits
from ckptkit.verification.rebuild import CannotMendError, Sidecars, sidecars_for, small_files, write_arrays
from ckptkit.verification.sources import Sources

_REPLACED = "it was pruned or replaced meanwhile"
_PREFIX = "repair-"  # then when it began, in seconds since 1970, and a name of its own
DEAD_AFTER_S = 86400.0  # a repair writes one step once; no clocks are so far apart


def mend_object_step(
    place: Place, before: object, step: int, sources: Sources, limits: Limits, *, root: str, timeout_s: float
) -> str | None:
    """Makes a damaged step in a bucket whole again; None, or why nothing, or not all, was done.

    Replaced objects are copied to the quarantine first. If this is interrupted, the next repair completes it. Cost:
    the arrays are written once more, and copied within the bucket. Raises `CannotMendError` if this host lacks the
    needed bytes, `StoreError`.
    """
    store, name = open_store(root), place.name
    work = f"{paths.SIDECAR_DIR}/{_PREFIX}{wall_s():.0f}-{uuid.uuid4().hex}"
    generations = {key.removeprefix(f"{name}/"): stat.generation for key, stat in store.stat_all(name).items()}
    try:
        sidecars = sidecars_for(place, sources)
        rebuilt = _write(store, f"{work}/{name}", place, sidecars, sources)
        copy = Place.open(f"{root}/{work}/{name}", timeout_s=timeout_s)
        require_whole(copy, step, limits, timeout_s)
        if identity_of(place.again()) != before:
            return _REPLACED
        put_copy_aside(store, name)
        return _swap(store, name, f"{work}/{name}", generations, sidecars, rebuilt)
    finally:
        with suppress(StoreError):
            _remove_copy(store, work)


def require_whole(copy: Place, step: int, limits: Limits, timeout_s: float) -> None:
    """Raises `CannotMendError` where a new copy of a step is damaged."""
    proof = next(iter(prove_step(copy, step, limits, [], timeout_s=timeout_s)), None)
    if proof is None or proof.findings:
        raise CannotMendError(f"it cannot be made whole: {proof.findings[0] if proof else 'it is gone'}")


def clean_object_repairs(root: str) -> None:
    """Deletes the copies that repairs which died more than a day ago were making below a root in a bucket.

    A bucket has no lock that dies with its holder, so what is younger is left. One that lived after all would stop
    with an error, and leave what every repair that stops leaves: a step that the next one mends. Cost: one listing.
    Raises `StoreError`.
    """
    store = open_store(root)
    for name in store.list(paths.SIDECAR_DIR):
        if not (name.startswith(_PREFIX) and name.endswith("/")):
            continue
        began, _, own_name = name.removeprefix(_PREFIX).partition("-")
        if own_name and began.isdecimal() and wall_s() - int(began) > DEAD_AFTER_S:
            _remove_copy(store, f"{paths.SIDECAR_DIR}/{name.rstrip('/')}")


def put_object_step_aside(place: Place, before: object, root: str) -> str | None:
    """Moves a step to the root's quarantine: copied whole, then deleted, its mark first; why not, where it changed."""
    if identity_of(place.again()) != before:
        return _REPLACED
    put_copy_aside(open_store(root), place.name)
    removed = remove_step(place.url, lambda _: None, lambda: identity_of(place.again()) == before)
    return None if removed else _REPLACED


def put_copy_aside(store: Store, name: str) -> None:
    """Copies every object of a step into the quarantine, next to earlier copies."""
    quarantine = f"{paths.SIDECAR_DIR}/{QUARANTINE_DIR}"
    taken = {each.rstrip("/") for each in store.list(quarantine)}
    target = next(
        each for number in range(len(taken) + 1) if (each := f"{name}.{number}" if number else name) not in taken
    )
    for key in store.list_all(name):
        with suppress(FileNotFoundError):  # deleted meanwhile: whoever swaps will see it
            store.copy(key, f"{quarantine}/{target}{key.removeprefix(name)}")


def _write(store: Store, work: str, place: Place, sidecars: Sidecars, sources: Sources) -> set[str]:
    """Writes the step as it was saved, below the prefix `work`: the arrays from verified cells, the rest unchanged.
    Returns the keys of the rebuilt objects, apart from the arrays."""
    for key in store.list_all(place.name):
        if not is_tree(key.removeprefix(f"{place.name}/"), sidecars):
            store.copy(key, f"{work}/{key.removeprefix(f'{place.name}/')}")
    files = small_files(place, sidecars)
    for item, manifests in sidecars.items():
        write_arrays(f"{store.url}/{work}/{item}", item, manifests, sources)
        for manifest in manifests:
            name = paths.sidecar_name(manifest.writer.process)
            files[f"{item}/{paths.SIDECAR_DIR}/{name}"] = manifest.to_bytes()
    for key, data in files.items():
        store.put(f"{work}/{key}", data)
    return set(files)


def _swap(
    store: Store,
    name: str,
    work: str,
    generations: Mapping[str, int | None],
    sidecars: Sidecars,
    rebuilt: Set[str],
) -> str | None:
    """Copies the rebuilt objects over the existing ones, data first; then deletes objects that the new trees do not
    name."""
    written = [key.removeprefix(f"{work}/") for key in store.list_all(work)]
    anew = [key for key in written if key in rebuilt or is_tree(key, sidecars)]
    for key in sorted(anew, key=lambda each: order_of(each, sidecars)):
        mode: PutMode = "replace" if key in generations else "create"
        try:
            store.copy(f"{work}/{key}", f"{name}/{key}", mode=mode, replaces=generations.get(key))
        except FileExistsError:
            if store.get(f"{name}/{key}") != store.get(f"{work}/{key}"):  # else the answer of the first copy was lost
                return _REPLACED
    obsolete = [key for key in generations if is_tree(key, sidecars) and key not in written]
    store.delete_many([f"{name}/{key}" for key in obsolete])
    return None


def _remove_copy(store: Store, work: str) -> None:
    store.delete_many(store.list_all(work))
    if store.properties.file_system:
        remove_empty(f"{store.url}/{work}")


def order_of(key: str, sidecars: Sidecars) -> tuple[int, str]:
    """Data, the trees that name it, then the records that prove it."""
    if not is_tree(key, sidecars):
        return 2, key
    return (1 if key.endswith(f"/{paths.OCDBT_MANIFEST}") else 0), key


def is_tree(key: str, sidecars: Sidecars) -> bool:
    """Whether an object is part of an item's OCDBT tree, or of one that a process wrote of it."""
    item, _, rest = key.partition("/")
    part = rest.partition("/")[0]
    return item in sidecars and (part in ("d", paths.OCDBT_MANIFEST) or part.startswith("ocdbt.process_"))
