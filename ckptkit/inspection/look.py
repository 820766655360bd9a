"""`inspect`: describes the checkpoint at a path from its metadata alone. Reads no array byte, needs no device."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ckptkit.durable.lifecycle.classify import grain_names_in, json_name_in, shown_by
from ckptkit.durable.lifecycle.listing import newest_committed, read_root
from ckptkit.durable.lifecycle.places import (
    Place,
    committed_at_s,
    is_committed,
    is_step,
    item_kind,
    json_value,
    local_kind,
    nothing_at,
    readable,
    step_items,
)
from ckptkit.durable.lifecycle.root_record import certified_saves
from ckptkit.durable.lifecycle.step_records import (
    items_missing,
    own_sidecars,
    sidecar_processes,
    sidecars_lost,
)
from ckptkit.durable.sidecars import incomplete
from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.inspection.records import Inspection, Item, SaveOrigin
from ckptkit.inspection.roots import nothing_there, read_ancestry, require_whole
from ckptkit.inspection.shares import Share, items_of_manifest, leaf_of_record, read_share, read_shares
from ckptkit.inspection.sharing import shared_files
from ckptkit.inspection.sizes import stored_bytes
from ckptkit.inspection.stored_arrays import read_arrays
from ckptkit.model import paths
from ckptkit.model.leaf_info import sharding_words
from ckptkit.model.manifest import Manifest, Writer
from ckptkit.model.paths import ARRAY_METADATAS, STEP_METADATA
from ckptkit.store.backends import properties_of
from ckptkit.store.roots import root_url


def inspect(path: str, *, timeout_s: float = 20.0, passes_over: bool = True) -> Inspection:
    """See `ckptkit.formats.inspect`, for a step directory (of ckptkit or stock Orbax), an item in one, a root (then its
    newest committed step), or a fast tier's slot directory or manifest file.

    Without `passes_over` a root raises `CorruptCheckpointError` where a newer step is damaged.
    """
    url = root_url(path)
    if properties_of(url).file_system:
        kind = local_kind(url)
        if kind is None:
            raise nothing_there(url, "there is no such file or directory; check the path")
        if kind != stat.S_IFDIR:
            return _manifest_file(Path(url))
    place = Place.open(url, timeout_s=timeout_s)
    names = place.names()
    if not names:
        on_disk = place.store.properties.file_system
        raise nothing_there(url, "it is empty" if on_disk else "there is nothing; check bucket and prefix")
    require_whole(place)
    if shown_by(names) == "slots":
        return _slot_directory(Path(url))
    if item_kind(place) is not None:
        return _directory(place, "item", [place], timeout_s)
    if STEP_METADATA in names or paths.COMMIT_MARK in names or is_step(place):
        return _step(place, timeout_s)
    return _newest_of_root(place, timeout_s, passes_over) or _bare_step(place, timeout_s)


def _newest_of_root(place: Place, timeout_s: float, passes_over: bool) -> Inspection | None:
    ancestry, problems = read_ancestry(place)
    found_in_root = read_root(place, ancestry)
    steps = found_in_root.steps
    if not steps and problems:
        raise CorruptCheckpointError(f"{place.url} has no step, and {'; '.join(problems)}", path=place.url)
    if not steps:
        return None
    newest = newest_committed(steps)
    problems += [step.problem for step in steps if step.problem is not None]
    if newest is None and problems:
        raise CorruptCheckpointError(f"{place.url} has no whole step: {'; '.join(problems)}", path=place.url)
    if newest is None:
        states = ", ".join(f"{step.step} ({step.state})" for step in steps)
        raise nothing_at(place.url, f"it has no committed step, only {states}; name one of them to look at it")
    others = [step for step in steps if step.step > newest.step and step.state != "abandoned"]
    newer = [step.problem for step in others if step.problem is not None]
    if newer and not passes_over:
        raise CorruptCheckpointError(
            f"{'; '.join(newer)}. The newest step is damaged; to take an older one, name it: {newest.place.url}",
            path=place.url,
        )
    found = (
        _directory(newest.place, "item", [newest.place], timeout_s)
        if item_kind(newest.place)
        else _step(newest.place, timeout_s)
    )
    committed = sum(step.state == "committed" for step in steps)
    which = "the only committed step" if committed == 1 else f"the newest of {committed:,} committed steps"
    note = f"{which} in {place.url}"
    return replace(found, notes=(note, *found_in_root.notes, *found.notes), problems=(*problems, *found.problems))


def _bare_step(place: Place, timeout_s: float) -> Inspection:
    """A directory without Orbax's step metadata (an old one, or unfinished), if it has items."""
    if any(item_kind(place.below(name)) for name in place.directories()):
        return _step(place, timeout_s)
    shown = ", ".join(place.names()[:5]) + (", ..." if len(place.names()) > 5 else "")
    raise nothing_at(
        place.url,
        f"neither a step, an item, a root with steps nor a slot directory (it has {shown}); a fast tier's slots are "
        "<tier>/<job>/<host id>/<rank>",
    )


def _step(place: Place, timeout_s: float) -> Inspection:
    return _directory(place, "step", [place.below(name) for name in step_items(place)], timeout_s)


def _directory(place: Place, kind: Literal["step", "item"], items: Sequence[Place], timeout_s: float) -> Inspection:
    problems: list[str] = []
    notes: list[str] = []
    if kind == "step" and not is_committed(place):
        notes.append("unfinished: this step was never committed")
    elif kind == "step" and not items:
        raise CorruptCheckpointError(f"{place.url} is a step without any item", path=place.url)
    origin, sidecars = _origin(place, items, notes, problems)
    origin = replace(origin, certified=_certified(place, origin, timeout_s))
    missing = items_missing(place, ours=origin.writer == "ckptkit") if kind == "step" and place not in items else None
    if missing is not None:
        problems.append(missing)
        origin = replace(origin, writer="ckptkit", proven=False)
    aside = problems if origin.writer == "ckptkit" else notes  # where what a restart of a stock step does not need goes
    found = tuple(_item(item, sidecars.get(item.name), aside, problems, timeout_s) for item in items)
    step = paths.step_of_name(place.name) if kind == "step" else origin.save_id.step if origin.save_id else None
    return Inspection(
        path=place.url,
        kind=kind,
        step=step,
        origin=origin,
        items=found,
        notes=tuple(notes),
        problems=tuple(problems),
        shared=shared_files(place.url) if origin.writer == "ckptkit" else {},  # a stock step may have 100,000 files
    )


def _certified(place: Place, origin: SaveOrigin, timeout_s: float) -> bool | None:
    """Whether the root of a step, or of an item in one, has a certificate of the save."""
    root, _, name = place.url.rpartition("/")
    if paths.step_of_name(name) is None:
        root, _, name = root.rpartition("/")
    if origin.save_id is None or paths.step_of_name(name) is None:
        return None
    try:
        return origin.save_id in certified_saves(Place.open(root, timeout_s=timeout_s).store)
    except (StoreError, OSError):  # a reader may have the step alone
        return None


def _origin(
    place: Place, items: Sequence[Place], notes: list[str], problems: list[str]
) -> tuple[SaveOrigin, dict[str, Manifest]]:
    """The writer of a step or an item, and the first complete sidecar of each item."""
    lost = [why for item in items if (why := sidecars_lost(item)) is not None]
    problems += lost
    ours = [item for item in items if sidecar_processes(item)]
    at_s = None
    try:
        at_s = committed_at_s(place)
    except CorruptCheckpointError as error:
        (problems if ours or lost else notes).append(str(error))
    if not any(item_kind(item) == "arrays" for item in items):  # a small item does not record its writer
        return SaveOrigin(writer="unknown", committed_at_s=at_s), {}
    if not ours and not lost:
        return SaveOrigin(writer="orbax", processes=_stock_processes(items), committed_at_s=at_s), {}
    sidecars: dict[str, Manifest] = {}
    hosts: set[str] = set()
    writers: dict[int, Writer] = {}
    for item in ours:
        try:
            own = own_sidecars(item, extent="leaves", others="head")  # each names all leaves
        except CorruptCheckpointError as error:
            problems.append(str(error))
            continue
        why = incomplete(item.url, own, own)
        if why is not None:
            problems.append(why)
            continue
        sidecars[item.name] = own[min(own)]
        hosts.update(manifest.writer.host for manifest in own.values())
        writers |= {process: manifest.writer for process, manifest in own.items()}
    first = next(iter(sidecars.values()), None)
    origin = SaveOrigin(
        writer="ckptkit",
        proven=len(sidecars) == len(ours) and not lost,
        save_id=None if first is None else first.save_id,
        processes=None if first is None else first.writer.count,
        hosts=tuple(sorted(hosts)),
        committed_at_s=at_s,
        provenance={} if first is None else provenance_of([writers[process] for process in sorted(writers)], first),
    )
    return origin, sidecars


def _item(place: Place, sidecar: Manifest | None, aside: list[str], problems: list[str], timeout_s: float) -> Item:
    kind, stored = item_kind(place), stored_bytes(place)
    if kind == "arrays":
        if sidecar is not None and sidecar.arrays:
            # Every process's sidecar names all leaves, each with that process's boxes.
            leaves = tuple(leaf_of_record(leaf, held=False) for some in sidecar.arrays.values() for leaf in some)
            return Item(name=place.name, kind="arrays", layout="ocdbt, zarr2", stored_bytes=stored, leaves=leaves)
        arrays = read_arrays(place, timeout_s=timeout_s)
        aside += arrays.notes
        problems += arrays.problems
        return Item(name=place.name, kind="arrays", layout=arrays.layout, stored_bytes=stored, leaves=arrays.leaves)
    try:
        name = json_name_in(place.names()) if kind == "json" else None
        if name is not None:
            value = json_value(place, name)
            return Item(name=place.name, kind="json", layout="file", stored_bytes=stored, value=value)
        if kind == "grain":
            value = {name: json_value(place, name) for name in grain_names_in(place.names())}
            return Item(name=place.name, kind="grain", layout="file per process", stored_bytes=stored, value=value)
    except CorruptCheckpointError as error:
        problems.append(str(error))
    words = ", ".join(place.names()[:5]) or "empty"
    return Item(name=place.name, kind=kind or "other", layout=words, stored_bytes=stored)


def _stock_processes(items: Sequence[Place]) -> int | None:
    """How many processes stock Orbax saved from: each wrote what it knew of its arrays."""
    counts = [len(item.below(ARRAY_METADATAS).names()) for item in items if f"{ARRAY_METADATAS}/" in item.names()]
    return max(counts, default=None)


def _slot_directory(directory: Path) -> Inspection:
    shares, damaged = read_shares(directory)
    problems = [str(error) for error in damaged]
    if not shares:
        if problems:
            raise CorruptCheckpointError("; ".join(problems), path=str(directory))
        raise nothing_at(str(directory), "a slot directory without a committed save")
    notes = []
    if len(shares) > 1:
        others = ", ".join(str(share.manifest.save_id.step) for share in shares[1:])
        of = "the others are of steps" if len(shares) > 2 else "the other is of step"
        notes.append(f"the newest of {len(shares)} saves in {directory}; {of} {others}")
    found = _slot(shares[0])
    return replace(found, notes=(*notes, *found.notes), problems=(*problems, *found.problems))


def _manifest_file(path: Path) -> Inspection:
    if paths.save_of_manifest(path.name) is not None:
        return _slot(read_share(path))
    if paths.process_of_sidecar(path.name) is None:
        raise nothing_at(
            str(path), "a file that is not a manifest; inspect takes step and item directories, roots, slots, manifests"
        )
    place = Place.open(str(path.parent), timeout_s=1.0)
    data = place.read(path.name)
    with readable(str(path)):
        manifest = Manifest.from_bytes(data or b"", path=str(path))
    return _of_manifest(path, manifest, "item", path.stat().st_mtime)


def _slot(share: Share) -> Inspection:
    save = share.manifest.save_id
    path = share.directory / paths.manifest_name(save.step, save.epoch, save.number)
    return _of_manifest(path, share.manifest, "slot", share.committed_at_s)


def _of_manifest(path: Path, manifest: Manifest, kind: Literal["slot", "item"], at_s: float) -> Inspection:
    problems = []
    if kind == "slot" and not os.path.isfile(path.parent / manifest.slot):
        problems.append(f"{path.parent / manifest.slot} is missing: the manifest names bytes that do not exist")
    writer = manifest.writer
    note = f"the share of process {writer.process} of {writer.count}, on host {writer.host}"
    return Inspection(
        path=str(path),
        kind=kind,
        step=manifest.save_id.step,
        origin=SaveOrigin(
            writer="ckptkit",
            proven=not problems,
            save_id=manifest.save_id,
            processes=writer.count,
            hosts=(writer.host,),
            committed_at_s=at_s,
            provenance=provenance_of([writer], manifest),
        ),
        items=items_of_manifest(manifest),
        notes=(note,),
        problems=tuple(problems),
    )


_OF_EACH = "command"  # each process has its own: that of the first is shown
_SHOWN_MAX = 4  # values of one name


def provenance_of(writers: Sequence[Writer], manifest: Manifest) -> dict[str, str]:
    """By name, what the processes ran with, and under `mesh` the axes of the meshes in one of their manifests, the most
    used first.

    Where processes differ, the value names how many had which. Empty for a save without provenance. Raises
    `CorruptCheckpointError` for a sharding that no writer writes.
    """
    told = [writer.provenance for writer in writers if writer.provenance]
    if not told:
        return {}
    found = {name: _together(name, [each.get(name, "unknown") for each in told]) for name in told[0]}
    meshes = _meshes(manifest)
    return {**found, "mesh": "; ".join(meshes)} if meshes else found


def _together(name: str, values: Sequence[str]) -> str:
    counts = Counter(values)
    if name == _OF_EACH or len(counts) == 1:
        return values[0]
    shown = [f"{value} ({count} of {len(values)} processes)" for value, count in counts.most_common(_SHOWN_MAX)]
    return ", ".join(shown) + ", ..." * (len(counts) > _SHOWN_MAX)


def _meshes(manifest: Manifest) -> list[str]:
    texts = Counter(
        text
        for leaves in manifest.arrays.values()
        for leaf in leaves
        if (text := leaf.extra.get("sharding")) is not None
    )
    counts = Counter[str]()
    with readable("a sharding"):
        for text, count in texts.items():
            counts[sharding_words(text).partition(") on ")[2]] += count
    return [mesh for mesh, _ in counts.most_common(_SHOWN_MAX) if mesh]
