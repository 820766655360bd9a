"""What this host's fast tiers hold, whoever wrote it, and how a restore reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptCheckpointError
from ckptkit.events import EventLog, Kind
from ckptkit.manifest import Manifest, SaveId
from ckptkit.plan import Source
from ckptkit.reading import BoxReader
from ckptkit.slot_reader import ManifestCache, SlotReader, read_manifests, slot_directories


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSave:
    """A save as this host's fast tiers hold it: by tier, the slot directories with their manifests."""

    save_id: SaveId
    held: Mapping[str, tuple[tuple[Path, Manifest], ...]]

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All manifests of the save on this host."""
        return tuple(manifest for pairs in self.held.values() for _, manifest in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Sources of one save in order of cost, and how the boxes of each are read."""

    sources: tuple[Source, ...]
    readers: tuple[BoxReader, ...]

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

    def saves(self) -> dict[SaveId, LocalSave]:
        """Every save of which a readable manifest stands here. What is damaged is said in events."""
        found: dict[SaveId, dict[str, list[tuple[Path, Manifest]]]] = {}
        for tier, host_dir in self._host_dirs.items():
            pairs, damaged = read_manifests(slot_directories(host_dir), self._manifests)
            for error in damaged:
                self._events.emit(Kind.REJECTED, tier=tier, reason=str(error))
            for directory, manifest in pairs:
                found.setdefault(manifest.save_id, {}).setdefault(tier, []).append((directory, manifest))
        self._manifests.keep_only(pair for tiers in found.values() for pairs in tiers.values() for pair in pairs)
        return {
            save: LocalSave(save_id=save, held={tier: tuple(pairs) for tier, pairs in tiers.items()})
            for save, tiers in found.items()
        }

    def holdings(self, save: LocalSave | None) -> Holdings:
        """One source per slot directory, so that a reader knows where a record's bytes stand."""
        sources: list[Source] = []
        readers: list[BoxReader] = []
        for tier, pairs in (save.held if save is not None else {}).items():
            for directory, manifest in pairs:
                try:
                    readers.append(_slot_reader(directory, manifest))
                except (OSError, ValueError) as error:  # the slot is gone or empty: the next source is taken
                    self._events.emit(Kind.REJECTED, step=manifest.save_id.step, tier=tier, reason=str(error))
                    continue
                sources.append(Source(tier=tier, manifests=(manifest,)))
        return Holdings(sources=tuple(sources), readers=tuple(readers))


def _slot_reader(directory: Path, manifest: Manifest) -> BoxReader:
    slot = SlotReader(directory, manifest)

    def read(item: str, leaf: Any, record: Any, wanted: Any, into: Any) -> None:
        del item
        try:
            slot.read(leaf, record, wanted, into)
        except CorruptCheckpointError as error:
            if slot.gone():  # reused for a newer save in the meantime: not damage
                message = f"{directory}: save {manifest.save_id} was superseded while it was read"
                raise CorruptCheckpointError(message, path=str(directory)) from error
            raise

    return read
