"""Reads slot directories of any writer: manifests, and the verified bytes of the slots that they name."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import xxhash

from ckptkit.errors import CorruptCheckpointError
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.cells import DigestedCell, copy_proven, digested_cells
from ckptkit.model.digests import COPY_PIECE_BYTES, digest_of
from ckptkit.model.manifest import MANIFEST_BYTES_MAX, BoxRecord, LeafRecord, Manifest, SaveId
from ckptkit.slots.latest_pointer import lost_newest
from ckptkit.util.disk_file import FileReads
from ckptkit.util.gc_pause import collection_paused
from ckptkit.util.sharing import share_items

PIECE_BYTES = 1 << 20  # of a slot's file that is digested: read at a time, into memory that is used again
_RUN_WASTE_MAX = 2  # what a run may copy, over what it was asked for: boxes begin at pages


def manifest_name_of(save_id: SaveId) -> str:
    """The file name of the manifest of a save."""
    return paths.manifest_name(save_id.step, save_id.epoch, save_id.number)


def slot_directories(host_dir: Path) -> list[Path]:
    """The slot directories of this host's processes; no other host's directory is opened.

    Raises OSError where they may not be read: they are not absent.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(Path(entry.path) for entry in os.scandir(host_dir) if entry.is_dir(follow_symlinks=False))
    return []


def readable_slot_directories(host_dir: Path) -> list[Path]:
    """The same for a job: none where they may not be read, and the host holds nothing then."""
    with suppress(OSError):
        return slot_directories(host_dir)
    return []


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`; raises `CorruptCheckpointError` where it is damaged or implausibly large."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CorruptCheckpointError(f"manifest {path} is not a regular file", path=str(path))
    if path.stat().st_size > MANIFEST_BYTES_MAX:
        raise CorruptCheckpointError(f"manifest {path} is larger than {MANIFEST_BYTES_MAX} bytes", path=str(path))
    with collection_paused():  # half of the time otherwise: a manifest is many objects that all stay
        manifest = Manifest.from_bytes(path.read_bytes(), path=str(path))
    if paths.slot_index(manifest.slot) is None or manifest_name_of(manifest.save_id) != path.name:
        raise CorruptCheckpointError(
            f"manifest {path} names slot {manifest.slot!r} and save {manifest.save_id}", path=str(path)
        )
    return manifest


class ManifestCache:
    """Manifests that were read before, by their file: one that is renamed into place never changes.

    Cost of one that is known: a `stat`, against 25 microseconds per leaf. Safe from several threads.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], Manifest]] = {}

    def read(self, path: Path) -> Manifest:
        """The result or error of `read_manifest`."""
        status = path.lstat()
        identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        known = self._known.get(path)
        if known is None or known[0] != identity:
            self._known[path] = known = (identity, read_manifest(path))
        return known[1]

    def keep_only(self, found: Iterable[tuple[Path, Manifest]]) -> None:
        """Forgets all but the manifests that were found now, each with its directory."""
        known_paths = {directory / manifest_name_of(manifest.save_id) for directory, manifest in found}
        self._known = {path: known for path, known in list(self._known.items()) if path in known_paths}


def read_manifests(
    directories: Iterable[Path], cache: ManifestCache | None = None
) -> tuple[list[tuple[Path, Manifest]], list[CorruptCheckpointError]]:
    """Every readable manifest with its directory, newest first, and the errors of those that are not.

    The cause of an error is the `OSError`, where it was one.
    """
    cache = cache or ManifestCache()
    found: list[tuple[Path, Manifest]] = []
    damaged: list[CorruptCheckpointError] = []
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError as error:
            damaged.append(_unreadable(f"slot directory {directory}", error, directory))
            continue
        mine: list[SaveId] = []
        for name in names:
            if paths.save_of_manifest(name) is None:
                continue
            try:
                found.append((directory, cache.read(directory / name)))
                mine.append(found[-1][1].save_id)
            except FileNotFoundError:  # superseded between the listing and the read
                continue
            except OSError as error:
                damaged.append(_unreadable(f"manifest {directory / name}", error, directory))
            except CorruptCheckpointError as error:
                damaged.append(error)
        if (lost := lost_newest(directory, mine)) is not None:
            damaged.append(lost)
    return sorted(found, key=lambda pair: pair[1].save_id, reverse=True), damaged


def _unreadable(what: str, error: OSError, directory: Path) -> CorruptCheckpointError:
    found = CorruptCheckpointError(f"{what}: {error}", path=str(directory))
    found.__cause__ = error
    return found


@contextmanager
def opened_slot(path: Path) -> Iterator[int]:
    """A descriptor of a slot's file, past the page cache where that is clean: what a disk holds now is verified.

    Raises `CorruptCheckpointError` where it is missing or not a regular file, OSError where it may not be read.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CorruptCheckpointError(f"{path} is not a regular file, as every slot is", path=str(path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{path} is missing: the manifest names bytes that do not exist") from error
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield fd
    finally:
        os.close(fd)


class DamagedCell(NamedTuple):
    """A cell that does not have the bytes of its digest. `found`: the digest of those it has; None if it cannot be
    read."""

    cell: DigestedCell
    problem: str
    found: str | None = None


def damaged_cells(
    path: Path,
    manifest: Manifest,
    threads: int,
    *,
    piece_bytes: int = PIECE_BYTES,
    read: Callable[[DigestedCell], None] = lambda cell: None,
) -> list[DamagedCell]:
    """Reads every cell of a slot at `path`, and returns those that are damaged, in the order of the manifest.

    Memory: `piece_bytes` for each thread. `read` is called with each cell, by one thread at a time. Raises what
    `opened_slot` raises.
    """
    found: dict[int, DamagedCell] = {}
    lock = threading.Lock()

    def look(numbered: tuple[int, DigestedCell]) -> None:
        number, cell = numbered
        damage = _damage(fd, cell, path, piece_bytes)
        with lock:
            found.update({} if damage is None else {number: damage})
            read(cell)

    with opened_slot(path) as fd:
        share_items(enumerate(digested_cells(manifest)), look, threads)
    return [found[number] for number in sorted(found)]


def _damage(fd: int, cell: DigestedCell, path: Path, piece_bytes: int) -> DamagedCell | None:
    offset = cell.record.offset
    if offset < 0:
        return DamagedCell(cell, "the manifest does not give the place of its bytes")
    try:
        digest = digest_of_range(fd, offset + cell.start, offset + cell.stop, path, piece_bytes)
    except CorruptCheckpointError as error:
        return DamagedCell(cell, str(error))
    return None if digest == cell.digest else DamagedCell(cell, "the bytes are not those that were saved", digest)


def digest_of_range(fd: int, start: int, stop: int, path: Path, piece_bytes: int = PIECE_BYTES) -> str:
    """The digest of a part of a file; by reads, because a mapping of a file that is cut short kills the process."""
    state, at = xxhash.xxh3_128(), start
    piece = bytearray(min(piece_bytes, stop - start))
    while at < stop:
        view = memoryview(piece)[: min(len(piece), stop - at)]
        try:
            read_bytes = os.preadv(fd, [view], at)
        except OSError as error:  # a bad sector: the bytes are lost
            raise CorruptCheckpointError(f"{path} cannot be read at byte {at}: {error.strerror}") from error
        if not read_bytes:
            raise CorruptCheckpointError(f"{path} ends at byte {at}, the cell at byte {stop}", path=str(path))
        state.update(view[:read_bytes])
        at += read_bytes
    return state.hexdigest()


def within(manifest: Manifest, size_bytes: int) -> Manifest:
    """The manifest with the boxes that lie in a slot of `size_bytes`: nothing is allocated for the others."""
    if _all_within(manifest, size_bytes):
        return manifest

    def cut(leaf: LeafRecord) -> LeafRecord:
        itemsize = leaf.itemsize
        inside = tuple([r for r in leaf.boxes if r.offset + r.box.size * itemsize <= size_bytes])
        return leaf if len(inside) == len(leaf.boxes) else replace(leaf, boxes=inside)

    return replace(manifest, arrays={item: tuple(map(cut, leaves)) for item, leaves in manifest.arrays.items()})


def _all_within(manifest: Manifest, size_bytes: int) -> bool:
    """Whether all boxes lie in a slot of that size. They share no byte of it, so those that begin last end last."""
    leaves = [leaf for leaves in manifest.arrays.values() for leaf in leaves]
    offsets = [record.offset for leaf in leaves for record in leaf.boxes]
    first, last = min(offsets, default=0), max(offsets, default=0)
    ends = [last + r.box.size * leaf.itemsize for leaf in leaves for r in leaf.boxes if r.offset == last]
    return first >= 0 and max(ends, default=0) <= size_bytes


def _mapped(path: Path) -> np.ndarray:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # no link, no pipe
    try:
        mapping = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        mapping.madvise(mmap.MADV_SEQUENTIAL)  # as in `map_file`
        return np.frombuffer(mapping, np.uint8)
    finally:
        os.close(fd)


@final
class SlotReader:
    """Reads boxes of one committed manifest, in this process or another; never an alias of the slot's memory.

    Manifest, bytes, manifest again: `gone()` tells whether the slot has been reused since. Then a mismatch means
    superseded, not corrupt.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, on_disk: bool = False):
        """`on_disk`: read as a file, past the page cache; otherwise it is mapped."""
        self._save_id = manifest.save_id
        self._manifest_path = directory / manifest_name_of(manifest.save_id)
        self._path = directory / manifest.slot
        self._reads = FileReads(self._path) if on_disk else None
        self._memory = np.empty(0, np.uint8) if on_disk else _mapped(self._path)
        self.size_bytes = self._reads.size_bytes if self._reads is not None else self._memory.nbytes  # of the file

    def __call__(self, item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        """As `read`; if the slot was reused meanwhile, the error names that, and not damage."""
        del item
        try:
            self.read(leaf, record, wanted, into)
        except CorruptCheckpointError as error:
            if not self.gone():
                raise
            directory = self._path.parent
            raise CorruptCheckpointError(
                f"{directory}: save {self._save_id} was superseded while it was read", path=str(directory)
            ) from error

    def read(self, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        """Copies the part of `wanted` that `record.box` holds into `into`; raises `CorruptCheckpointError`."""

        def fetch(cell: Box, start: int, stop: int, target: np.ndarray) -> np.ndarray:
            del cell
            start, stop = record.offset + start, record.offset + stop
            if stop > self.size_bytes:
                raise CorruptCheckpointError(
                    f"{self._path} has {self.size_bytes} bytes, leaf {leaf.name} ends at {stop}",
                    path=str(self._path),
                )
            if self._reads is None:
                return self._memory[start:stop]
            try:
                self._reads.fill(target, start)
            except (OSError, EOFError) as error:
                raise CorruptCheckpointError(
                    f"{self._path}: leaf {leaf.name} cannot be read: {error}", path=str(self._path)
                ) from error
            return target

        copy_proven(leaf, record, wanted, into, fetch, where=str(self._path))

    def read_run(
        self, boxes: Sequence[tuple[LeafRecord, BoxRecord]], fresh: Callable[[int], np.ndarray]
    ) -> list[np.ndarray | None]:
        """Whole boxes of one cell each by one copy of the stretch that they lie in: 5 microseconds a box, against 20.

        The arrays share the memory of the copy, which `fresh` gives, and each was compared with its digest there. None
        for a box that does not match, and for all of them where this way does not serve: a file, boxes far apart.
        """
        forms: dict[tuple[int, str], tuple[int, tuple[int, ...], np.dtype]] = {}  # leaves of one form share the box
        about: list[tuple[int, tuple[int, ...], np.dtype]] = []  # of each box: bytes, shape, dtype
        for leaf, record in boxes:
            box = record.box
            if (form := forms.get((id(box), leaf.dtype))) is None:
                form = (box.size * leaf.itemsize, box.shape, np.dtype(leaf.dtype))
                forms[id(box), leaf.dtype] = form
            about.append(form)
        offsets, sizes = [record.offset for _, record in boxes], [nbytes for nbytes, _, _ in about]
        start, stop, wanted = min(offsets), max(map(add, offsets, sizes)), sum(sizes)
        if self._reads is not None or stop > self.size_bytes or stop - start > _RUN_WASTE_MAX * wanted:
            return [None] * len(boxes)
        memory, copied = fresh(stop - start), start
        view = memory.data
        found: list[np.ndarray | None] = []
        for (_, record), (nbytes, shape, dtype) in zip(boxes, about, strict=True):
            at, end = record.offset - start, record.offset + nbytes
            if end > copied:
                upto = min(max(end, copied + COPY_PIECE_BYTES), stop)
                memory[copied - start : upto - start] = self._memory[copied:upto]
                copied = upto
            whole = digest_of(view[at : at + nbytes]) == record.digests[0]
            found.append(np.ndarray(shape, dtype, memory, at) if whole else None)
        return found

    def gone(self) -> bool:
        """Whether the manifest is no longer there: the slot may hold a newer save by now."""
        return not self._manifest_path.exists()
