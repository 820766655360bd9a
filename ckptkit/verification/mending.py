"""A damaged copy of a save is made whole from the other copies, or put aside. It is never deleted.

A slot is mended in place, because a fast tier has no room for a second one: a cell is still damaged, or has the bytes
of its digest. A durable step is written anew below `_ckptkit` and verified. The damaged step is put aside, then the new
files take its place: data under new names, the trees that name it, then the records. No storage changes two objects in
one step, so every state in between is the damaged step, a less damaged one, or the repaired one.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import final

import numpy as np

from ckptkit.durable.cells.writer import CellStream
from ckptkit.durable.lifecycle.delete import remove_step
from ckptkit.durable.lifecycle.places import Place
from ckptkit.errors import StoreError
from ckptkit.inspection.shares import Share, read_shares
from ckptkit.model import paths
from ckptkit.model.boxes import Box
from ckptkit.model.cells import cell_ranges, digested_cells
from ckptkit.model.digests import digest_of
from ckptkit.model.handler_files import is_file, with_file_leaves
from ckptkit.model.manifest import LeafRecord, SaveId, merged_leaves
from ckptkit.slots.files import file_bytes
from ckptkit.slots.latest_pointer import forget_newest
from ckptkit.slots.reader import manifest_name_of
from ckptkit.store import PutMode, Store, open_store
from ckptkit.store.local import make_directory, sync_directory, sync_tree
from ckptkit.store.quarantine import QUARANTINE_DIR, arena_lock, move_aside
from ckptkit.util.clock import wall_s
from ckptkit.util.disk_file import open_slot, write_all
from ckptkit.verification.durable import identity_of, prove_step
from ckptkit.verification.pool import Limits
from ckptkit.verification.slots import ShareProof, prove_share
from ckptkit.verification.sources import CannotMendError, Sidecars, Sources, proven_cells, sidecars_for, small_files

_HELD = "a running process holds its directory, which will replace it"
_SUPERSEDED = "it was superseded meanwhile"
_REPLACED = "it was pruned or replaced meanwhile"
_QUARANTINE = f"{paths.SIDECAR_DIR}/{QUARANTINE_DIR}"
_PREFIX = "repair-"  # of a new copy's directory; then when it began, in seconds since 1970, and a name of its own
_DEAD_AFTER_S = 86400.0  # a repair writes one step once; no clocks are so far apart
_COMMIT_BYTES = 256 << 20  # held in memory before they are written: a commit of its own for every cell is slow


@final
@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A slot's manifest that is damaged or missing. The place of its bytes is unknown, so the slot is free."""

    path: Path

    def mend(self, sources: Sources, *, writes: bool) -> str | None:
        """As of `RootStep`. Raises `CannotMendError`: no copy has the place of the bytes."""
        del sources, writes
        there = os.path.lexists(self.path)
        raise CannotMendError("its manifest is damaged" if there else "its manifest is missing: its slot is free")

    def put_aside(self) -> str | None:
        """As of `RootStep`; a missing one is no longer expected."""
        with arena_lock(self.path.parent) as held:
            if not held:
                return _HELD
            save = paths.save_of_manifest(self.path.name)
            missed = save is not None and forget_newest(self.path.parent, SaveId(save[1], save[0], save[2]))
            if os.path.lexists(self.path):
                move_aside(self.path, self.path.parent / QUARANTINE_DIR, self.path.name)
            elif not missed:
                return _SUPERSEDED
        return None


@final
@dataclass(frozen=True, slots=True)
class SlotShare:
    """One process's share in a slot. It is changed only while nobody holds its directory and its manifest is the one
    that was read. A repair leaves the manifest: whatever stops it, no cell is trusted that does not match."""

    proof: ShareProof
    limits: Limits

    @property
    def _share(self) -> Share:
        return self.proof.share

    def mend(self, sources: Sources, *, writes: bool) -> str | None:
        """As of `RootStep`: rewrites the damaged cells, and syncs them before the share is verified again."""
        blocks = (
            (offset, sources.cell(item, leaf, cell, digest)) for item, leaf, cell, offset, digest in self._cells()
        )
        if not writes:
            for _ in blocks:
                pass
            return None
        with arena_lock(self._share.directory) as held:
            if (left := self._why_left(held)) is not None:
                return left
            if (newer := self._newer()) is not None:
                raise CannotMendError(f"its slot holds save {newer} now")
            self._write(blocks)
            found = prove_share(self._share, self.limits).findings
        if found:
            raise CannotMendError(f"it is still damaged: {found[0]}")
        return None

    def put_aside(self) -> str | None:
        """As of `RootStep`: the manifest, then the slot."""
        directory, save_id = self._share.directory, self._share.manifest.save_id
        with arena_lock(directory) as held:
            if (left := self._why_left(held)) is not None:
                return left
            name, slot = manifest_name_of(save_id), directory / self._share.manifest.slot
            is_taken = self._newer() is not None
            forget_newest(directory, save_id)
            move_aside(directory / name, directory / QUARANTINE_DIR, name)
            if not is_taken and os.path.lexists(slot):
                move_aside(slot, directory / QUARANTINE_DIR, f"{name.removesuffix('.json')}.{slot.name}")
        return None

    def _cells(self) -> Iterator[tuple[str, LeafRecord, Box, int, str]]:
        """The cells that the findings name, or all of them if the slot itself is damaged: item, leaf, cell, where it
        begins in the slot, digest. Raises `CannotMendError` for a cell without a place."""
        named = {(finding.item, finding.leaf, finding.box) for finding in self.proof.findings}
        everything = any(finding.leaf is None for finding in self.proof.findings)
        for item, leaf, record, cell, start, _, digest in digested_cells(self._share.manifest):
            if everything or (item, leaf.name, cell) in named:
                if record.offset < 0:
                    raise CannotMendError(f"its manifest does not give the place of leaf {item}:{leaf.name}")
                yield item, leaf, cell, record.offset + start, digest

    def _why_left(self, held: bool | None) -> str | None:
        """Why it must not be touched, by whether its directory's lock is held."""
        if not held:
            return _HELD
        is_there = any(each.manifest == self._share.manifest for each in read_shares(self._share.directory)[0])
        return None if is_there else _SUPERSEDED

    def _newer(self) -> SaveId | None:
        """A newer save whose manifest names the same slot: then the bytes are that one's."""
        own = self._share.manifest
        manifests = [each.manifest for each in read_shares(self._share.directory)[0]]
        saves = [each.save_id for each in manifests if each.slot == own.slot and each.save_id > own.save_id]
        return max(saves, default=None)

    def _write(self, blocks: Iterator[tuple[int, np.ndarray]]) -> None:
        fd = open_slot(self._share.directory / self._share.manifest.slot)
        try:
            for offset, block in blocks:
                write_all(fd, block.reshape(-1).view(np.uint8), offset)
            os.posix_fallocate(fd, 0, file_bytes(os.fstat(fd).st_size))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self._share.directory)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RootStep:
    """A durable step in the root at `root`. `before` tells it from one that takes its place: a step that was pruned or
    replaced since is left."""

    root: str
    place: Place
    step: int
    before: object
    limits: Limits
    timeout_s: float

    def mend(self, sources: Sources, *, writes: bool) -> str | None:
        """Makes it whole; None, or why it was left. Raises `CannotMendError` if `sources` lack bytes of it. Without
        `writes`, only looks whether they have all.

        The damaged step stays in the quarantine. An object of a bucket is replaced only if it is still the one that was
        read. If this is interrupted, the next repair completes it. Cost: the whole step is written once more, and
        copied within a bucket.
        """
        sidecars = sidecars_for(self.place, sources)
        if not writes:
            for name, manifests in sidecars.items():
                for _ in proven_cells(name, manifests, sources):
                    pass
            return None
        store, name = open_store(self.root), self.place.name
        work = f"{paths.SIDECAR_DIR}/{_PREFIX}{wall_s():.0f}-{uuid.uuid4().hex}"
        generations = {key.removeprefix(f"{name}/"): each.generation for key, each in store.stat_all(name).items()}
        try:
            anew = self._write(store, f"{work}/{name}", sidecars, sources)
            self._require_whole(Place.open(f"{self.root}/{work}/{name}", timeout_s=self.timeout_s))
            if not self._is_same():
                return _REPLACED
            _copy_aside(store, name)
            keys = sorted(anew, key=lambda key: _order_of(key, sidecars))
            obsolete = [key for key in generations if _is_tree(key, sidecars) and key not in anew]
            if store.properties.file_system:
                return _rename_over(Path(self.root), name, work, keys, obsolete, sidecars)
            return _copy_over(store, name, work, keys, obsolete, generations)
        except FileNotFoundError:
            if self.place.again().names():
                raise
            return "it was pruned meanwhile"
        finally:
            with suppress(StoreError):
                _remove(store, work)

    def put_aside(self) -> str | None:
        """Moves it into the quarantine: in one rename, or copied whole and then deleted, its mark first. None, or why
        it was left."""
        if self.before == ([], None):  # a step that a running job is deleting looks like this at its end
            return "there is nothing in it to keep"
        if not self._is_same():
            return _REPLACED
        if not self.place.store.properties.atomic_rename:
            _copy_aside(open_store(self.root), self.place.name)
            return None if remove_step(self.place.url, lambda _: None, self._is_same) else _REPLACED
        try:
            move_aside(Path(self.place.url), Path(self.root) / _QUARANTINE, self.place.name)
        except FileNotFoundError:
            if os.path.isdir(self.place.url):
                raise
            return "it was pruned meanwhile"
        return None

    def _is_same(self) -> bool:
        return identity_of(self.place.again()) == self.before

    def _require_whole(self, copy: Place) -> None:
        proof = next(iter(prove_step(copy, self.step, self.limits, [], timeout_s=self.timeout_s)), None)
        if proof is None or proof.findings:
            raise CannotMendError(f"it cannot be made whole: {proof.findings[0] if proof else 'it is gone'}")

    def _write(self, store: Store, target: str, sidecars: Sidecars, sources: Sources) -> set[str]:
        """Writes the step as it was saved, below the prefix `target`: arrays and small items from verified cells and
        records, the rest unchanged. Returns the keys of what may differ from the damaged step."""
        files = small_files(self.place, sidecars)
        large_files = _large_files(sidecars)
        ways = {str(way) for key in (*sidecars, *files, *large_files) for way in (Path(key), *Path(key).parents)}

        def wanted(key: str) -> bool:  # a link on the way to a new file would lead the write to another file
            return not _is_tree(key, sidecars) and not (key in ways and self.place.is_link(key))

        _copy(store, self.place.name, target, wanted)
        for item, manifests in sidecars.items():
            writer = CellStream(f"{store.url}/{target}/{item}", _COMMIT_BYTES)
            for leaf in merged_leaves(manifests, item):
                writer.create(leaf)
            for leaf, cell, block in proven_cells(item, manifests, sources):
                writer.write(leaf, cell, block)
            writer.finish()
        for key, data in files.items():
            store.put(f"{target}/{key}", data)
        large = set[str]()
        if store.properties.file_system:
            for key, (name, leaf) in large_files.items():
                _mend_file(Path(store.url, target, key), name, leaf, sources)
            large = set(large_files)
            sync_tree(Path(store.url, target))
        trees = [key.removeprefix(f"{target}/") for key in store.list_all(target)]
        return {*files, *large, *(key for key in trees if _is_tree(key, sidecars))}


def clean_repairs(root: str) -> None:
    """Removes the copies that repairs left which began more than a day ago and died.

    Not every storage has a lock that ends with its holder. A repair that still lives would stop with an error, and
    the next one completes it. Cost: one listing. Raises `StoreError`, OSError.
    """
    store = open_store(root)
    for name in store.list(paths.SIDECAR_DIR):
        began, _, own_name = name.removeprefix(_PREFIX).partition("-")
        is_repair = name.startswith(_PREFIX) and name.endswith("/") and own_name and began.isdecimal()
        if is_repair and wall_s() - int(began) > _DEAD_AFTER_S:
            _remove(store, f"{paths.SIDECAR_DIR}/{name.rstrip('/')}")


def _remove(store: Store, work: str) -> None:
    if store.properties.file_system:
        shutil.rmtree(f"{store.url}/{work}", ignore_errors=True)
    else:
        store.delete_many(store.list_all(work))


def _copy_aside(store: Store, name: str) -> None:
    """Copies every object of a step into the quarantine, next to earlier copies; on a disk as second names of the
    files, because none of them is written to."""
    on_disk = store.properties.file_system
    if on_disk:
        make_directory(Path(store.url, _QUARANTINE), synced=True, mode=0o700)
    taken = {each.rstrip("/") for each in store.list(_QUARANTINE)}
    numbered = (f"{name}.{number}" if number else name for number in range(len(taken) + 1))
    target = f"{_QUARANTINE}/{next(each for each in numbered if each not in taken)}"
    _copy(store, name, target, lambda key: True, _link if on_disk else None)
    if on_disk:
        sync_tree(Path(store.url, target))


def _copy(
    store: Store,
    name: str,
    target: str,
    wanted: Callable[[str], bool],
    copy_file: Callable[[str, str], None] | None = None,
) -> None:
    """Copies the objects of a step whose keys are wanted below another prefix; on a disk links and empty directories
    too."""
    if not store.properties.file_system:
        for key in store.list_all(name):
            if wanted(key.removeprefix(f"{name}/")):
                with suppress(FileNotFoundError):  # deleted meanwhile, which is found later
                    store.copy(key, f"{target}{key.removeprefix(name)}")
        return
    source = Path(store.url, name)

    def left_out(directory: str, names: list[str]) -> list[str]:
        return [each for each in names if not wanted(os.path.relpath(os.path.join(directory, each), source))]

    shutil.copytree(
        source, Path(store.url, target), symlinks=True, ignore=left_out, copy_function=copy_file or shutil.copy2
    )


def _link(source: str, target: str) -> None:
    """A second name of a file; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _rename_over(
    root: Path, name: str, work: str, keys: Sequence[str], obsolete: Sequence[str], sidecars: Sidecars
) -> str | None:
    """Moves new files over those of a step on a file system, in the order of `keys`, and removes the obsolete ones.
    None, or why not.

    They go through a descriptor of the step's directory: in one that a job has renamed or removed, they do no harm.
    """
    step = root / name
    fd = os.open(step, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _, phase in groupby(keys, key=lambda key: _order_of(key, sidecars)[0]):
            for key in phase:
                _make_way(key, fd)
                os.replace(root / work / name / key, key, dst_dir_fd=fd)
            sync_tree(step)
        for key in obsolete:
            with suppress(FileNotFoundError, IsADirectoryError):  # that now has a directory's name
                os.unlink(key, dir_fd=fd)
        return None if os.path.samestat(os.fstat(fd), step.stat()) else _REPLACED
    finally:
        os.close(fd)


def _make_way(key: str, step_fd: int) -> None:
    """Makes the directories of a file. Removes a file with the name of one, and a directory with the name of the file:
    the quarantine has both."""
    for above in reversed(Path(key).parents[:-1]):
        if not _is_directory(str(above), step_fd):
            with suppress(FileNotFoundError):
                os.unlink(above, dir_fd=step_fd)
            os.mkdir(above, dir_fd=step_fd)
    if _is_directory(key, step_fd):
        shutil.rmtree(key, dir_fd=step_fd)


def _is_directory(key: str, step_fd: int) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(key, dir_fd=step_fd).st_mode)
    except FileNotFoundError:
        return False


def _copy_over(
    store: Store,
    name: str,
    work: str,
    keys: Sequence[str],
    obsolete: Sequence[str],
    generations: Mapping[str, int | None],
) -> str | None:
    """Copies new objects over those of a step in a bucket, in the order of `keys`, and deletes the obsolete ones. None,
    or why not."""
    for key in keys:
        mode: PutMode = "replace" if key in generations else "create"
        source, target = f"{work}/{name}/{key}", f"{name}/{key}"
        try:
            store.copy(source, target, mode=mode, replaces=generations.get(key))
        except FileExistsError:
            if store.get(target) != store.get(source):  # else the answer of the first copy was lost
                return _REPLACED
    store.delete_many([f"{name}/{key}" for key in obsolete])
    return None


def _large_files(sidecars: Sidecars) -> dict[str, tuple[str, LeafRecord]]:
    """The large files of handlers in a step, by key: the item of each, and its leaf."""
    found = dict[str, tuple[str, LeafRecord]]()
    for manifest in with_file_leaves(next(iter(sidecars.values()))):
        for name, leaves in manifest.arrays.items():
            for leaf in filter(is_file, leaves):
                found.setdefault(f"{name}/{leaf.path[1]}", (name, leaf))  # the first process's
    return found


def _mend_file(path: Path, name: str, leaf: LeafRecord, sources: Sources) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        for record in leaf.boxes:
            for (cell, start, stop), digest in zip(cell_ranges(record, leaf), record.digests, strict=True):
                file.seek(start)
                if digest_of(file.read(stop - start)) != digest:
                    file.seek(start)
                    file.write(sources.cell(name, leaf, cell, digest).tobytes())
        file.truncate(leaf.shape[0])


def _order_of(key: str, sidecars: Sidecars) -> tuple[int, str]:
    """Data, the trees that name it, then the records that prove it."""
    if not _is_tree(key, sidecars):
        return 2, key
    return (1 if key.endswith(f"/{paths.OCDBT_MANIFEST}") else 0), key


def _is_tree(key: str, sidecars: Sidecars) -> bool:
    """Whether an object is part of an item's OCDBT tree, or of one that a process wrote of it."""
    item, _, rest = key.partition("/")
    part = rest.partition("/")[0]
    return item in sidecars and (part in ("d", paths.OCDBT_MANIFEST) or part.startswith("ocdbt.process_"))
