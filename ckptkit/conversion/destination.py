"""Where a conversion puts its output. On a disk: next to the target, renamed at the end. In a bucket: in place, with
the marker last. Until then the target is not a checkpoint, and interrupted work can be resumed.

Only what the journal names, or what has the work's number in its name, is ever deleted."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from ckptkit.conversion.journal import Journal, Noted, foreign
from ckptkit.durable.cells.tensorstore_wait import require_usable
from ckptkit.durable.lifecycle.places import Place, place_around
from ckptkit.errors import CheckpointError, CorruptCheckpointError
from ckptkit.formats.safetensors import INDEX
from ckptkit.model import paths
from ckptkit.model.digests import digest_of
from ckptkit.store import Stat, Store, open_store, put_new
from ckptkit.store.backends import BACKENDS, backend_of, properties_of
from ckptkit.store.local import (
    LocalStore,
    remove_empty,
    remove_unfinished_puts,
    require_free,
    sync_above,
    sync_directory,
    sync_tree,
)
from ckptkit.store.quarantine import alone_at
from ckptkit.store.remote import RemoteStore
from ckptkit.store.roots import root_url

_LOCK = ".ckptkit-lock"
_BATCH_BYTES = 32 << 20  # of small files that are noted together


def target_url(target: str) -> str:
    """The target's one name. Raises `CheckpointError` if the target exists, or cannot be made."""
    if not properties_of(target).file_system:
        return root_url(target)  # a listing finds out whether it is free when the work begins
    target = _path_of(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already; name another target, or move it away", path=target)
    if not os.path.isdir(os.path.dirname(target)):
        raise CheckpointError(f"{os.path.dirname(target)} is not a directory; make it first", path=target)
    return target


def _path_of(target: str) -> str:
    path = os.path.abspath(target.removeprefix("file://"))
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def forget_finished(target: str) -> None:
    """Deletes the records that a work has left which was killed after it had made `target`, a file or a directory.

    For commands that write: a plan deletes nothing. Cost: a look."""
    if properties_of(target).file_system and os.path.lexists(path := _path_of(target)):
        Destination(path).drop_finished()


def require_outside(target: str, sources: Iterable[str], *, timeout_s: float = 20.0) -> None:
    """Raises `CheckpointError` for a target, as `target_url` gives it, below a source: the work would change what it
    reads. Also for one in any other step, item, slot directory or `_ckptkit`: it would change what is committed."""
    for source in map(root_url, sources):
        if target.startswith(f"{source.rstrip('/')}/"):
            raise CheckpointError(
                f"{target} is inside {source}, which is read; name a place outside of it", path=target
            )
    if (other := place_around(Place.open(target, timeout_s=timeout_s), timeout_s=timeout_s)) is not None:
        raise CheckpointError(f"{target} cannot be written: {other.words}; name a place outside of it", path=target)


def require_orbax_target(url: str) -> None:
    """Raises `CheckpointError` for a place where Orbax's checkpoints can be neither written nor read."""
    if backend_of(url).driver is None:
        buckets = [f"{name}://" for name, each in BACKENDS.items() if each.driver and not each.properties.file_system]
        raise CheckpointError(f"{url}: Orbax's checkpoints are written to disks, {' and '.join(buckets)}", path=url)
    require_usable(url)


class SourceChangedError(CheckpointError):
    """The data that was read is not one checkpoint, so the output made from it is useless."""


def require_unchanged(known_by: str, now: Callable[[], str], source: str) -> None:
    """Raises `SourceChangedError` if the fingerprint of a work differs from `known_by`, that of its beginning."""
    if now() != known_by:
        raise SourceChangedError(
            f"{source} was changed while it was read, and the data may be of two checkpoints. The output is deleted; "
            "start again when no process writes there",
            path=source,
        )


@final
class Destination:
    """One target while it is made. `url` is where its files go meanwhile, `part` what an interrupted work leaves."""

    def __init__(self, target: str, process: int = 0, *, timeout_s: float = 60.0):
        """`timeout_s` is how long a bucket is tried that does not answer."""
        self.target = target
        self._timeout_s = timeout_s
        self.properties = properties_of(target)
        above, _, self._name = target.rpartition("/")
        self._above = above or "/"
        self.part = f"{above}/.{self._name}.ckptkit-part"
        self.url = f"{self.part}/{self._name}" if self.properties.atomic_rename else target
        self.journal = Journal(self._opened(f"{self.part}/journal"), process)

    def store(self) -> Store:
        """The store of the target's files. On a disk, `commit` syncs them."""
        return LocalStore(self.url, durable=False) if self.properties.file_system else self._opened(self.url)

    def put(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Puts small files of the target, and notes them. Cost in a bucket: two requests more for each batch, and one
        for each file."""
        store, batch, size = self.store(), dict[str, bytes](), 0
        for key, data in files:
            batch[key] = data
            size += len(data)
            if size > _BATCH_BYTES:
                self._put(store, batch)
                batch, size = {}, 0
        self._put(store, batch)

    def clear(self) -> None:
        """Deletes what an interrupted work has written, and then its journal.

        Raises `CheckpointError`, and deletes nothing, where something else lies there; in a bucket also if the
        target is not free and has no journal.
        """
        found = self._own_files()
        self.store().delete_unchanged(found)
        self.journal.remove()
        if self.properties.file_system:
            if os.path.isfile(self.url):
                os.unlink(self.url)
            for directory in (self.url, f"{self.part}/journal"):
                remove_empty(directory)

    def require_kept(self) -> None:
        """Raises `CheckpointError` if a file that the interrupted work has noted was changed or deleted, or if other
        files are there."""
        found, noted = self._own_files(), self.journal.files()
        lost = [key for key, notes in noted.items() if _is_lost(notes[-1], found.get(key))]
        if lost:
            raise CheckpointError(
                f"{self.url}/{lost[0]} was written by the interrupted run and was deleted or changed since "
                f"({len(lost)} files in all); leave --resume out to begin anew",
                path=self.target,
            )

    def drop_finished(self) -> None:
        """Deletes the records of a work that was killed after it had made the target, which is complete. Deletes
        nothing where a process works there, or where the target is not what those records name."""
        with suppress(CheckpointError, OSError):
            if self.properties.atomic_rename:
                if os.path.isdir(self.part) and not os.path.lexists(self.url):  # it was renamed
                    with self.alone():
                        self.journal.remove()
                        self._remove_part()
                return
            if self.properties.file_system:  # a mount: the target is where the work is, and no version shows whose
                return
            self.journal.recall()
            if self.journal.work:
                found, noted = self.store().stat_all(""), self.journal.files()  # the kill may have left a part of these
                if not any(_is_lost(notes[-1], found.get(key)) for key, notes in noted.items()):
                    self.journal.remove()
                    self._remove_part()

    def require_free(self) -> None:
        """Raises `CheckpointError` if a bucket's target is a complete checkpoint by now: to clear or continue the
        interrupted work would damage it. Cost: two requests."""
        if self.properties.atomic_rename:
            return
        ends = (paths.COMMIT_MARK, INDEX)  # what is put last of a directory
        if self._opened(self._above).stat(self._name) is not None or any(
            name.endswith(ends) for name in self.store().list("")
        ):
            self.drop_finished()
            raise self._taken()

    def _opened(self, url: str) -> Store:
        return open_store(url, deadline_s=self._timeout_s)

    def _own_files(self) -> dict[str, Stat]:
        """Everything below the target; raises where something of it is not of the work that the journal names."""
        store = self.store()
        found = store.stat_all("")
        self.journal.recall()
        noted = self.journal.files() if found else {}
        strange = foreign(found, noted, self.journal.work, store.get)
        if self.properties.file_system:
            known = {_LOCK, "journal", self._name}
            strange += [f"../{name}" for name in sorted(os.listdir(self.part)) if name not in known]
        if strange and not self.journal.work and not self.properties.file_system:
            raise self._taken()
        if strange:
            raise CheckpointError(
                f"{self.url}/{strange[0]}{f' (and {len(strange) - 1} more)' * (len(strange) > 1)} was not written by "
                f"the interrupted run whose journal is in {self.part}; nothing was deleted. Name another target, or "
                "move these files away and run the command again",
                path=self.target,
            )
        return found

    def _put(self, store: Store, batch: Mapping[str, bytes]) -> None:
        if batch:
            noted = {key: Noted(size=len(data), digest=digest_of(data)) for key, data in batch.items()}
            self.journal.note(noted)
            for key, data in batch.items():
                store.put(key, data)
            self._note_versions(store, noted)

    def _note_versions(self, store: Store, noted: Mapping[str, Noted]) -> None:
        if not self.properties.file_system:
            stats = {key: store.stat(key) for key in noted}
            self.journal.note(
                {key: replace(noted[key], version=stat.version) for key, stat in stats.items() if stat is not None}
            )

    def _taken(self) -> CheckpointError:
        return CheckpointError(f"{self.target} exists already; name another target", path=self.target)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around all of the work of one process, or of the first of several: no other makes the same target meanwhile.

        Each of two processes would clear, or commit, files that the other still writes. A bucket is not locked, because
        it has no lock that ends with its holder. Raises `CheckpointError` where another process works there.
        """
        with alone_at(Path(self.part), _LOCK, self.target) if self.properties.file_system else nullcontext():
            yield

    @contextmanager
    def file(self, name: str | None) -> Iterator[Any]:
        """A file in the target, or the target itself (None), open to be written at any place.

        For a bucket it is a file in the directory for temporary files, and uploaded at the end: whole or not at all.
        """
        if self.properties.file_system:
            path = Path(self.url) if name is None else Path(self.url) / name
            path.parent.mkdir(exist_ok=True)
            if name is not None:
                self.journal.note({name: Noted(size=None)})
            with open(path, "r+b" if path.exists() else "w+b") as made:
                try:
                    yield made
                except OSError as error:
                    error.filename = error.filename or made.name  # a full disk, of which a descriptor has no name
                    raise
            return
        with tempfile.TemporaryFile() as made:  # it has no name, so nothing is left of it after a kill
            yield made
            made.flush()
            path = f"/dev/fd/{made.fileno()}"
            made.seek(0)  # where opening such a path duplicates the descriptor, readers begin there
            if name is None:
                RemoteStore(self._above).put_file(self._name, path)
                return
            noted = {name: Noted(size=os.path.getsize(path), digest=_digest_of_file(path))}
            self.journal.note(noted)
            store = RemoteStore(self.url)
            store.put_file(name, path)
            self._note_versions(store, noted)

    @contextmanager
    def kept(self, *, after_damage: bool = True) -> Iterator[None]:
        """Around the work. The error that ends it gets a note: which files are kept, and how to continue the work.

        A `SourceChangedError` keeps nothing. Nor does a `CorruptCheckpointError`, unless `after_damage`: a repaired
        source is another source, so the work on this one cannot be finished.
        """
        try:
            yield
        except BaseException as error:
            damaged = isinstance(error, CorruptCheckpointError) and not after_damage
            if damaged or isinstance(error, SourceChangedError):
                with suppress(CheckpointError, OSError):  # report the damage
                    self.clear()
                    self._remove_part()
            else:
                and_target = "" if self.properties.atomic_rename else " and the target"
                error.add_note(
                    f"the written part is kept in {self.part}{and_target}: the same command with "
                    "--resume continues it, without it begins anew"
                )
            raise

    def require_room(self, needed_bytes: int, temporary_bytes: int = 0) -> None:
        """Raises `StoreFullError` where the disk cannot hold what will be written.

        A bucket is not asked; there `temporary_bytes` are needed for the largest file.
        """
        where, needed, there = tempfile.gettempdir(), temporary_bytes, 0
        if self.properties.file_system:
            there = sum(file.stat().st_blocks * 512 for file in Path(self.part).rglob("*"))
            where, needed = self._above, needed_bytes
        require_free(where, needed, there_bytes=there, target=self.target)

    def commit(self, marker: str | None = None) -> None:
        """Makes what was written the target. Where it is not renamed, a directory of Orbax's is one once `marker` is in
        it."""
        renamed = self.properties.atomic_rename
        self._own_files()  # raises where something else lies there
        if marker is not None and renamed:
            self.put([(paths.COMMIT_MARK, marker.encode())])
        if self.properties.file_system:
            remove_unfinished_puts(self.url)  # of an interrupted work that was resumed
            sync_tree(self.url)
        if not renamed:
            if self.properties.file_system:
                sync_above(self.target)
            if marker is not None:
                put_new(self._opened(self.url), paths.COMMIT_MARK, marker.encode())
            self.journal.remove()
            self._remove_part()
            return
        if os.path.lexists(self.target):
            raise CheckpointError(
                f"{self.target} was made meanwhile; the written data is in {self.part}", path=self.target
            )
        os.rename(self.url, self.target)
        sync_directory(self.part)
        sync_above(self.target)
        self.journal.remove()
        self._remove_part()

    def _remove_part(self) -> None:
        """On a disk: the directory of the work, where it holds nothing else."""
        if self.properties.file_system:
            with suppress(OSError):
                os.unlink(f"{self.part}/{_LOCK}")
            remove_empty(self.part)


def begin(target: Destination, known_by: str, *, resume: bool) -> str:
    """The number of the work: of an interrupted one of the same fingerprint if that is resumed, else of a new one, for
    which the target is cleared. Raises `CheckpointError` where that is not possible without loss."""
    target.require_free()
    if resume and target.journal.holds(known_by):
        target.require_kept()
    else:
        target.clear()
        target.journal.begin(known_by)
    return target.journal.work


def _is_lost(noted: Noted, found: Stat | None) -> bool:
    """Whether a file that was written is not what it was. One without a version may not have been written yet."""
    if noted.version is None:
        return False
    return found is None or found.version != noted.version or found.size_bytes != noted.size


def _digest_of_file(path: str) -> str:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return digest_of(data)
