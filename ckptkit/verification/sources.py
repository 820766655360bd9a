"""The cells, sidecars and small files of a save, from all its copies on this host.

Copies are slots of every tier and the durable step. A cell is taken from whichever copy has it, because damage may be
in another place of each copy. Every byte is compared with its digest where it is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

import numpy as np

from ckptkit.durable.lifecycle.classify import json_name_in
from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.lifecycle.step_records import read_sidecars, sidecar_processes
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.shares import Share
from ckptkit.model import paths
from ckptkit.model.boxes import Box, cells_of, missing_elements
from ckptkit.model.cells import digested_cells
from ckptkit.model.digests import digest_of
from ckptkit.model.handler_files import with_file_digests
from ckptkit.model.manifest import FILES, BoxRecord, LeafRecord, Manifest, merged_leaves
from ckptkit.slots.reader import SlotReader, within
from ckptkit.snapshot.small_items import files_in
from ckptkit.verification.durable import items_of
from ckptkit.verification.pool import MEMORY_BYTES_MAX

Read = Callable[[str, LeafRecord, BoxRecord, Box, np.ndarray], None]
Sidecars = Mapping[str, tuple[Manifest, ...]]  # of every process, by item


class CannotMendError(Exception):
    """Why a copy cannot be rebuilt from what this host holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSource:
    """One place that holds boxes of a save; `read` compares what it returns with its digests."""

    name: str
    manifest: Manifest
    read: Read


def slot_source(share: Share) -> RepairSource | None:
    """A process's share in a slot; None if the slot is missing or empty."""
    try:
        reader = SlotReader(share.directory, share.manifest)
    except (OSError, ValueError):
        return None

    def read(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        del item
        if record.offset < 0:
            raise CorruptCheckpointError(f"{share.directory}: a box has no place in the slot")
        reader.read(leaf, record, wanted, into)

    manifest = within(share.manifest, reader.size_bytes)
    return RepairSource(name=str(share.directory), manifest=manifest, read=read)


def durable_sources(place: Place, step: int, slots: Sequence[RepairSource]) -> list[RepairSource]:
    """The shares of every process in a durable step of ckptkit. If its records are damaged, those of the intact
    sidecars: they count only if a slot holds the same save."""
    reader = DurableReader(place.url, step=step)
    try:
        manifests = reader.manifests()
    except (CorruptCheckpointError, FileNotFoundError):
        items = items_of(place) if slots else []
        manifests = [each for item in items for each in _intact_sidecars(item, item.name, slots[0].manifest).values()]
    return [RepairSource(name=place.url, manifest=manifest, read=reader.read) for manifest in manifests]


@final
class Sources:
    """All places of one save. `used` has the bytes that each of them gave. A cell above `bytes_max` is in none."""

    def __init__(self, sources: Sequence[RepairSource], bytes_max: int = MEMORY_BYTES_MAX):
        self._bytes_max = bytes_max
        self._sources = sources
        self.used: dict[str, int] = {}  # bytes by name

    @property
    def manifests(self) -> list[Manifest]:
        """The records of the save in each place."""
        return [source.manifest for source in self._sources]

    def cell(self, item: str, leaf: LeafRecord, cell: Box, digest: str | None) -> np.ndarray:
        """The elements of a cell, bit for bit: each part is verified where it is read, and the whole against `digest`
        if that is known. Raises `CannotMendError` if the places do not have all of them."""
        block, given = self._joined(item, leaf, cell)
        if block is None or (digest is not None and digest_of(block.reshape(-1).view(np.uint8)) != digest):
            raise CannotMendError(
                f"leaf {item}:{leaf.name}, box {cell.start} to {cell.stop} is not all elsewhere on this host"
            )
        for name, given_bytes in given.items():
            self.used[name] = self.used.get(name, 0) + given_bytes
        return block

    def _joined(self, item: str, leaf: LeafRecord, cell: Box) -> tuple[np.ndarray | None, dict[str, int]]:
        """The elements from the parts that the places have, and the bytes of each place; None if a part is missing."""
        parts = [part for source in self._sources for part, _, _ in _parts(source, item, leaf, cell)]
        # Before anything is allocated for it.
        too_large = cell.size * leaf.itemsize > self._bytes_max
        if too_large or missing_elements(cell, parts) or (not cell.shape and not parts):
            return None, {}
        block, held = np.empty(cell.shape, np.dtype(leaf.dtype)), list[Box]()
        given: dict[str, int] = {}
        for source in self._sources:
            for common, theirs, record in _parts(source, item, leaf, cell):
                if not missing_elements(common, held):
                    continue
                part = np.empty(common.shape, block.dtype)
                try:
                    source.read(item, theirs, record, common, part)
                except (CorruptCheckpointError, FileNotFoundError):  # the next place is tried
                    continue
                block[common.slices(cell.start)] = part
                held.append(common)
                given[source.name] = given.get(source.name, 0) + part.nbytes
        return (None if missing_elements(cell, held) else block), given


def _parts(source: RepairSource, item: str, leaf: LeafRecord, cell: Box) -> list[tuple[Box, LeafRecord, BoxRecord]]:
    theirs = next((each for each in source.manifest.arrays.get(item, ()) if each.path == leaf.path), None)
    if theirs is None or (theirs.shape, theirs.dtype) != (leaf.shape, leaf.dtype):
        return []
    meets = [(record.box.intersect(cell), theirs, record) for record in theirs.boxes]
    if not leaf.shape:  # a scalar's box has no extent to intersect
        return [(record.box, theirs, record) for record in theirs.boxes]
    return [(common, theirs, record) for common, theirs, record in meets if common is not None]


def sidecars_for(place: Place, sources: Sources) -> dict[str, tuple[Manifest, ...]]:
    """The sidecars of every array item of a damaged durable step: the intact ones, and new ones for the others.

    The first new sidecar has each cell that no intact one covers. So it may differ from the one that was written, and
    still verifies the same bytes. Raises `CannotMendError`.
    """
    if not sources.manifests:
        raise CannotMendError("no other copy of it is on this host")
    names = dict.fromkeys(item for manifest in sources.manifests for item in manifest.trees)
    return {name: _sidecars_of(place.below(name), name, sources) for name in names}


def _sidecars_of(item: Place, name: str, sources: Sources) -> tuple[Manifest, ...]:
    described = [manifest for manifest in sources.manifests if name in manifest.arrays]
    count = described[0].writer.count
    whole = _intact_sidecars(item, name, described[0])
    lacking = [process for process in range(count) if process not in whole]
    leaves = merged_leaves((*described, *whole.values()), name) if lacking else []
    boxes = [_uncovered(name, leaf, list(whole.values()), sources) for leaf in leaves]
    for process in lacking:
        own = boxes if process == lacking[0] else [()] * len(boxes)
        base = with_file_digests(next((each for each in described if each.writer.process == process), described[0]))
        records = tuple(dataclasses.replace(leaf, boxes=held) for leaf, held in zip(leaves, own, strict=True))
        writer = dataclasses.replace(base.writer, process=process)
        whole[process] = dataclasses.replace(base, writer=writer, slot="", arrays={name: records})
    return tuple(whole[process] for process in range(count))


def _intact_sidecars(item: Place, name: str, like: Manifest) -> dict[int, Manifest]:
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


def _uncovered(name: str, leaf: LeafRecord, whole: Sequence[Manifest], sources: Sources) -> tuple[BoxRecord, ...]:
    """The cells of a leaf that no intact sidecar covers, with the digests of their bytes. Raises `CannotMendError`."""
    box = Box.whole(leaf.shape)
    covered = _boxes(whole, name, leaf)
    if missing_elements(box, _boxes(sources.manifests, name, leaf)):  # before a shape that nobody holds is cut up
        raise CannotMendError(f"leaf {name}:{leaf.name} is not all elsewhere on this host")
    missing = [cell for cell in cells_of(box, leaf.cell) if missing_elements(cell, covered)]
    return tuple(
        BoxRecord(box=cell, offset=-1, digests=(digest_of(block.reshape(-1).view(np.uint8)),))
        for cell in missing
        for block in [sources.cell(name, leaf, cell, None)]
    )


def _boxes(manifests: Sequence[Manifest], name: str, leaf: LeafRecord) -> list[Box]:
    leaves = [each for manifest in manifests for each in manifest.arrays.get(name, ()) if each.path == leaf.path]
    return [record.box for each in leaves for record in each.boxes]


def small_files(place: Place, sidecars: Sidecars) -> dict[str, bytes]:
    """The files of a step that its sidecars make: the sidecars, the JSON items as Orbax's files of them, and small
    files of handlers; by key."""
    manifests = next(iter(sidecars.values()))
    found = {
        f"{name}/{json_name_in(place.below(name).names()) or 'metadata'}": json.dumps(stored["value"]).encode()
        for name, stored in manifests[0].inline.items()
        if stored["kind"] == "json"
    }
    for manifest in reversed(manifests):  # of a name that several processes have written: the first one's
        for name, stored in manifest.inline.items():
            if stored["kind"] == FILES:
                found |= {f"{name}/{file}": data for file, data in files_in(stored).items()}
    for item, own in sidecars.items():
        for manifest in own:
            key = f"{item}/{paths.SIDECAR_DIR}/{paths.sidecar_name(manifest.writer.process)}"
            found[key] = manifest.to_bytes()
    return found


def proven_cells(
    name: str, manifests: Sequence[Manifest], sources: Sources
) -> Iterator[tuple[LeafRecord, Box, np.ndarray]]:
    """Every cell that the sidecars of an item describe, with its elements. Raises `CannotMendError`."""
    for manifest in manifests:
        for each in digested_cells(manifest):
            if each.item == name:
                yield each.leaf, each.cell, sources.cell(name, each.leaf, each.cell, each.digest)
