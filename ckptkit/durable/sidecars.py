"""Which save a durable step is: its marker, the sidecars that belong to it, and whether they are all there.

A sidecar is one process's manifest of one item. Each reader has its own way to list and read them. The rules are these,
and nothing here touches a disk. An item of several processes has a joined record too, with all of its sidecars: a job
of 1,000 processes would else read a million of them at each start.
"""

from __future__ import annotations

import json
import re
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import Manifest, SaveId, custom_digest
from ckptkit.util.words import first_of

_JOINED_BYTES_MAX = 1 << 30  # as of one manifest
_JOINED_TIMES_MAX = 64  # the bytes of the packed record: digests take most of it, and do not pack
_JOINED_SMALL_BYTES = 64 << 20  # may be packed into fewer: sidecars of replicas are nearly the same
_MARKED = re.compile(r"\(ckptkit save ((\d+ \d+ \d+(?: [0-9a-f]{16} [0-9a-f]{16})?) [0-9a-f]{32}) ([0-9a-f]{32})\)$")


def marker_text(where: str, save_id: SaveId | None = None) -> str:
    """`commit_success.txt`: Orbax's words, and of a step of ours the save's identity, which Orbax ignores.

    No two of our steps have an equal one, so that a put whose answer was lost can distinguish its own marker from
    another writer's.
    """
    words = f"Checkpoint commit was successful to {where}"
    if save_id is None:
        return words
    names = f" {save_id.run} {save_id.root}" if save_id.run and save_id.root else ""
    identity = f"{save_id.epoch} {save_id.step} {save_id.number}{names} {uuid.uuid4().hex}"
    return f"{words} (ckptkit save {identity} {digest_of(identity.encode())})"


def marked_save(mark: bytes) -> SaveId | None:
    """The identity in a step's marker; None where there is none, or a damaged one."""
    match = _MARKED.search(mark.decode(errors="replace"))
    if match is None or digest_of(match[1].encode()) != match[3]:
        return None
    return SaveId.from_list(match[2].split())


def sidecars_among(names: Iterable[str]) -> list[int]:
    """The processes whose sidecars these names in an item's sidecar directory are, ascending."""
    return sorted(process for name in names if (process := paths.process_of_sidecar(name)) is not None)


def written_sidecar(read: Callable[[str], bytes], place: str, item: str, process: int) -> bytes:
    """The sidecar that a process has reported as written, read by `read(name)` below `place`. Raises `CheckpointError`
    if it is not there: that process writes to another disk under the same path."""
    try:
        return read(f"{item}/{paths.SIDECAR_DIR}/{paths.sidecar_name(process)}")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"process {process} has written its part of item {item}, which process 0 does not find in {place}: "
            "give a durable root that every process sees"
        ) from error


def join_sidecars(sidecars: Iterable[bytes]) -> bytes | None:
    """The joined record of an item: its sidecars in the order of their processes, a line for each, compressed. None if
    they have more bytes together than readers unpack: a reader holds all of them."""
    packer, packed, size_bytes = zlib.compressobj(1), list[bytes](), 0
    for sidecar in sidecars:
        size_bytes += len(sidecar) + 1
        if size_bytes > _JOINED_BYTES_MAX:
            return None
        packed.append(packer.compress(sidecar + b"\n"))
    record = b"".join([*packed, packer.flush()])
    return record if size_bytes <= _unpacked_bytes_max(record) else None


def split_sidecars(record: bytes) -> list[bytes]:
    """The sidecars of a joined record. Raises ValueError if it is damaged; each sidecar has a digest of its own."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(record, _unpacked_bytes_max(record))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError("it is cut off, or too large")
    return text.split(b"\n")[:-1]


def _unpacked_bytes_max(record: bytes) -> int:
    """The most bytes of sidecars in a joined record, for writers and readers: zeros pack into a thousandth."""
    return min(_JOINED_BYTES_MAX, max(_JOINED_SMALL_BYTES, _JOINED_TIMES_MAX * len(record)))


def has_sidecar_sign(array_metadatas: bytes) -> bool:
    """Whether a file of an item's `array_metadatas` records that the item has sidecars; False if it is damaged."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return json.loads(array_metadatas)[paths.SIDECAR_SIGN] is True
    return False


def lost_sidecars(where: str) -> str:
    """The message about an item of ckptkit that has lost its sidecars."""
    return f"{where} has lost its sidecars, without which it cannot be verified"


def missing_items(where: str, named: Iterable[str], items: Iterable[str]) -> str | None:
    """Why a step of ours is damaged: Orbax's description of it names items that it does not have. None where all are
    there. A step of stock Orbax may lack items: its newer API deletes them."""
    missing = sorted(set(named) - {*items, ""})
    return f"{where}: item {', '.join(missing)} is missing" if missing else None


def of_one_save(found: Mapping[int, Manifest], marked: Callable[[], SaveId | None]) -> dict[int, Manifest]:
    """`found`, an item's sidecars by the number in their names, without those that another run added late.

    A run of more processes that was fenced off, and continues, may put a sidecar into a bucket under a number for which
    the step's save has no process. The step's marker distinguishes them: `marked` reads it, where it is needed.
    """
    if len({manifest.save_id for manifest in found.values()}) < 2:
        return dict(found)
    named = marked()
    return {n: manifest for n, manifest in found.items() if manifest.save_id == named} or dict(found)


def require_custom(metadata: object, expected: str | None, *, where: str, step: int | None = None) -> None:
    """Raises `CorruptCheckpointError` where the custom metadata of a step is not what was saved. `expected` is the
    digest in its sidecars: None in those of earlier versions, which have none."""
    if expected is not None and (found := custom_digest(metadata)) != expected:
        raise CorruptCheckpointError(
            f"{where}: custom_metadata in {paths.STEP_METADATA} is not what was saved (digest {found}, expected "
            f"{expected})",
            path=where,
            step=step,
        )


def under_name(manifest: Manifest, item: str) -> Manifest:
    """The sidecar of a tree that was saved by itself, for the directory name that the tree has today. Users rename
    such directories. Any other sidecar is returned as it is: an item of a step keeps its name."""
    if manifest.save_id.epoch > 0 or len(manifest.arrays) != 1 or item in manifest.arrays:
        return manifest
    (name,) = manifest.arrays
    inline = {item if each == name else each: value for each, value in manifest.inline.items()}
    return replace(manifest, arrays={item: manifest.arrays[name]}, inline=inline)


def wrong_step(where: str, found: SaveId, step: int) -> str | None:
    """Why a sidecar at `where` does not belong to `step`; None where it does."""
    return None if found.step == step else f"{where} has sidecars of step {found.step}, found in step {step}"


def incomplete(
    where: str, present: Collection[int], found: Mapping[int, Manifest], *, item: str | None = None
) -> str | None:
    """Why the sidecars of an item at `where` are not a whole record of it; None where they are.

    `present` are the numbers in their names, without late ones (`of_one_save`), and `found` those that were read, at
    least one. With `item` each has to hold the arrays of that item.
    """
    saves = sorted({str(manifest.save_id) for manifest in found.values()})
    expected = range(found[min(found)].writer.count)  # a hostile count may be any: never made a list
    if len(saves) > 1 or len(present) != len(expected) or any(process not in expected for process in present):
        return (
            f"{where} has sidecars of processes {first_of(sorted(present), 8) or 'none'} and saves {', '.join(saves)}, "
            f"expected processes {first_of(expected, 8) or 'none'} and one save"
        )
    for process, manifest in found.items():
        if item is not None and item not in manifest.arrays:
            return f"{where} has sidecars of item {', '.join(manifest.arrays)}"
        if manifest.writer.process != process:
            return f"{where}: the sidecar of process {process} names process {manifest.writer.process} as its writer"
    return None


def several_saves(where: str, saves: Iterable[SaveId]) -> str | None:
    """Why items of these saves are not one step; None where it is the same save."""
    distinct = sorted({str(save) for save in saves})
    return f"{where} has items of saves {', '.join(distinct)}" if len(distinct) > 1 else None
