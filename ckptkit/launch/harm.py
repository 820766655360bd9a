"""Damage to the files, the disk and the bucket of a job."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from ckptkit.events import LOG_NAME, Kind, read_events
from ckptkit.launch.faults import checked_own
from ckptkit.model.tiers import DURABLE

_FLIPPED_BYTES_MIN = 64
_FILLED_BYTES_MIN = 4096
_FILLER = ".ckptkit-chaos-full"
_LARGE_BYTES = 16 << 20
_LARGE_MAX = 256  # each takes a descriptor


def emptied(directory: Path) -> int:
    """Deletes everything below a directory; returns the number of files. All names are deleted when this returns.

    The kernel needs 0.15 s to free 1 GB of a ramdisk. A host that loses its memory does not spend this time, so a
    thread frees large files while the job starts again. Where the space could be needed at once, this waits for it.
    """
    files = [path for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
    held, held_bytes = _held_open(files)
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    if held:
        freeing = threading.Thread(target=_close_all, args=(held,), name="ckptkit-chaos-free")
        freeing.start()
        if shutil.disk_usage(directory).free < held_bytes:
            freeing.join()
    return len(files)


def _held_open(files: Sequence[Path]) -> tuple[list[int], int]:
    """Descriptors that keep the contents of large files when their names are deleted, and the bytes of these files."""
    held: list[int] = []
    held_bytes = 0
    for path in files:
        with suppress(OSError):
            if len(held) < _LARGE_MAX and (size := path.lstat().st_size) >= _LARGE_BYTES:
                held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
                held_bytes += size
    return held, held_bytes


def _close_all(fds: Sequence[int]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread: the job starts on the same cores
    for fd in fds:
        os.close(fd)


def flipped(directory: Path, chance: random.Random) -> str | None:
    """Flips one bit of one file below a directory, and returns which; None if no file has 64 bytes."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    files = sorted(path for path in paths if path.stat().st_size >= _FLIPPED_BYTES_MIN)
    if not files:
        return None
    path = chance.choice(files)
    offset, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
    flip_bit(path, offset, bit)
    return f"{path}, byte {offset:,}"


def places_of(directory: Path, process: int) -> dict[str, str]:
    """The local directories of a process's tiers by name, and `durable`, as its newest event log below `directory` has
    them; empty where it has opened no manager."""
    logs = {path: LOG_NAME.fullmatch(path.name) for path in directory.glob(f"attempt-*-process-{process}.jsonl")}
    for path in sorted(logs, key=lambda path: int(found[1]) if (found := logs[path]) else -1, reverse=True):
        opened = [event.fields for event in read_events(path) if event.kind == Kind.OPENED]
        places = {name: place for each in opened for name, place in each.get("places", {}).items()}
        if opened:
            places[DURABLE] = str(opened[-1]["directory"])
            return {name: place for name, place in places.items() if "://" not in place}
    return {}


def flip_bit(path: Path, offset: int, bit: int) -> None:
    """Flips a bit in place: a mapping of the file sees it."""
    with path.open("r+b") as file:
        before = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([before ^ 1 << bit]), offset)


@final
class FullDisk:
    """Takes all free space of the file system of `directory`, until `end`. Raises `ValueError` where that is the file
    system of `/`: a full one would hit more than the job."""

    def __init__(self, directory: str):
        self.directory = checked_own(directory)
        if os.stat(directory).st_dev == os.stat("/").st_dev:
            raise ValueError(f"{directory} is on the file system of /: give a directory on a file system of its own")
        self._path = Path(directory) / _FILLER

    def begin(self) -> int:
        """Returns the bytes that it took."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size, piece = os.fstat(fd).st_size, 1 << 40
            while piece >= _FILLED_BYTES_MIN:
                try:
                    os.posix_fallocate(fd, size, piece)
                    size += piece
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EFBIG):
                        raise
                    piece //= 2
            return size
        finally:
            os.close(fd)

    def end(self) -> None:
        """Gives the space back."""
        self._path.unlink(missing_ok=True)


@final
class LocalBucket:
    """The bucket of the test kit as a process of its own, with its objects in `directory`.

    `env` leads the clients of a job to it. Between `begin` and `end` of an outage nothing listens there; the objects
    stay. It ends with this process, at the latest.
    """

    def __init__(self, directory: Path, names: tuple[str, ...]):
        self._directory, self._names = directory, names
        self._process, self._url = self._start(0)

    @property
    def env(self) -> dict[str, str]:
        """The variables of a job that uses this bucket."""
        return {
            "STORAGE_EMULATOR_HOST": self._url,
            "TENSORSTORE_GCS_HTTP_URL": self._url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else gcsfs asks the real service for the bucket's type
        }

    def begin(self) -> None:
        """Ends the server at once."""
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        """Starts it again, at the same address."""
        self._process, _ = self._start(int(self._url.rpartition(":")[2]))

    def close(self) -> None:
        """Stops the server. The objects stay."""
        self._process.terminate()
        self._process.communicate()

    def _start(self, port: int) -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, "-m", "ckptkit.testing.bucket", "--stop-with-stdin", "--port", str(port)]
        words += ["--dir", str(self._directory), *(word for name in self._names for word in ("--bucket", name))]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            process.wait()
            raise OSError(f"the bucket in {self._directory} could not be started")
        return process, url
