"""The correct content of a damaged durable step, from this host's copies: sidecars, cells, small items."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ckptkit.durable.cells.writer import CellStream
from ckptkit.durable.lifecycle.places import Place, json_name
from ckptkit.durable.lifecycle.step_records import read_sidecars, sidecar_processes
from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.boxes import Box, cells_of, missing_elements
from ckptkit.model.cells import cell_ranges, digested_cells
from ckptkit.model.digests import digest_of
from ckptkit.model.handler_files import is_file, with_file_digests, with_file_leaves
from ckptkit.model.manifest import FILES, BoxRecord, LeafRecord, Manifest, merged_leaves
from ckptkit.snapshot.small_items import files_in
from ckptkit.store.base import checked_key
from ckptkit.verification.sources import Sources

_COMMIT_BYTES = 256 << 20  # held in memory before they are written: a commit of its own for every cell is slow

Sidecars = Mapping[str, tuple[Manifest, ...]]  # of every process, by item


class CannotMendError(Exception):
    """Why a step cannot be rebuilt from what this host holds."""


def sidecars_for(place: Place, sources: Sources) -> dict[str, tuple[Manifest, ...]]:
    """The sidecars of every array item: the intact ones, and for the others the records of the slots.

    Each box that no intact sidecar has is given to the process whose slot holds it; to the first one, if several hold
    it. So a sidecar may differ from the one that was written, and still verify the same bytes. Raises
    `CannotMendError`.
    """
    if not sources.manifests:
        raise CannotMendError("no other copy of it is on this host")
    names = dict.fromkeys(item for manifest in sources.manifests for item in manifest.trees)
    return {name: _sidecars_of(place.below(name), name, sources) for name in names}


def _sidecars_of(item: Place, name: str, sources: Sources) -> tuple[Manifest, ...]:
    first = sources.manifests[0]
    whole = intact_sidecars(item, name, first)
    lacking = [process for process in range(first.writer.count) if process not in whole]
    if lacking:
        slots = [manifest for manifest in sources.manifests if manifest.slot and name in manifest.arrays]
        if not slots:
            raise CannotMendError(f"sidecars of item {name} are damaged, and no slot on this host has their content")
        for process, leaves in _shares_of(name, lacking, slots, list(whole.values()), sources).items():
            base = next((each for each in slots if each.writer.process == process), slots[0])
            writer = dataclasses.replace(base.writer, process=process, count=first.writer.count)
            described = with_file_digests(base)
            whole[process] = dataclasses.replace(described, writer=writer, slot="", arrays={name: leaves})
    return tuple(whole[process] for process in range(first.writer.count))


def intact_sidecars(item: Place, name: str, like: Manifest) -> dict[int, Manifest]:
    """The sidecars of an item that can be read, and belong to the save of `like`."""
    found: dict[int, Manifest] = {}
    with suppress(CorruptCheckpointError):
        for process in sidecar_processes(item):
            with suppress(CorruptCheckpointError):
                manifest = read_sidecars(item, [process])[process]
                same = manifest.save_id == like.save_id and manifest.writer.count == like.writer.count
                if same and manifest.writer.process == process and name in manifest.arrays:
                    found[process] = manifest
    return found


def _shares_of(
    name: str, lacking: Sequence[int], slots: Sequence[Manifest], whole: Sequence[Manifest], sources: Sources
) -> dict[int, tuple[LeafRecord, ...]]:
    """The sidecars of the processes `lacking`: for each leaf, the boxes that no intact sidecar has."""
    shares: dict[int, list[LeafRecord]] = {process: [] for process in lacking}
    for leaf in merged_leaves((*slots, *whole), name):
        covered = [record.box for manifest in whole for record in _boxes(manifest, name, leaf)]
        held = [record.box for manifest in slots for record in _boxes(manifest, name, leaf)]
        if missing_elements(Box.whole(leaf.shape), (*covered, *held)):  # before a shape that nobody holds is cut up
            raise _nowhere(name, leaf, Box.whole(leaf.shape))
        boxes: dict[int, list[BoxRecord]] = {process: [] for process in lacking}
        cells = set(cells_of(Box.whole(leaf.shape), leaf.cell))
        for manifest in sorted(slots, key=lambda each: each.writer.process):
            owner = manifest.writer.process if manifest.writer.process in boxes else lacking[0]
            for record in _boxes(manifest, name, leaf):
                free = missing_elements(record.box, covered) == record.box.size and record.box.size > 0
                if free and {cell for cell, _, _ in cell_ranges(record, leaf)} <= cells:
                    boxes[owner].append(dataclasses.replace(record, offset=-1))
                    covered.append(record.box)
        for cell in sorted(cells):  # those that several slots hold in parts, or next to covered ones
            if missing_elements(cell, covered):
                boxes[lacking[0]].append(_proven_cell(name, leaf, cell, covered, sources))
                covered.append(cell)
        for process in lacking:
            shares[process].append(dataclasses.replace(leaf, boxes=tuple(boxes[process])))
    return {process: tuple(leaves) for process, leaves in shares.items()}


def _proven_cell(name: str, leaf: LeafRecord, cell: Box, covered: Sequence[Box], sources: Sources) -> BoxRecord:
    """A cell with the digest of bytes that were proven in parts."""
    block = None if missing_elements(cell, covered) < cell.size else sources.rebuild(name, leaf, cell, None)
    if block is None:
        raise _nowhere(name, leaf, cell)
    return BoxRecord(box=cell, offset=-1, digests=(digest_of(block.reshape(-1).view(np.uint8)),))


def _boxes(manifest: Manifest, name: str, leaf: LeafRecord) -> tuple[BoxRecord, ...]:
    return next((each.boxes for each in manifest.arrays.get(name, ()) if each.path == leaf.path), ())


def require_mendable(place: Place, sources: Sources) -> None:
    """Raises `CannotMendError` unless every cell of the step can be had on this host. Writes nothing."""
    for name, manifests in sidecars_for(place, sources).items():
        for leaf, cell, digest in _cells(name, manifests):
            _require(sources, name, leaf, cell, digest)


def write_arrays(directory: str, name: str, manifests: Sequence[Manifest], sources: Sources) -> None:
    """Writes an item's arrays below `directory`, a path or a bucket URL; every cell is proven before it is written."""
    writer = CellStream(directory, _COMMIT_BYTES)
    for leaf in merged_leaves(manifests, name):
        writer.create(leaf)
    for leaf, cell, digest in _cells(name, manifests):
        writer.write(leaf, cell, _require(sources, name, leaf, cell, digest))
    writer.finish()


def small_files(place: Place, sidecars: Sidecars) -> dict[str, bytes]:
    """The JSON items that the sidecars keep, as Orbax's files of them, and small files of handlers, by key."""
    manifests = next(iter(sidecars.values()))
    found = {
        f"{name}/{json_name(place.below(name)) or 'metadata'}": json.dumps(stored["value"]).encode()
        for name, stored in manifests[0].inline.items()
        if stored["kind"] == "json"
    }
    for manifest in reversed(manifests):  # of a name that several processes have written: the first one's
        for name, stored in manifest.inline.items():
            if stored["kind"] == FILES:
                found |= {f"{name}/{file}": data for file, data in files_in(stored).items()}
    return found


def mend_large_files(copy: Path, sidecars: Sidecars, sources: Sources) -> None:
    """Writes the large files of handlers in `copy`, a step on a disk, as they were saved, from whatever places have
    them. Raises `CannotMendError`. Cost: reads each of them."""
    seen: set[str] = set()
    for manifest in with_file_leaves(next(iter(sidecars.values()))):
        for name, leaf in (
            (name, leaf) for name, leaves in manifest.arrays.items() for leaf in leaves if is_file(leaf)
        ):
            key = checked_key(f"{name}/{leaf.path[1]}")
            if key not in seen:  # of several processes: the first one's
                _mend_file(copy / key, name, leaf, sources)
            seen.add(key)


def _mend_file(path: Path, name: str, leaf: LeafRecord, sources: Sources) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        for record in leaf.boxes:
            for (cell, start, stop), digest in zip(cell_ranges(record, leaf), record.digests, strict=True):
                file.seek(start)
                if digest_of(file.read(stop - start)) != digest:
                    file.seek(start)
                    file.write(_require(sources, name, leaf, cell, digest).tobytes())
        file.truncate(leaf.shape[0])


def _cells(name: str, manifests: Sequence[Manifest]) -> Iterator[tuple[LeafRecord, Box, str]]:
    for manifest in manifests:
        for each in digested_cells(manifest):
            if each.item == name:
                yield each.leaf, each.cell, each.digest


def _require(sources: Sources, name: str, leaf: LeafRecord, cell: Box, digest: str) -> np.ndarray:
    block = sources.rebuild(name, leaf, cell, digest)
    if block is None:
        raise _nowhere(name, leaf, cell)
    return block


def _nowhere(name: str, leaf: LeafRecord, cell: Box) -> CannotMendError:
    return CannotMendError(
        f"leaf {name}:{leaf.name}, box {cell.start} to {cell.stop} is not all elsewhere on this host"
    )
