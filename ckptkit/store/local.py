"""A directory on a local or shared file system."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import final

from ckptkit.errors import OutsideRootError, StoreError, StoreFullError, store_errors
from ckptkit.store.base import Properties, PutMode, Stat, checked_key
from ckptkit.store.mounts import existing, file_system_of
from ckptkit.util.words import size_text

DIRECTORY = Properties(file_system=True, round_trips=False, atomic_rename=True, generations=False, known_to_orbax=False)
_MARKED = replace(DIRECTORY, atomic_rename=False)
# Of our puts, and of TensorStore's manifests.
_UNFINISHED = re.compile(r"\.put-[0-9a-f]{32}|manifest\.ocdbt_[0-9a-f]+\.__lock")
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}  # the errors of link(2) without hard links


def directory_properties(path: str | os.PathLike[str]) -> Properties:
    """The properties of the file system that holds a directory. Cost: that of `file_system_of`."""
    return DIRECTORY if file_system_of(path).atomic_rename else _MARKED


@final
class LocalStore:
    """Objects as files. `put` writes a temporary file, syncs it, renames it and syncs the directory.

    With `durable=False` nothing is synced (a ramdisk has nothing to sync to).
    """

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True):
        self._root = Path(root)
        self._durable = durable

    @property
    def url(self) -> str:
        """The directory."""
        return str(self._root)

    @property
    def properties(self) -> Properties:
        """Those of the file system that holds the root now."""
        return directory_properties(self._root)

    def put(self, key: str, data: bytes, *, mode: PutMode = "replace") -> None:
        """Stores `data` whole (see `Store.put`); survives power loss on return unless `durable=False`."""
        path = self._path(key, writes=True)
        with store_errors(path):
            try:
                make_directory(path.parent, synced=self._durable)
            except (FileExistsError, NotADirectoryError) as error:
                raise StoreError(f"{path}: an object exists where a directory is needed", path=str(path)) from error
            temporary = path.parent / f".put-{uuid.uuid4().hex}"
            try:
                self._write_new(temporary, data)
                if mode == "create":
                    self._put_new(path, temporary, data)
                    os.unlink(temporary)
                else:
                    os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):  # it may never have been there
                    os.unlink(temporary)
                raise
            self._sync_directory(path.parent)

    def _put_new(self, path: Path, temporary: Path, data: bytes) -> None:
        try:
            os.link(temporary, path)  # fails where the name exists, unlike rename
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A mounted bucket shows an object once its writer has closed it. On another disk without links (vfat) a
            # crash may leave a part.
            self._write_new(path, data)

    def _write_new(self, path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # for all whom the umask lets read
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if self._durable:
                os.fsync(fd)

    def move(self, source: str, target: str) -> None:
        """Gives an object the name `target`, which has to be free: one operation decides, and needs `source`.

        Once `source` is deleted, it cannot be moved any more. Raises `FileNotFoundError` if `source` does not exist,
        `FileExistsError` if `target` exists. Without hard links a `target` that is put at the same moment is replaced.
        """
        old, new = self._path(source, writes=True), self._path(target, writes=True)
        with store_errors(new):
            try:
                os.link(old, new)
                os.unlink(old)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if os.path.lexists(new):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from error
                os.rename(old, new)
            self._sync_directory(new.parent)

    def copy(self, source: str, target: str, *, mode: PutMode = "replace", replaces: int | None = None) -> None:
        """See `Store.copy`; holds the object in memory."""
        del replaces
        self.put(target, self.get(source), mode=mode)

    def get(self, key: str) -> bytes:
        """The whole object; raises `FileNotFoundError` where there is none."""
        path = self._path(key)
        with store_errors(path):
            try:
                if stat.S_ISFIFO(path.stat().st_mode) or stat.S_ISCHR(path.stat().st_mode):
                    raise StoreError(f"{path} is a pipe or a device, which no object is", path=str(path))
                return path.read_bytes()
            except (IsADirectoryError, NotADirectoryError) as error:
                raise FileNotFoundError(f"{path} is no object") from error

    def stat(self, key: str) -> Stat | None:
        """Facts about an object; None where there is none."""
        path = self._path(key)
        with store_errors(path):
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return Stat(found.st_size) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> list[str]:
        """The names right below `prefix`, sorted; directories end in `/`. Unfinished puts are left out."""
        path = self._path(prefix) if prefix else self._root
        with store_errors(path):
            try:
                entries = list(os.scandir(path))
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(entry.name + "/" * _is_directory(entry) for entry in entries if entry.name[:5] != ".put-")

    def delete(self, key: str) -> None:
        """Removes an object; an absent one is not an error."""
        path = self._path(key, writes=True)
        with store_errors(path), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
            self._sync_directory(path.parent)

    def list_all(self, prefix: str) -> list[str]:
        """Every key below `prefix`, sorted. Unfinished puts are left out; a directory that a link makes appear twice,
        or inside itself, is walked once."""
        found, directories, walked = list[str](), [prefix], set[str]()
        while directories:
            directory = directories.pop()
            real = os.path.realpath(self._path(directory) if directory else self._root)
            if real in walked:
                continue
            walked.add(real)
            for name in self.list(directory):
                key = f"{directory}/{name}" if directory else name
                (directories if name.endswith("/") else found).append(key.rstrip("/"))
        return sorted(found)

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `Store.delete_many`; directories stay."""
        for key in keys:
            self.delete(key)

    def stat_all(self, prefix: str) -> dict[str, Stat]:
        """See `Store.stat_all`; what goes meanwhile is left out."""
        return {key: found for key in self.list_all(prefix) if (found := self.stat(key)) is not None}

    def delete_unchanged(self, found: Mapping[str, Stat]) -> None:
        """See `Store.delete_unchanged`: a file system has no generations."""
        self.delete_many(list(found))

    def _path(self, key: str, *, writes: bool = False) -> Path:
        """Raises `OutsideRootError` for a key that leads out of the root by a link. A read of what is absent may."""
        below = accumulate(checked_key(key).split("/"), os.path.join, initial=str(self._root))
        path = self._root / key
        if not any(map(os.path.islink, islice(below, 1, None))):
            return path
        root = os.path.realpath(self._root)
        outside = os.path.commonpath((root, os.path.realpath(path))) != root
        if outside and (writes or path.exists()):
            where = f"{path} leads out of {root} by a link; nothing was read or written there"
            raise OutsideRootError(where, path=str(path))
        return path

    def _sync_directory(self, directory: Path) -> None:
        if self._durable:
            sync_directory(directory)


def make_directory(directory: Path, *, synced: bool, mode: int = 0o777) -> None:
    """Makes a directory (with permissions `mode`) and those above it. With `synced`, each new name is synced in its
    parent directory, so that files that are synced below it later are found after a power failure."""
    if directory.is_dir():
        return
    if directory.parent != directory:
        make_directory(directory.parent, synced=synced)
    try:
        directory.mkdir(mode=mode, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)) from error
    if synced:
        sync_directory(directory.parent)


def make_durable(directory: str | os.PathLike[str], *, mode: int = 0o777) -> None:
    """Makes a directory (with permissions `mode`) and those above it. A power failure undoes none of them, even those
    that another process made."""
    make_directory(Path(directory), synced=False, mode=mode)
    sync_above(directory)


def sync_above(path: str | os.PathLike[str]) -> None:
    """Makes the name of a file or directory durable, and the names of all directories above it: `mkdir -p` syncs none.
    Cost: a sync for each directory up to the mount point. One that this process may not read is skipped."""
    real = Path(os.path.realpath(path))
    device = real.stat().st_dev
    for above in real.parents:
        if above.stat().st_dev != device:
            return
        with suppress(PermissionError):
            sync_directory(above)


def require_free(directory: str, needed_bytes: int, *, there_bytes: int = 0, target: str) -> None:
    """Raises `StoreFullError` where a directory's file system lacks room for `target`, of which a part is there."""
    free = shutil.disk_usage(directory).free
    if needed_bytes > free + there_bytes:
        why = (
            f"{directory} has {free} bytes free, and {needed_bytes} are needed; nothing was written: free some space "
            "or take another directory"
        )
        raise StoreFullError(why, path=target)


def disk_room(directory: str) -> tuple[int, int] | None:
    """The bytes of the file system of a directory, and the free ones of them; None where it reports no size, as some
    mounts do, or cannot be asked."""
    try:
        mount = os.statvfs(existing(directory))
    except OSError:
        return None
    return (mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize) if mount.f_blocks else None


def lacking_room(directory: str, needed_bytes: int) -> str | None:
    """That the file system of a directory has less than `needed_bytes` free, with both numbers; None where it has
    them, or reports no size."""
    room = disk_room(directory)
    if room is None or needed_bytes <= room[1]:
        return None
    needed, free = size_text(needed_bytes), size_text(room[1])
    return f"{directory} needs {needed_bytes} bytes for a step, {room[1]} are free ({needed} needed, {free} free)"


def remove_empty(directory: str | os.PathLike[str]) -> None:
    """Removes a directory and those below it, as far as they are empty, or hold only unfinished puts."""
    remove_unfinished_puts(directory)
    for here, _, _ in os.walk(directory, topdown=False):
        with suppress(OSError):
            os.rmdir(here)


def remove_unfinished_puts(directory: str | os.PathLike[str]) -> None:
    """Deletes the temporary files of puts below a directory where no process puts anything."""
    for here, _, names in os.walk(directory):
        for name in names:
            if _UNFINISHED.fullmatch(name):
                os.unlink(os.path.join(here, name))


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it leads to a directory. A link that leads to itself does not, nor one that leads nowhere."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Makes names in a directory durable: a rename alone is lost on power failure (ext4)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: str | os.PathLike[str], synced: set[tuple[int, ...]] | None = None) -> None:
    """Makes a file, or all files below a directory, durable. Links are skipped, and files that are removed meanwhile
    (TensorStore's lock files). Cost: a call for each file.

    `synced` is for long work with several calls: it keeps the files that a call has synced. A file with the same size
    and times is not synced again (each sync costs a flush of the disk). Its pages are released, because large work
    would push everything else out of memory. For files that are written once, or replaced.
    """
    found = [(os.fspath(path), [], [os.fspath(path)])] if os.path.isfile(path) else os.walk(path)
    for directory, _, names in found:
        for name in names:
            file = os.path.join(directory, name)
            if os.path.islink(file):
                continue
            try:
                fd = os.open(file, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                found_as = os.fstat(fd)
                stamp = (found_as.st_ino, found_as.st_size, found_as.st_mtime_ns, found_as.st_ctime_ns)
                if synced is None or stamp not in synced:
                    os.fsync(fd)
                    if synced is not None:
                        synced.add(stamp)
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        if os.path.isdir(directory):
            sync_directory(directory)
