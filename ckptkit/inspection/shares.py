"""What our own records say: manifests of fast-tier slots, and the sidecars of durable items."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CorruptCheckpointError, StoreError
from ckptkit.inspection.places import Place, readable, require_regular
from ckptkit.inspection.records import Item, LeafInfo
from ckptkit.inspection.words import dtype_name, sharding_words
from ckptkit.model import paths
from ckptkit.model.manifest import LeafRecord, Manifest, ManifestDepth
from ckptkit.slots.latest_pointer import lost_newest
from ckptkit.slots.reader import read_manifest

_READ_THREADS = 8


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
    shares, damaged = [], []
    for name in _listed(directory):
        if paths.save_of_manifest(name) is None:
            continue
        try:
            shares.append(read_share(directory / name))
        except FileNotFoundError:
            continue
        except CorruptCheckpointError as error:
            damaged.append(error)
    if (lost := lost_newest(directory, [share.manifest.save_id for share in shares])) is not None:
        damaged.append(lost)
    return sorted(shares, key=lambda share: share.manifest.save_id, reverse=True), damaged


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


def read_sidecars(item: Place, processes: Iterable[int], *, extent: ManifestDepth = "all") -> list[Manifest]:
    """The sidecars of these processes in a durable item, as far as `extent` of them; raises `CorruptCheckpointError`
    for a damaged one."""
    directory = item.below(paths.SIDECAR_DIR)

    def read(process: int) -> Manifest:
        name = paths.sidecar_name(process)
        data = directory.read(name)
        where = f"{directory.url}/{name}"
        if data is None:
            raise CorruptCheckpointError(f"{where} is gone", path=where)
        with readable(where):
            return Manifest.from_bytes(data, path=where, extent=extent)

    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="ckptkit-inspect") as pool:
        return list(pool.map(read, processes))


def sidecar_processes(item: Place) -> list[int]:
    """The processes whose sidecars are in a durable item; none in one that stock Orbax wrote."""
    if f"{paths.SIDECAR_DIR}/" not in item.names():
        return []
    names = item.below(paths.SIDECAR_DIR).names()
    return sorted(process for name in names if (process := paths.process_of_sidecar(name)) is not None)


def own_processes(item: Place, first: Manifest, present: Sequence[int]) -> list[int]:
    """Those of `present` whose sidecars may be of the save of `first`, the sidecar of one of them.

    A run of more processes that was fenced off, and goes on, may put a sidecar into a bucket late, under a number for
    which the step's save has no process. Cost: a read for each number beyond that. Raises `CorruptCheckpointError`.
    """
    beyond = [process for process in present if process >= first.writer.count]
    late = {
        process
        for process, manifest in zip(beyond, read_sidecars(item, beyond, extent="head"), strict=True)
        if manifest.save_id != first.save_id
    }
    return [process for process in present if process not in late]


def incomplete(item: Place, manifests: Sequence[Manifest], present: Sequence[int]) -> str | None:
    """Why the sidecars of an item do not prove it; None where they do."""
    saves = sorted({str(manifest.save_id) for manifest in manifests})
    expected = list(range(manifests[0].writer.count))
    if list(present) != expected or len(saves) > 1:
        return (
            f"{item.url} has sidecars of processes {_ranges(present)} and saves {', '.join(saves)}, expected "
            f"processes {_ranges(expected)} and one save"
        )
    return None


def leaf_of_record(record: LeafRecord, *, held: bool) -> LeafInfo:
    """A leaf as one process recorded it; raises `CorruptCheckpointError` for a sharding that nobody writes."""
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
        for name, leaves in manifest.arrays.items()
    ]
    inline = [
        Item(name=name, kind="grain" if stored["kind"] == "grain" else "json", layout="inline", value=stored["value"])
        for name, stored in manifest.inline.items()
        if name not in manifest.arrays  # else its empty nodes
    ]
    return (*arrays, *inline)


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"{directory}: {error.strerror}; look at its permissions", path=str(directory)) from error


def _ranges(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:8]))
    return f"{shown} and {len(processes) - 8} more" if len(processes) > 8 else shown or "none"
