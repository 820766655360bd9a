"""The files of a handler that are too large for a manifest: leaves in a slot, files of their own in a durable step.

In a slot's manifest such an item has a leaf for each file: its path is the process that wrote it, and the file's. A
sidecar of a durable step keeps their digests inline, as another item's sidecars are the only ones there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.errors import CorruptCheckpointError
from ckptkit.model.manifest import FILES, BoxRecord, LeafRecord, Manifest
from ckptkit.model.manifest_checks import FILE_DIGESTS, boxes_within, check_held, check_leaf

_IS_FILE = "file"  # in `LeafRecord.extra`


def is_file(leaf: LeafRecord) -> bool:
    """Whether the bytes of a leaf are a file of a durable step."""
    return _IS_FILE in leaf.extra


def with_file_digests(manifest: Manifest) -> Manifest:
    """The manifest of a slot with the digests of its files inline, for the sidecars of a durable step."""
    found = {name: leaves for name, leaves in manifest.arrays.items() if name not in manifest.trees}
    if not found:
        return manifest
    inline = {
        name: {
            **manifest.inline[name],
            FILE_DIGESTS: {leaf.path[1]: [leaf.shape[0], leaf.cell[0], leaf.boxes[0].digests] for leaf in leaves},
        }
        for name, leaves in found.items()
    }
    return replace(manifest, inline={**manifest.inline, **inline})


def with_file_leaves(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The sidecars of a step, and for each process that has such files a manifest with their leaves.

    Raises `CorruptCheckpointError` for digests that `with_file_digests` does not write.
    """
    by_writer = {manifest.writer.process: manifest for manifest in manifests}
    found = [replace(each, arrays=leaves) for each in by_writer.values() if (leaves := _leaves(each))]
    return [*manifests, *found]


def _leaves(manifest: Manifest) -> dict[str, tuple[LeafRecord, ...]]:
    process = manifest.writer.process
    try:
        return {
            name: tuple(_leaf(process, path, *record) for path, record in sorted(stored[FILE_DIGESTS].items()))
            for name, stored in manifest.inline.items()
            if stored["kind"] == FILES and FILE_DIGESTS in stored
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"save {manifest.save_id}: digests of files cannot be read: {error}") from error


def _leaf(process: int, path: str, size: int, cell: int, digests: Any) -> LeafRecord:
    extra: Mapping[str, str] = {_IS_FILE: "yes"}
    check_leaf((str(process), path), "dd", "numpy", "uint8", ((size,), (cell,)), dict(extra))
    ((box, cells),) = boxes_within((size,), (cell,), (((0,), (size,)),))
    check_held(cells, -1, digests)
    boxes = (BoxRecord(box=box, offset=-1, digests=tuple(digests)),)
    return LeafRecord(
        path=(str(process), path),
        keys="dd",
        kind="numpy",
        shape=(size,),
        dtype="uint8",
        cell=(cell,),
        extra=extra,
        boxes=boxes,
    )
