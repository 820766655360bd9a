"""The other places of a save's bytes: slots in every tier of this host, its durable step, other processes' tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from ckptkit.durable.lifecycle.places import Place
from ckptkit.durable.read_step import DurableReader
from ckptkit.errors import CorruptCheckpointError, PeerUnreachableError
from ckptkit.inspection.shares import Share
from ckptkit.model.boxes import Box, missing_elements
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId
from ckptkit.peers.client import PeerClient
from ckptkit.slots.reader import SlotReader, within
from ckptkit.verification.pool import MEMORY_BYTES_MAX

Read = Callable[[str, LeafRecord, BoxRecord, Box, np.ndarray], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairSource:
    """One place that holds boxes of a save; `read` proves what it gives."""

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


def durable_sources(step_url: str, step: int) -> list[RepairSource]:
    """The shares of every process in a durable step; none where its sidecars are damaged, or not ours."""
    reader = DurableReader(step_url, step=step)
    try:
        return [RepairSource(name=step_url, manifest=manifest, read=reader.read) for manifest in reader.manifests()]
    except (CorruptCheckpointError, FileNotFoundError):
        return []


def intact_sources(place: Place, step: int, manifests: Iterable[Manifest]) -> list[RepairSource]:
    """The shares of a durable step of which only these sidecars are whole."""
    reader = DurableReader(place.url, step=step)
    return [RepairSource(name=place.url, manifest=manifest, read=reader.read) for manifest in manifests]


def peer_sources(client: PeerClient, save_id: SaveId, holders: Iterable[tuple[int, int]]) -> Iterator[RepairSource]:
    """Shares of a save in other processes' tiers, each asked for when its turn comes; `holders` are (process, share).

    A source that no longer has it, or does not answer, is skipped.
    """
    for process, share in holders:
        if not client.serves(process):
            continue
        try:
            manifest, tag = client.manifest(process, save_id, share)
        except (CorruptCheckpointError, PeerUnreachableError):
            continue
        yield RepairSource(
            name=f"process {process}", manifest=manifest, read=client.reader(process, save_id, share, tag)
        )


@final
class Sources:
    """All places of one save. `used` names those that gave bytes. A cell above `bytes_max` is in none of them.

    `more` are taken one by one, as far as they are needed.
    """

    def __init__(
        self, sources: Iterable[RepairSource], bytes_max: int = MEMORY_BYTES_MAX, *, more: Iterable[RepairSource] = ()
    ):
        self._bytes_max = bytes_max
        self._sources = list(sources)
        self._more = iter(more)
        self.used: dict[str, int] = {}  # bytes by name

    @property
    def manifests(self) -> list[Manifest]:
        """The records of the save in each place."""
        return [source.manifest for source in self._sources]

    def rebuild(self, item: str, leaf: LeafRecord, cell: Box, digest: str | None) -> np.ndarray | None:
        """The elements of a cell whose digest is `digest`, from whatever places hold parts of it; None if none do.

        Every part is proven where it is read, and the whole against `digest`, where that is known: what is returned
        is bit-exact.
        """
        block = self._rebuilt(item, leaf, cell, digest)
        while block is None and (another := next(self._more, None)) is not None:
            self._sources.append(another)
            if _parts(another, item, leaf, cell):
                block = self._rebuilt(item, leaf, cell, digest)
        return block

    def _rebuilt(self, item: str, leaf: LeafRecord, cell: Box, digest: str | None) -> np.ndarray | None:
        parts = [part for source in self._sources for part, _, _ in _parts(source, item, leaf, cell)]
        # Before anything is allocated for it.
        too_large = cell.size * leaf.itemsize > self._bytes_max
        if too_large or missing_elements(cell, parts) or (not cell.shape and not parts):
            return None
        block, held = np.empty(cell.shape, np.dtype(leaf.dtype)), list[Box]()
        given: dict[str, int] = {}
        for source in self._sources:
            for common, theirs, record in _parts(source, item, leaf, cell):
                if not missing_elements(common, held):
                    continue
                part = np.empty(common.shape, block.dtype)
                try:
                    source.read(item, theirs, record, common, part)
                except (CorruptCheckpointError, PeerUnreachableError, FileNotFoundError):  # the next place is tried
                    continue
                block[common.slices(cell.start)] = part
                held.append(common)
                given[source.name] = given.get(source.name, 0) + part.nbytes
        if missing_elements(cell, held):
            return None
        if digest is not None and digest_of(block.reshape(-1).view(np.uint8)) != digest:
            return None
        for name, given_bytes in given.items():
            self.used[name] = self.used.get(name, 0) + given_bytes
        return block


def _parts(source: RepairSource, item: str, leaf: LeafRecord, cell: Box) -> list[tuple[Box, LeafRecord, BoxRecord]]:
    theirs = next((each for each in source.manifest.arrays.get(item, ()) if each.path == leaf.path), None)
    if theirs is None or (theirs.shape, theirs.dtype) != (leaf.shape, leaf.dtype):
        return []
    meets = [(record.box.intersect(cell), theirs, record) for record in theirs.boxes]
    if not leaf.shape:  # a scalar's box has no extent to intersect
        return [(record.box, theirs, record) for record in theirs.boxes]
    return [(common, theirs, record) for common, theirs, record in meets if common is not None]
