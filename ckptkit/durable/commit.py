"""One attempt to write a step, on process 0: its place until it is committed, and the operation that commits it.

On a disk the place is a directory with a name of its own, and one rename commits it. In a bucket, and on a mount that
does not rename a directory in one step, a step is written in place. It is committed by a copy of the attempt's intent
object to the name of the step's marker; on a mount the intent is renamed. A process that moves the directory away, or
deletes the intent, prevents that commit for good, whether the writer is alive or not. So a later
run fences off an earlier one (`abandoned`).
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from ckptkit.durable.lifecycle.classify import has_been_written
from ckptkit.durable.lifecycle.delete import move_away
from ckptkit.durable.lifecycle.places import Place, is_committed
from ckptkit.durable.sidecars import marker_text
from ckptkit.errors import CheckpointError, StoreError
from ckptkit.model import paths
from ckptkit.model.manifest import SaveId
from ckptkit.store import Stat, Store, open_store, put_new, side_by_side
from ckptkit.store.backends import properties_of
from ckptkit.store.local import LocalStore, make_directory, remove_empty, sync_directory
from ckptkit.store.retry import retried


def make_attempt(url: str, name: str, save_id: SaveId, mode: int) -> DiskAttempt | MarkAttempt:
    """An attempt that is not begun yet: it has touched nothing."""
    if properties_of(url).atomic_rename:
        return DiskAttempt(url, name, save_id, mode)
    return MarkAttempt(url, name, save_id)


@final
class DiskAttempt:
    """A directory next to the step's; `place` is where its files go."""

    def __init__(self, url: str, name: str, save_id: SaveId, mode: int):
        self._where, self._save_id, self._mode = f"{url}/{name}", save_id, mode
        self.place = f"{url}/{paths.temporary_name(name, save_id.epoch, uuid.uuid4().hex)}"
        self._directory: int | None = None

    def begin(self) -> None:
        """Makes the place; raises `StepAlreadyExistsError` where the step is there."""
        if os.path.lexists(self._where):
            raise _exists(self._where, self._save_id)
        make_directory(Path(self.place).parent, synced=True)  # made at the start, but it may be gone
        os.mkdir(self.place, self._mode)
        # Kept open: a disk gives the inode number of a deleted directory to the next one that is made.
        self._directory = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def commit(self) -> None:
        """The step is there from now on, whole, and survives power loss. Raises `StepAlreadyExistsError`,
        `CheckpointError` where a later run has moved the directory away."""
        try:
            self._commit()
        finally:
            self._close()

    def _commit(self) -> None:
        mark = marker_text(self._where, self._save_id).encode()
        LocalStore(self.place).put(paths.COMMIT_MARK, mark)
        if not self._is_at(self.place):  # a put makes the directory that it needs, and that would be committed
            raise _fenced(self._where, self._save_id)
        try:
            os.rename(self.place, self._where)
        except FileNotFoundError as error:
            # NFS sends a rename again whose answer was lost, and the second one finds nothing to rename.
            if not self._is_at(self._where):
                raise _fenced(self._where, self._save_id) from error
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise _exists(self._where, self._save_id) from error
            raise
        sync_directory(os.path.dirname(self._where))

    def tidy(self) -> None:
        """Nothing is left of it."""

    def _is_at(self, where: str) -> bool:
        """Whether the directory that this attempt made is there."""
        if self._directory is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._directory), os.stat(where))
        except OSError:  # gone; on a network's disk the open one may be stale
            return False

    def _close(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def give_up(self) -> None:
        """Removes what was written, unless it is committed: a disk that is full has to have its room back."""
        self._close()
        with suppress(OSError, StoreError):
            shutil.rmtree(move_away(self.place), ignore_errors=True)


@final
class MarkAttempt:
    """The step's own prefix or directory, empty; `place` is where its files go."""

    def __init__(self, url: str, name: str, save_id: SaveId):
        self.place, self._save_id = f"{url}/{name}", save_id
        self._name = name
        self._store = open_store(url)
        self._mark = marker_text(self.place, save_id).encode()
        self._intent = f"{paths.INTENTS_DIR}/{paths.intent_name(name, save_id.epoch, uuid.uuid4().hex)}"

    def begin(self) -> None:
        """Announces that the step is being written, and removes the leftovers of an earlier attempt. Nothing may be put
        into `place` before this has returned.

        Raises `StepAlreadyExistsError` if the step exists, `CheckpointError` if a later run writes it. Cost: two round
        trips: a put, then a listing in parallel with one of the step; more if there are leftovers.
        """
        try:
            left, _ = side_by_side([lambda: self._store.stat_all(self._name), self._announce])
            if left:  # deletions want a look at the intents that came after what is to be deleted was found
                self._meet_others()
            if not remove_uncommitted(self._store, self._name, left):
                raise _exists(self.place, self._save_id)
        except (StepAlreadyExistsError, CheckpointError) as error:
            # Another has the step. Where the store failed the intent stays, as in `give_up`: what earlier attempts have
            # left may have lost theirs by now.
            if not isinstance(error, StoreError):
                self._drop_intent()
            raise

    def _announce(self) -> None:
        # Announce first, then look: of two runs that begin the same step at once, at least one sees the other.
        put_new(self._store, self._intent, self._mark)  # no other attempt has its name: what is there is this one's
        self._meet_others()

    def _meet_others(self) -> None:
        """Takes the commit from earlier runs' attempts at the step; raises where a later run's is there."""
        mine = self._intent.rpartition("/")[2]
        for epoch, name in intents(self._store):
            if (found := paths.intent_of_name(name)) is None or found[1] != self._name or name == mine:
                continue
            if epoch > self._save_id.epoch:
                raise _fenced(self.place, self._save_id)
            self._store.delete(f"{paths.INTENTS_DIR}/{name}")

    def commit(self) -> None:
        """The step is there from now on. Raises `StepAlreadyExistsError`, `CheckpointError` where a later run has
        deleted the intent."""
        mark = f"{self._name}/{paths.COMMIT_MARK}"
        if self._store.properties.file_system:
            sync_directory(self._store.url)  # what is put last syncs the directories below the step's name
        try:
            commit_mark(self._store, self._intent, mark, self._mark)
        except FileExistsError as error:
            raise _exists(self.place, self._save_id) from error
        except FileNotFoundError as error:
            raise _fenced(self.place, self._save_id) from error

    def tidy(self) -> None:
        """Removes the intent of a step that is committed: it means nothing any more. No caller has to wait for that."""
        self._drop_intent()

    def give_up(self) -> None:
        """Leaves the written files with the intent, which names their owner to the next attempt and the next run."""

    def _drop_intent(self) -> None:
        with suppress(StoreError):  # the next run deletes it
            self._store.delete(self._intent)


def commit_mark(store: Store, intent: str, mark: str, text: bytes) -> None:
    """Puts `text`, which `intent` holds, under the name of a mark: one operation, which needs the intent.

    Success where it is there already. Raises `FileExistsError` where another mark is, `FileNotFoundError` where the
    intent was deleted, `StoreError`.
    """
    try:
        if store.properties.file_system:  # a copy of a file is two operations: nothing would need the intent
            retried(lambda: LocalStore(store.url).move(intent, mark))
        else:
            store.copy(intent, mark, mode="create")
    except (FileExistsError, FileNotFoundError):
        with suppress(FileNotFoundError):
            if store.get(mark) == text:  # the answer of the first try was lost
                return
        raise


def intents(store: Store) -> list[tuple[int, str]]:
    """The epoch and name of each intent in a bucket. Cost: a listing."""
    names = store.list(paths.INTENTS_DIR)
    return [(found[0], name) for name in names if (found := paths.intent_of_name(name)) is not None]


def remove_uncommitted(store: Store, name: str, left: Mapping[str, Stat]) -> bool:
    """Deletes `left`, what was found below a step's prefix in a bucket; False, and nothing is deleted, where the step
    is committed, or the objects are not those of a save. On a mount the directories go too.

    `left` must be older than the caller's look at the intents, which showed no other writer with a right to the step. A
    writer puts its intent before these objects, and removes it only after its commit.
    """
    mark = f"{name}/{paths.COMMIT_MARK}"
    if mark in left or (left and store.stat(mark) is not None):
        return False
    if left and not has_been_written(key.removeprefix(f"{name}/") for key in left):
        return False
    if not store.properties.file_system:
        store.delete_unchanged(left)
        return True
    if left and is_committed(Place(store, name)):
        return False
    # By the metadata alone it may be a step of stock Orbax, once it has lost what shows whose it is: that goes first.
    sign = f"{name}/{paths.STEP_METADATA}"
    store.delete_many([*(key for key in left if key == sign), *(key for key in left if key != sign)])
    remove_empty(f"{store.url}/{name}")
    return True


def _exists(where: str, save_id: SaveId) -> StepAlreadyExistsError:
    return StepAlreadyExistsError(f"step {save_id.step} is in {where} already")


def _fenced(where: str, save_id: SaveId) -> CheckpointError:
    return CheckpointError(
        f"step {save_id.step} is not committed to {where}: a later run than epoch {save_id.epoch} has taken its place "
        "away; stop this run",
        step=save_id.step,
        path=where,
    )
