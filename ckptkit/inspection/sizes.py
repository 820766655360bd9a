"""How many bytes are below a directory, and which of its files have another name too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from ckptkit.durable.lifecycle.places import Place
from ckptkit.errors import store_error


def stored_bytes(place: Place) -> int:
    """Bytes of everything below a directory. Cost: as of `sizes_below`."""
    return sum(sizes_below(place).values())


def sizes_below(place: Place) -> dict[str, int]:
    """The bytes of every object below a directory, by the path from there. Cost: on a disk one listing per directory,
    where links are not followed; in a bucket one listing."""
    if place.store.properties.file_system:
        return {os.path.relpath(path, place.url): found.st_size for path, found in local_files(place.url)}
    start = len(f"{place.prefix}/") if place.prefix else 0
    return {key[start:]: found.size_bytes for key, found in place.store.stat_all(place.prefix).items()}


def linked_bytes(place: Place) -> dict[str, int]:
    """The bytes of every file below a directory that has another name too, by the file's own number. Cost: as of
    `sizes_below`.

    Empty in a bucket: every object has bytes of its own.
    """
    if not place.store.properties.file_system:
        return {}
    return {f"{at.st_dev}:{at.st_ino}": at.st_size for _, at in local_files(place.url) if at.st_nlink > 1}


def local_files(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below a local path, with its facts. Links are not followed. Raises `StoreError`."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # pruned while it was counted
            raise store_error(error, error.filename or path) from error

    for directory, _, names in os.walk(path, onerror=fail):
        for name in names:
            whole = os.path.join(directory, name)
            with suppress(FileNotFoundError):
                yield whole, os.lstat(whole)
