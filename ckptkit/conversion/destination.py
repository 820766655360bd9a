"""Where a conversion puts what it makes: on a disk beside its place, and renamed at the end; in a bucket in place, and
marked at the end. Until then nothing at the target is a checkpoint, and an interrupted work can be gone on with."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, final

from ckptkit.conversion.journal import Journal
from ckptkit.errors import CheckpointError, CorruptCheckpointError, StoreFullError
from ckptkit.formats.safetensors import INDEX
from ckptkit.model import paths
from ckptkit.store import Store, open_store, put_new
from ckptkit.store.backends import BACKENDS, backend_of, properties_of
from ckptkit.store.local import LocalStore, sync_directory, sync_tree
from ckptkit.store.remote import RemoteStore
from ckptkit.verification.quarantine import alone_at

_LOCK = ".ckptkit-lock"


def target_url(target: str) -> str:
    """The target's one name. Raises `CheckpointError` where something stands there, or nothing can."""
    if not properties_of(target).file_system:
        return target.rstrip("/")  # whether it is free, a listing says when the work begins
    target = os.path.abspath(target.removeprefix("file://"))
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already; name another target, or move it away", path=target)
    if not os.path.isdir(os.path.dirname(target)):
        raise CheckpointError(f"{os.path.dirname(target)} is no directory; make it first", path=target)
    return target


def require_orbax_target(url: str) -> None:
    """Raises `CheckpointError` for a place to which nobody writes, and from which nobody reads, Orbax's checkpoints."""
    if backend_of(url).driver is None:
        buckets = [f"{name}://" for name, each in BACKENDS.items() if each.driver and not each.properties.file_system]
        raise CheckpointError(f"{url}: Orbax's checkpoints are written to disks, {' and '.join(buckets)}", path=url)


class SourceChangedError(CheckpointError):
    """What was read is not one checkpoint: nothing that was made of it is of use."""


def require_unchanged(known_by: str, now: Callable[[], str], source: str) -> None:
    """Raises `SourceChangedError` where the fingerprint of a work is another one than when it began."""
    if now() != known_by:
        raise SourceChangedError(
            f"{source} was changed while it was read, and what was read may be of two checkpoints: nothing is kept of "
            "it; run it again when nobody writes there",
            path=source,
        )


@final
class Destination:
    """One target while it is made. `url` is where its files go meanwhile, `part` what an interrupted work leaves."""

    def __init__(self, target: str):
        self.target = target
        self.properties = properties_of(target)
        above, _, self._name = target.rpartition("/")
        self._above = above or "/"
        self.part = f"{above}/.{self._name}.ckptkit-part"
        self.url = f"{self.part}/{self._name}" if self.properties.atomic_rename else target

    def journal_store(self) -> Store:
        """Where it is noted what is done."""
        return open_store(f"{self.part}/journal")

    def store(self) -> Store:
        """Of the target's files; on a disk they are synced by `commit`."""
        return LocalStore(self.url, durable=False) if self.properties.file_system else open_store(self.url)

    def clear(self) -> None:
        """Removes what an interrupted work has left. Raises `CheckpointError` where a bucket's target is not free."""
        if self.properties.file_system:
            for name in os.listdir(self.part):
                path = os.path.join(self.part, name)
                if os.path.isdir(path):
                    shutil.rmtree(path)
                elif name != _LOCK:
                    os.unlink(path)
            return
        store, notes = self.store(), self.journal_store()
        left, noted = store.list_all(""), notes.list_all("")
        if left and not noted:
            raise self._taken()
        store.delete_many(left)
        notes.delete_many(noted)

    def require_free(self) -> None:
        """Raises `CheckpointError` where a bucket's target is a whole checkpoint by now: what an interrupted work has
        left there would be cleared, or gone on with, on top of it. Cost: two requests."""
        if self.properties.atomic_rename:
            return
        ends = (paths.COMMIT_MARK, INDEX)  # what is put last of a directory
        if open_store(self._above).stat(self._name) is not None or any(
            name.endswith(ends) for name in self.store().list("")
        ):
            raise self._taken()

    def _taken(self) -> CheckpointError:
        return CheckpointError(f"{self.target} is there already; name another target", path=self.target)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around all of the work of one process, or of the first of several: no other makes the same target meanwhile.

        Two that do would clear, or commit, what the other is still writing. A bucket has no lock that dies with its
        holder. Raises `CheckpointError` where another process works there.
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
            with open(path, "r+b" if path.exists() else "w+b") as made:
                try:
                    yield made
                except OSError as error:
                    error.filename = error.filename or made.name  # a full disk, of which a descriptor has no name
                    raise
            return
        with tempfile.NamedTemporaryFile(prefix="ckptkit-") as made:
            yield made
            made.flush()
            if name is None:
                RemoteStore(self._above).put_file(self._name, made.name)
            else:
                RemoteStore(self.url).put_file(name, made.name)

    @contextmanager
    def kept(self, *, after_damage: bool = True) -> Iterator[None]:
        """Around the work: what ends it is told, in a note, what it leaves behind and how to go on.

        A `SourceChangedError` leaves nothing, and unless kept `after_damage` neither does a `CorruptCheckpointError`: a
        source that is mended is another one, and no work on this one can be finished.
        """
        try:
            yield
        except BaseException as error:
            damaged = isinstance(error, CorruptCheckpointError) and not after_damage
            if damaged or isinstance(error, SourceChangedError):
                with suppress(CheckpointError, OSError):  # the damage is what is to be said
                    self.clear()
                    shutil.rmtree(self.part, ignore_errors=True)
            else:
                and_target = "" if self.properties.atomic_rename else " and the target"
                error.add_note(
                    f"what was written is kept in {self.part}{and_target}: the same command with "
                    "--resume goes on from there, without it begins anew"
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
        free = shutil.disk_usage(where).free
        if needed > free + there:
            raise StoreFullError(
                f"{where} has {free} bytes free, and {needed} are needed; nothing was written", path=self.target
            )

    def commit(self, marker: str | None = None) -> None:
        """Makes what was written the target. A directory of Orbax's is one, in a bucket, when `marker` is in it."""
        renamed = self.properties.atomic_rename
        if marker is not None and renamed:
            self.store().put(paths.COMMIT_MARK, marker.encode())
        elif marker is not None:
            put_new(self.store(), paths.COMMIT_MARK, marker.encode())
        if not renamed:
            notes = self.journal_store()
            notes.delete_many(notes.list_all(""))
            return
        sync_tree(self.url)
        if os.path.lexists(self.target):
            raise CheckpointError(
                f"{self.target} was made meanwhile; what was written stands in {self.part}", path=self.target
            )
        os.rename(self.url, self.target)
        sync_directory(self._above)
        shutil.rmtree(self.part, ignore_errors=True)


def begin(target: Destination, journal: Journal, known_by: str, *, resume: bool) -> bool:
    """Whether an interrupted work of the same fingerprint is gone on with; else the target is cleared for this one."""
    target.require_free()
    if resume and journal.holds(known_by):
        return True
    target.clear()
    journal.begin(known_by)
    return False
