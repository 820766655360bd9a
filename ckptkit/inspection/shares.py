"""Reads the shares in slots of fast tiers for people, and describes the leaves that records name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptkit.durable.lifecycle.places import Place, readable, require_regular
from ckptkit.durable.sidecars import split_sidecars
from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.inspection.records import Item
from ckptkit.model import paths
from ckptkit.model.leaf_info import LeafInfo, dtype_name, sharding_words
from ckptkit.model.manifest import LeafRecord, Manifest
from ckptkit.slots.reader import manifest_name_of, read_manifest, read_manifests

_SMALL_KINDS: Mapping[str, Literal["grain", "other"]] = {"grain": "grain", "files": "other"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One process's manifest in a fast tier's slot directory."""

    directory: Path
    manifest: Manifest
    committed_at_s: float


def read_shares(directory: Path) -> tuple[list[Share], list[CorruptCheckpointError]]:
    """The committed saves of one slot directory, newest first, and what is damaged. Takes no lock.

    A manifest that goes while it is read was superseded, and is left out.
    """
    found, damaged = read_manifests([directory])
    for cause in (error.__cause__ for error in damaged):
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError):
            raise StoreError(f"{cause.filename}: {cause.strerror}; look at its permissions", path=str(directory))
    shares: list[Share] = []
    for _, manifest in found:
        with suppress(FileNotFoundError):
            committed_at_s = (directory / manifest_name_of(manifest.save_id)).stat().st_mtime
            shares.append(Share(directory=directory, manifest=manifest, committed_at_s=committed_at_s))
    return shares, [error for error in damaged if not isinstance(error.__cause__, OSError)]


def read_share(path: Path) -> Share:
    """One manifest file; raises `CorruptCheckpointError`, `FileNotFoundError`, `StoreError`."""
    try:
        require_regular(str(path))
        with readable(str(path)):
            manifest = read_manifest(path)
        return Share(directory=path.parent, manifest=manifest, committed_at_s=path.stat().st_mtime)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; look at its permissions", path=str(path)) from error


def joined_problems(item: Place, sidecars: Sequence[Manifest]) -> list[str]:
    """Why restores cannot use the joined record of an item with these `sidecars`; empty if they can, or it has none.

    Cost: a read of the record.
    """
    directory, _, name = paths.JOINED_SIDECARS.rpartition("/")
    data = item.below(directory).read(name) if f"{directory}/" in item.names() else None
    where = f"{item.url}/{paths.JOINED_SIDECARS}"
    found = list[Manifest]()
    with suppress(ValueError, CorruptCheckpointError):
        found = [Manifest.from_bytes(text, path=where, extent="head") for text in split_sidecars(data or b"")]
    described = [[(each.save_id, each.writer.process) for each in some] for some in (found, sidecars)]
    if data is None or described[0] == described[1]:
        return []
    return [f"{where} is damaged, or of another save: each process of a restore reads every sidecar"]


def leaf_of_record(record: LeafRecord, *, held: bool) -> LeafInfo:
    """A leaf as one process recorded it; raises `CorruptCheckpointError` for a sharding that no writer writes."""
    text = record.extra.get("sharding")
    try:
        dtype, sharding = dtype_name(record.dtype), None if text is None else sharding_words(text)
    except Exception:
        with readable(f"leaf {record.name}"):  # only now: a name for each of 100,000 leaves is a tenth of a second
            raise
    return LeafInfo(
        path=record.path,
        kind=record.kind,
        dtype=dtype,
        shape=record.shape,
        cell=record.cell,
        sharding=sharding,
        key_impl=record.extra.get("key_impl"),
        held_bytes=record.held_bytes if held else None,
    )


def items_of_manifest(manifest: Manifest) -> tuple[Item, ...]:
    """The items of one process's share in a slot, the small ones with their values."""
    arrays = [
        Item(
            name=name,
            kind="arrays",
            layout=f"slot {manifest.slot}" if manifest.slot else "sidecar",
            leaves=tuple(leaf_of_record(leaf, held=True) for leaf in leaves),
        )
        for name, leaves in manifest.trees.items()
    ]
    inline = [
        Item(name=name, kind=_SMALL_KINDS.get(stored["kind"], "json"), layout="inline", value=stored["value"])
        for name, stored in manifest.inline.items()
        if name not in manifest.trees  # else its empty nodes
    ]
    return (*arrays, *inline)
