"""The directory of one process's slots: taken with a lock, released, cleared and removed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from ckptkit.errors import TierUnusableError
from ckptkit.model import paths
from ckptkit.slots.reader import readable_slot_directories
from ckptkit.store.local import make_directory, sync_directory
from ckptkit.store.quarantine import try_lock
from ckptkit.util.disk_file import refuse_other_owner

_held = set[int]()  # descriptors of directories that were taken
_OF_PROCESS = re.compile(r"([0-9]+|buddy-[0-9]+-[0-9]+)(\.[0-9]+)?")  # a directory that `take_directory` made


def take_directory(host_dir: Path, name: str, *, synced: bool) -> tuple[Path, int]:
    """A directory of that name below `host_dir`, and the descriptor whose `flock` holds it.

    One that another process holds is left to it, and the next free name is taken. It, `host_dir` and the directory of
    the job are this user's alone (mode 0700). Raises `TierUnusableError`, also for a link among them, and for what
    another user owns: below a tier's root only the tiers make names.
    """
    for attempt in range(100):
        directory = host_dir / (name if attempt == 0 else f"{name}.{attempt}")
        if (fd := _taken(directory, synced=synced)) is not None:
            return directory, fd
    raise TierUnusableError(f"every slot directory below {host_dir} is held by another process", path=str(host_dir))


def take_left(host_dir: Path) -> Iterator[tuple[Path, int]]:
    """The directories of processes that ended, each with the descriptor whose `flock` holds it from now on.

    One that a live process holds, or another user owns, stays as it is. To be called when every process of this host
    has taken its own.
    """
    for directory in readable_slot_directories(host_dir):
        if _OF_PROCESS.fullmatch(directory.name):
            with suppress(TierUnusableError):
                if (fd := _taken(directory, synced=False)) is not None:
                    yield directory, fd


def remove_directory(directory: Path, fd: int) -> None:
    """Deletes a directory that `fd` holds: its manifests first, then its slots and the lock."""
    remove_slots(directory)
    (directory / paths.LOCK_NAME).unlink(missing_ok=True)
    with suppress(OSError):  # another process has begun to take it, or a file is not ours
        directory.rmdir()
    give_up(fd)


def retake(directory: Path, *, synced: bool) -> int:
    """The same directory again, after it was removed or replaced under its holder; makes it if it is not there. Raises
    `TierUnusableError`, also if another process holds it now."""
    fd = _taken(directory, synced=synced)
    if fd is None:
        raise _unusable(directory, "it was removed, and another process has made and taken it since")
    return fd


FileIdentity = tuple[int, int]  # device and inode


def identity_of(path: Path) -> FileIdentity | None:
    """The file that has this name now; None if there is none. Cost: a `stat`."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _taken(directory: Path, *, synced: bool) -> int | None:
    """The descriptor whose `flock` holds a directory, which is made; None if another process holds it."""
    try:
        for each in (*list(directory.parents)[1::-1], directory):
            if each.is_symlink():
                raise OSError(errno.ELOOP, f"{each} is a link")
            make_directory(each, synced=synced, mode=0o700)
            keep_to_owner(each)
        _refuse_files_of_others(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(directory / paths.LOCK_NAME, flags, 0o600)
    except OSError as error:
        raise _unusable(directory, f"{error.strerror}; give a directory that this user may write") from error
    with ExitStack() as opened:
        opened.callback(os.close, fd)
        if not _locked(fd, directory):
            return None
        status = os.fstat(fd)
        if identity_of(directory / paths.LOCK_NAME) != (status.st_dev, status.st_ino):
            return None  # its holder removed it meanwhile: this lock holds nothing
        opened.pop_all()
    _held.add(fd)
    return fd


def _locked(fd: int, directory: Path) -> bool:
    try:
        taken = try_lock(fd)
    except OSError as error:
        raise _unusable(directory, f"flock: {error.strerror}; give another directory") from error
    if taken is None:
        why = "its file system has no locks (flock); give a local disk or a tmpfs, or mount Lustre with -o flock"
        raise _unusable(directory, why)
    return taken


def _unusable(directory: Path, why: str) -> TierUnusableError:
    return TierUnusableError(f"tier directory {directory} cannot be used: {why}", path=str(directory))


def keep_to_owner(directory: Path) -> None:
    """Takes from a directory what others may do with it; raises `PermissionError` where another user owns it.

    A sticky one, as /dev/shm, is shared on purpose: there nobody can rename or remove what is another's.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if status.st_mode & stat.S_ISVTX and status.st_uid in (0, os.geteuid()):
            return
        refuse_other_owner(status, directory)
        if status.st_mode & 0o077:  # of an earlier version, or made by hand
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def _refuse_files_of_others(directory: Path) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            refuse_other_owner(entry.stat(follow_symlinks=False), Path(entry.path))


def give_up(fd: int) -> None:
    """Ends what `take_directory` began; nothing in a process that was forked since."""
    if fd in _held:
        _held.discard(fd)
        os.close(fd)


def _leave_to_parent() -> None:
    """A data loader's workers may outlive their job: the next run would find its slots taken, and make others."""
    for fd in list(_held):
        give_up(fd)


os.register_at_fork(after_in_child=_leave_to_parent)


def remove_slots(directory: Path) -> None:
    """Deletes every manifest below `directory`, then the slots."""
    names = sorted(os.listdir(directory))
    (directory / paths.NEWEST_NAME).unlink(missing_ok=True)
    for name in [n for n in names if paths.save_of_manifest(n)] + [n for n in names if paths.slot_index(n) is not None]:
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)


def remove_unfinished(directory: Path) -> None:
    """Deletes what a process that ended has left half written: puts, and files of handlers."""
    for path in directory.iterdir():
        if path.name.startswith(".put-"):
            path.unlink(missing_ok=True)
        elif path.name.startswith(paths.HANDLER_PREFIX):
            shutil.rmtree(path, ignore_errors=True)
