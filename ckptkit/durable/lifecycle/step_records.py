"""Reads the records of a durable step: the save in its marker or metadata, the sidecars of its items, their list.

The rules for these records are in `ckptkit.durable.sidecars`; this module reads them for every reader of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from ckptkit.durable.lifecycle.places import Place, item_handlers, readable
from ckptkit.durable.sidecars import (
    has_sidecar_sign,
    lost_sidecars,
    marked_save,
    missing_items,
    of_one_save,
    sidecars_among,
    split_sidecars,
    under_name,
)
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.manifest import Manifest, ManifestDepth, SaveId
from ckptkit.store import all_of
from ckptkit.util.gc_pause import collection_paused

_READ_THREADS = 8
_MARKER_S = 20.0  # for a marker, which is rarely asked for


def marked_in(step: Place) -> SaveId | None:
    """The save that a step's marker names; None without a marker, or if it names none. Cost: a small read."""
    mark = step.read(paths.COMMIT_MARK)
    return None if mark is None else marked_save(mark)


def marked_above(item: Place) -> SaveId | None:
    """The save that the marker of an item's step names; None without a marker, or if it names none."""
    return marked_in(item.above(timeout_s=_MARKER_S))


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


def read_sidecar(item: Place, process: int, *, extent: ManifestDepth = "all") -> Manifest | None:
    """The sidecar of a process in a durable item, as far as `extent` of it; None if it does not exist. Raises
    `CorruptCheckpointError` for a damaged one."""
    directory, name = item.below(paths.SIDECAR_DIR), paths.sidecar_name(process)
    data = directory.read(name)
    return None if data is None else _parsed(item, data, f"{directory.url}/{name}", extent)


def read_sidecars(item: Place, processes: Iterable[int], *, extent: ManifestDepth = "all") -> dict[int, Manifest]:
    """The sidecars of these processes in a durable item, as far as `extent` of them; raises `CorruptCheckpointError`
    for a damaged one, and for one that is missing."""

    def read(process: int) -> tuple[int, Manifest]:
        found = read_sidecar(item, process, extent=extent)
        if found is None:
            where = f"{item.url}/{paths.SIDECAR_DIR}/{paths.sidecar_name(process)}"
            raise CorruptCheckpointError(f"{where} is gone", path=where)
        return process, found

    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="ckptkit-sidecars") as pool:
        return dict(pool.map(read, processes))


def own_sidecars(
    item: Place,
    *,
    extent: ManifestDepth = "all",
    others: ManifestDepth | None = None,
    joined: Callable[[str], bytes] | None = None,
    on_listed: Callable[[], None] = lambda: None,
) -> dict[int, Manifest]:
    """The sidecars of the save that a durable item is of, by process; none in one that stock Orbax wrote.

    The first is read as far as `extent`, the others as far as `others` (None: as far). With `joined`, which reads an
    object of the item, the joined record is read in place of the others, if it is whole. `on_listed` is called as soon
    as it is known that there are sidecars. Cost: a read of each; with `joined` in a bucket two round trips for any
    number of processes. Raises `CorruptCheckpointError` for a damaged one.
    """
    if joined is None:
        processes = sidecar_processes(item)
        found = read_sidecars(item, processes[:1], extent=extent)
    else:
        processes, found = _at_once(item, joined, on_listed)
    missing = [process for process in processes if process not in found]
    return of_one_save(found | read_sidecars(item, missing, extent=others or extent), partial(marked_above, item))


def _at_once(
    item: Place, joined: Callable[[str], bytes], on_listed: Callable[[], None]
) -> tuple[list[int], dict[int, Manifest]]:
    """The processes that have a sidecar of the item, and the sidecars that two round trips give: the first, which is
    read while they are listed, or all of the joined record."""

    def listed() -> list[str]:
        names = item.below(paths.SIDECAR_DIR).names()
        if sidecars_among(names):
            on_listed()
        return names

    names, first = all_of(item.url, [listed, lambda: read_sidecar(item, 0)])
    processes = sidecars_among(names)
    if first is not None and paths.JOINED_SIDECARS.rpartition("/")[2] in names:
        found = _joined(item, first, joined)
        if processes == sorted(found):
            return processes, found
    return processes, {} if first is None or 0 not in processes else {0: first}


def _joined(item: Place, first: Manifest, read: Callable[[str], bytes]) -> dict[int, Manifest]:
    """The sidecars of the save of `first`, the sidecar of process 0, by process; empty where the joined record is
    damaged, or of another save."""
    where = f"{item.url}/{paths.JOINED_SIDECARS}"
    with suppress(FileNotFoundError, ValueError, CorruptCheckpointError):
        texts = split_sidecars(read(paths.JOINED_SIDECARS))
        found = {n: _parsed(item, text, f"{where}, process {n}") for n, text in enumerate(texts)}
        if all((each.save_id, each.writer.process) == (first.save_id, n) for n, each in found.items()):
            return found
    return {}


def _parsed(item: Place, data: bytes, where: str, extent: ManifestDepth = "all") -> Manifest:
    with readable(where), collection_paused():  # records of every leaf, which stay
        return under_name(Manifest.from_bytes(data, path=where, extent=extent), item.name)
