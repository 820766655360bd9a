"""The files of a handler, as the processes of a save wrote them: put together again for the handler to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.errors import UnsuitedSaveError
from ckptkit.model.manifest import FILES, LeafRecord, Manifest, merged_leaves
from ckptkit.snapshot.small_items import files_in
from ckptkit.util.words import count_text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFiles:
    """An item's files by their paths below it: small ones with their bytes, large ones as leaves that are read."""

    handler: str
    small: Mapping[str, bytes]
    large: Mapping[str, LeafRecord]


def is_of_files(manifests: Sequence[Manifest], item: str) -> bool:
    """Whether a handler has written an item."""
    return any(manifest.inline.get(item, {}).get("kind") == FILES for manifest in manifests)


def stored_files(manifests: Sequence[Manifest], item: str) -> StoredFiles:
    """The files of an item from all processes. If several have written a path, the first one's file is taken.

    Raises `UnsuitedSaveError` where the files of a process are in none of the manifests: the handler may need them.
    """
    by_writer: dict[int, Manifest] = {}
    for manifest in manifests:
        if item in manifest.inline:
            by_writer.setdefault(manifest.writer.process, manifest)
    count = manifests[0].writer.count
    missing = [process for process in range(count) if process not in by_writer]
    if missing:
        raise UnsuitedSaveError(
            f"item {item!r} is of files of {count_text(count, 'process', 'processes')}, and no process that can be "
            f"reached holds those of process {', '.join(map(str, missing[:8]))}; keep copies on other hosts (Tier.peer)"
        )
    leaves = {leaf.path: leaf for leaf in merged_leaves(manifests, item)}
    small: dict[str, bytes] = {}
    large: dict[str, LeafRecord] = {}
    for process in sorted(by_writer):
        own = {path[1]: leaf for path, leaf in leaves.items() if path[0] == str(process)}
        for path, data in files_in(by_writer[process].inline[item]).items():
            if path not in large:
                small.setdefault(path, data)
        for path, leaf in own.items():
            if path not in small:
                large.setdefault(path, leaf)
    handler = by_writer[min(by_writer)].inline[item].get("handler", "")
    return StoredFiles(handler=handler, small=small, large=large)
