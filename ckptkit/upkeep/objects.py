"""Objects from one store to another, in parts of a few MiB, each with the digest of what was read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from ckptkit.errors import CheckpointError, StoreError
from ckptkit.formats.ranges import open_ranges
from ckptkit.store.remote import RemoteStore
from ckptkit.store.retry import retried
from ckptkit.store.schemes import properties_of

PART_BYTES = 8 << 20  # held of each object that is on its way
_TRIES = 4  # of an object at least, where the store fails in a way that may pass: a large one takes long


def copy_object(source: str, target: str) -> tuple[int, str]:
    """Copies one object; gives its bytes and the digest (xxh3-128) of what was read. What is at the target is replaced.

    Holds at most two parts. Nothing is synced. Raises `StepNotFoundError` where the source is gone, `StoreError`.
    """

    def attempt() -> tuple[int, str]:
        digest = xxhash.xxh3_128()
        size = _write(target, _read(source, digest))
        return size, digest.hexdigest()

    return retried(attempt, tries_min=_TRIES)


def digest_of_object(url: str) -> tuple[int, str]:
    """The bytes and the digest of an object, read in parts. Raises what `copy_object` does."""

    def attempt() -> tuple[int, str]:
        digest = xxhash.xxh3_128()
        return sum(len(part) for part in _read(url, digest)), digest.hexdigest()

    return retried(attempt, tries_min=_TRIES)


def _read(url: str, digest: xxhash.xxh3_128) -> Iterator[bytes]:
    ranges = open_ranges(url)
    try:
        for start in range(0, ranges.size, PART_BYTES):
            part = ranges.read(start, min(PART_BYTES, ranges.size - start))
            digest.update(part)
            yield part
    finally:
        ranges.close()


def _write(url: str, parts: Iterator[bytes]) -> int:
    written = 0

    def counted() -> Iterator[bytes]:
        nonlocal written
        for part in parts:
            written += len(part)
            yield part

    if not properties_of(url).file_system:
        directory, _, name = url.rpartition("/")
        RemoteStore(directory).put_parts(name, counted())
        return written
    try:
        Path(url).parent.mkdir(parents=True, exist_ok=True)
        with open(url, "wb") as file:
            for part in counted():
                file.write(part)
    except CheckpointError:  # of the source
        raise
    except OSError as error:
        raise StoreError(f"{error.filename or url}: {error.strerror}", path=os.fspath(url)) from error
    return written
