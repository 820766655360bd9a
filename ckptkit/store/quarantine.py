"""Puts aside what cannot be trusted, on the same file system, and never deletes it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptkit.errors import CheckpointError
from ckptkit.model import paths
from ckptkit.store.local import make_directory, sync_directory

QUARANTINE_DIR = "_quarantine"  # in a slot directory; below `_ckptkit` in a durable root
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def move_aside(path: Path, quarantine: Path, name: str) -> Path:
    """Moves a file or directory into `quarantine` as `name`, or `name.1` and so on; both directories are synced."""
    make_directory(quarantine, synced=True, mode=0o700)
    number, target = 0, quarantine / name
    while os.path.lexists(target):
        number += 1
        target = quarantine / f"{name}.{number}"
    path.rename(target)
    sync_directory(quarantine)
    sync_directory(path.parent)
    return target


def try_lock(fd: int, operation: int = fcntl.LOCK_EX) -> bool | None:
    """Takes the `flock` of an open file if it is free, and returns whether it was. Never waits.

    None on a file system without locks, such as Lustre without the mount option `flock`. Raises OSError.
    """
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


@contextmanager
def arena_lock(directory: Path, name: str = paths.LOCK_NAME) -> Iterator[bool | None]:
    """Holds the lock of a slot directory, or of another one, if it is free; yields what `try_lock` returns.

    A job that starts meanwhile takes the next directory, as it does while an earlier one has not died yet.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(directory / name, flags, 0o600)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


@contextmanager
def alone_at(directory: Path, name: str, target: str) -> Iterator[None]:
    """Holds the lock of this name in a directory, which is made where it is not there: no other process makes the same
    `target` meanwhile. On a file system without locks it holds nothing.

    Raises `CheckpointError` where another process does.
    """
    with ExitStack() as held:
        while not _locked(held, directory, name, target):
            pass
        yield


def _locked(held: ExitStack, directory: Path, name: str, target: str) -> bool:
    """Takes the lock; False where it was removed meanwhile, by one who is done with it."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        is_free = held.enter_context(arena_lock(directory, name))
    except FileNotFoundError:
        return False
    if is_free is False:
        raise CheckpointError(f"another process is making {target}; wait until it ends", path=target)
    return (directory / name).exists()
