"""Reads the records of a durable step: the save in its marker or metadata, the sidecars of its items, their list.

The rules for these records are in `ckptkit.durable.sidecars`; this module reads them for every reader of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckptkit.durable.lifecycle.places import Place, item_handlers, readable
from ckptkit.durable.sidecars import (
    has_sidecar_sign,
    lost_sidecars,
    marked_save,
    missing_items,
    of_one_save,
    sidecars_among,
    under_name,
)
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, ManifestDepth, SaveId

_READ_THREADS = 8
_MARKER_S = 20.0  # for a marker, which is rarely asked for


def marked_in(step: Place) -> SaveId | None:
    """The save that a step's marker names; None without a marker, or if it names none. Cost: a small read."""
    mark = step.read(paths.COMMIT_MARK)
    return None if mark is None else marked_save(mark)


def marked_above(item: Place) -> SaveId | None:
    """The save that the marker of an item's step names; None without a marker, or if it names none."""
    return marked_in(Place.open(item.url.rpartition("/")[0], timeout_s=_MARKER_S))


def save_in_metadata(step: Place) -> SaveId | None:
    """The save that Orbax's metadata of a step names: one of ours without arrays has no sidecar. None for any other.

    Cost: a small read. Raises `CorruptCheckpointError` for damaged metadata.
    """
    metadata = step.json(paths.STEP_METADATA)
    with readable(f"{step.url}/{paths.STEP_METADATA}"):
        record = ((metadata or {}).get("custom_metadata") or {}).get(paths.SAVE_ID_FIELD)
        return None if record is None else SaveId.from_list(record)


def sidecar_processes(item: Place) -> list[int]:
    """The processes whose sidecars are in a durable item; none in one that stock Orbax wrote."""
    if f"{paths.SIDECAR_DIR}/" not in item.names():
        return []
    return sidecars_among(item.below(paths.SIDECAR_DIR).names())


def had_sidecars(item: Place) -> bool:
    """Whether an item's array metadata records that it has sidecars. Cost: a small read."""
    signs = item.below(paths.ARRAY_METADATAS).read("process_0")
    return signs is not None and has_sidecar_sign(signs)


def sidecars_lost(item: Place) -> str | None:
    """Why a durable item is a damaged one of ours: it has a sign of sidecars, and none of them. None for any other.

    Cost: one small read without sidecars.
    """
    if sidecar_processes(item):
        return None
    signed = f"{paths.ARRAY_METADATAS}/" in item.names() and had_sidecars(item)
    return lost_sidecars(item.url) if f"{paths.SIDECAR_DIR}/" in item.names() or signed else None


def items_missing(step: Place, *, ours: bool) -> str | None:
    """Why a step of ours is damaged: an item that it names is missing. None where all are there, or Orbax wrote it.

    Cost: two small reads. `ours`: something else than the mark shows that the step is ours.
    """
    if not ours and marked_in(step) is None:
        return None
    return missing_items(step.url, item_handlers(step), step.directories())


def read_sidecars(item: Place, processes: Iterable[int], *, extent: ManifestDepth = "all") -> dict[int, Manifest]:
    """The sidecars of these processes in a durable item, as far as `extent` of them; raises `CorruptCheckpointError`
    for a damaged one."""
    directory = item.below(paths.SIDECAR_DIR)

    def read(process: int) -> tuple[int, Manifest]:
        name = paths.sidecar_name(process)
        data = directory.read(name)
        where = f"{directory.url}/{name}"
        if data is None:
            raise CorruptCheckpointError(f"{where} is gone", path=where)
        with readable(where):
            return process, under_name(Manifest.from_bytes(data, path=where, extent=extent), item.name)

    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="ckptkit-sidecars") as pool:
        return dict(pool.map(read, processes))


def own_sidecars(item: Place, *, extent: ManifestDepth = "all") -> dict[int, Manifest]:
    """The sidecars of the save that a durable item is of, by process; none in one that stock Orbax wrote.

    Cost: a read of each. Raises `CorruptCheckpointError` for a damaged one.
    """
    return of_one_save(read_sidecars(item, sidecar_processes(item), extent=extent), partial(marked_above, item))
