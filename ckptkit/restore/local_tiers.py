"""The saves in this host's fast tiers, from any writer, and the way a restore reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from ckptkit.durable.cells.reader import Wanted
from ckptkit.errors import CheckpointError, CorruptCheckpointError, NewerFormatError, PeerUnreachableError, Reason
from ckptkit.events import EventLog, Kind
from ckptkit.model.boxes import Box
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId
from ckptkit.model.tiers import SSD
from ckptkit.restore.inventory import Held, box_set_hash, part_of
from ckptkit.restore.plan import Source
from ckptkit.restore.read import BoxReader
from ckptkit.slots.reader import ManifestCache, SlotReader, read_manifests, readable_slot_directories, within
from ckptkit.util.words import repair_command


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSave:
    """A save as this host's fast tiers hold it: by tier, the slot directories with their manifests."""

    save_id: SaveId
    held: Mapping[str, Sequence[tuple[Path, Manifest]]]

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All manifests of the save on this host."""
        return tuple(manifest for pairs in self.held.values() for _, manifest in pairs)

    def report(self, rank: tuple[int, int], refusal: Reason | None = None, *, linked: bool = True) -> Held:
        """The report of the save by this process, the `rank`-th on its host.

        `linked`: processes read each other's tiers. Otherwise the hashes are left out: they cost 3 us per leaf of every
        save.
        """
        mine = {
            manifest.writer.process: box_set_hash(manifest) if linked else ""
            for pairs in self.held.values()
            for directory, manifest in pairs
            if part_of(directory.name, *rank)
        }
        return Held(
            save_id=self.save_id,
            count=max(manifest.writer.count for manifest in self.manifests),
            shares=tuple(sorted(mine.items())),
            tiers=tuple(self.held),
            refusal=refusal,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Sources of one save in order of cost, and how the boxes of each are read."""

    sources: tuple[Source, ...]
    readers: tuple[BoxReader, ...]
    expect: Callable[[Sequence[Wanted]], None] | None = None  # of the last source: gets what will be read from it
    unproven: tuple[str, ...] = ()  # items of the durable step that no manifest describes: only Orbax reads them

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Every manifest of every source."""
        return tuple(manifest for source in self.sources for manifest in source.manifests)


class LocalTiers:
    """The slot directories of this host's own id; no other host's are opened. Safe from several threads."""

    def __init__(self, host_dirs: Mapping[str, Path], events: EventLog):
        self._host_dirs = host_dirs
        self._events = events
        self._manifests = ManifestCache()
        self._reported: set[str] = set()  # since the last look
        self.refused: str | None = None  # what cannot be read, at the last look, and what to do: it is not absent
        self.newer: str | None = None  # what a newer version wrote, at the last look: it cannot be read either
        self.damaged = 0  # manifests, at the last look: what they recorded is not known

    def repair_command(self, url: str) -> str:
        """The command that repairs what these tiers and the durable root at `url` hold, from copies that are intact."""
        host_dirs = self._host_dirs.values()
        return repair_command(url, [each.parents[1] for each in host_dirs], {each.name for each in host_dirs})

    def saves(self) -> dict[SaveId, LocalSave]:
        """Every save with a readable manifest on this host. Damage is reported in events."""
        found: dict[SaveId, dict[str, list[tuple[Path, Manifest]]]] = {}
        self.refused, self.newer, self.damaged = None, None, 0
        self._reported.clear()
        for tier, host_dir in self._host_dirs.items():
            pairs, damaged = self._read(readable_slot_directories(host_dir))
            self.damaged += len(damaged)
            for error in damaged:
                self._events.emit(Kind.REJECTED, step=error.step, tier=tier, reason=str(error))
                self._note_refusal(error.__cause__, str(error))
            for directory, manifest in pairs:
                found.setdefault(manifest.save_id, {}).setdefault(tier, []).append((directory, manifest))
        self._manifests.keep_only(pair for tiers in found.values() for pairs in tiers.values() for pair in pairs)
        return {save: LocalSave(save_id=save, held=tiers) for save, tiers in found.items()}

    def _read(self, directories: Sequence[Path]) -> tuple[list[tuple[Path, Manifest]], list[CorruptCheckpointError]]:
        """As `read_manifests`. A newer version's directory is refused: other hosts may have none, and would wait."""
        found: list[tuple[Path, Manifest]] = []
        damaged: list[CorruptCheckpointError] = []
        for directory in directories:
            try:
                pairs, errors = read_manifests([directory], self._manifests)
            except NewerFormatError as error:
                self.newer = self.refused = self.newer or str(error)
                continue
            found += pairs
            damaged += errors
        return found, damaged

    def holdings(self, save: LocalSave | None) -> Holdings:
        """One source per slot directory, so that a reader knows the place of a record's bytes; tiers in their order.

        Of several shares in a tier, one more source joins them, because a box may lie in parts of several. The last
        source joins all tiers; what it reads counts as read from the slowest one.
        """
        every: list[tuple[Source, BoxReader]] = []
        single: list[tuple[Source, BoxReader]] = []
        for tier, held in (save.held if save is not None else {}).items():
            pairs = [pair for place, manifest in held if (pair := self._opened(tier, place, manifest))]
            every += _with_joined(pairs, tier)
            single += pairs
        if len({source.tier for source, _ in single}) > 1 and _writers(single) > 1:
            every.append(together(single, single[-1][0].tier))
        return Holdings(sources=tuple(source for source, _ in every), readers=tuple(reader for _, reader in every))

    def _opened(self, tier: str, directory: Path, manifest: Manifest) -> tuple[Source, BoxReader] | None:
        """The boxes of one slot; None, with an event, if the slot is missing."""
        step = manifest.save_id.step
        try:
            slot = SlotReader(directory, manifest, on_disk=tier == SSD)
        except (OSError, ValueError) as error:  # the slot is missing or empty: try the next source
            self._report(step, tier, str(error))
            self._note_refusal(error, f"slot {directory / manifest.slot}: {error}")
            return None
        inside = within(manifest, slot.size_bytes)
        if inside != manifest:
            reason = f"slot {directory / manifest.slot} has {slot.size_bytes} bytes, and boxes beyond its end"
            self._report(step, tier, reason)
        return Source(tier=tier, manifests=(inside,)), slot

    def _report(self, step: int, tier: str, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            self._events.emit(Kind.REJECTED, step=step, tier=tier, reason=reason)

    def _note_refusal(self, error: BaseException | None, text: str) -> None:
        if isinstance(error, PermissionError):
            self.refused = self.refused or f"{text}: give this user access, or remove it"


def _with_joined(pairs: list[tuple[Source, BoxReader]], tier: str) -> list[tuple[Source, BoxReader]]:
    return [*pairs, together(pairs, tier)] if _writers(pairs) > 1 else pairs


def _writers(pairs: Sequence[tuple[Source, BoxReader]]) -> int:
    return len({source.manifests[0].writer for source, _ in pairs})


def together(pairs: Sequence[tuple[Source, BoxReader]], tier: str, *, remote: bool = False) -> tuple[Source, BoxReader]:
    """Several sources as one, that covers what they cover together; what it reads counts as read from `tier`.

    If several hold a box, the first one that verifies is returned. If none verifies and one did not answer, that one is
    the error: its copy may be intact.
    """
    by_box: dict[tuple[str, tuple[str, ...], Box], list[tuple[LeafRecord, BoxRecord, BoxReader, str, int]]] = {}
    for source, reader in pairs:
        for manifest in source.manifests:
            for item, leaves in manifest.arrays.items():
                for leaf in leaves:
                    for record in leaf.boxes:
                        found = by_box.setdefault((item, leaf.path, record.box), [])
                        found.append((leaf, record, reader, source.tier, manifest.writer.process))
    for found in by_box.values():
        if len(found) > 1 and found[0][0].kind != "jax":  # of values in host memory, the lowest process's come first
            found.sort(key=itemgetter(4))

    def read(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        failed: CheckpointError | None = None
        for theirs, stored, reader, owner, _ in by_box[item, leaf.path, record.box]:
            try:
                return reader(item, theirs, stored, wanted, into)
            except (CorruptCheckpointError, PeerUnreachableError) as error:
                error.tier = error.tier or owner
                failed = failed if isinstance(failed, PeerUnreachableError) else error
        assert failed is not None, "a box is of some source"
        raise failed

    manifests = tuple(manifest for source, _ in pairs for manifest in source.manifests)
    return Source(tier=tier, manifests=manifests, remote=remote), read
