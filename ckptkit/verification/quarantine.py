"""Puts aside what cannot be trusted, on the same file system, and never deletes it."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit import layout
from ckptkit.store.local import make_directory, sync_directory

QUARANTINE_DIR = "_quarantine"  # in a slot directory; below `_ckptkit` in a durable root
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # renameat2(2), Linux 3.15


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


@contextmanager
def arena_lock(directory: Path, name: str = layout.LOCK_NAME) -> Iterator[bool]:
    """Holds the lock of a slot directory, or of another one, if it is free; gives whether it was. Never waits.

    A job that starts meanwhile takes the next directory, as it does beside one that has not died yet.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(directory / name, flags, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def exchange(a: Path, b: Path) -> None:
    """Two names change places in one step, so that neither is ever absent. Raises OSError."""
    rename = ctypes.CDLL(None, use_errno=True).renameat2
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(b))
