"""The directories of a history: durable roots, backups, and the ramdisks and SSDs of hosts."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

from tests.book.book import RAM, SSD, Book, Disagreement, Root
from tests.book.commands import run_command
from tests.book.history import PLACES, Event

_RDONLY, _REMOUNT, _DETACH = 1, 32, 2  # of mount(2) and umount2(2)
MEMORY = "/dev/shm"
_libc = ctypes.CDLL(None, use_errno=True)


def can_mount() -> bool:
    """Whether a root may be on a file system of its own, which is then made read only."""
    path = tempfile.mkdtemp(prefix="ckptkit-book-")
    found = _libc.mount(b"tmpfs", path.encode(), b"tmpfs", 0, b"size=1m") == 0
    if found:
        _libc.umount2(path.encode(), _DETACH)
    os.rmdir(path)
    return found


def set_writable(disk: str, *, writable: bool) -> bool:
    """Makes the file system of the roots read only, or writable again; False where it cannot be done."""
    flags = _REMOUNT | (0 if writable else _RDONLY)
    return _libc.mount(b"tmpfs", disk.encode(), b"tmpfs", flags, b"") == 0


class World:
    """Directories below one that goes with the history."""

    def __init__(self, *, mounted: bool):
        self.top = Path(tempfile.mkdtemp(prefix="ckptkit-book-", dir=MEMORY if os.path.isdir(MEMORY) else None))
        self.disk = self.top / "disk"
        self.disk.mkdir()
        self.place, self._mounted = PLACES[0], mounted
        self._backups: list[Root] = []
        if mounted and _libc.mount(b"tmpfs", bytes(self.disk), b"tmpfs", 0, b"size=256m"):
            raise OSError(ctypes.get_errno(), "mount")

    def close(self) -> None:
        """Removes everything."""
        if self._mounted:
            _libc.umount2(bytes(self.disk), _DETACH)
        shutil.rmtree(self.top, ignore_errors=True)

    def make_writable(self) -> None:
        """Ends what a run has left."""
        if self._mounted:
            set_writable(str(self.disk), writable=True)

    @property
    def root(self) -> Path:
        """The root that the next run uses."""
        return self.disk / self.place

    @property
    def backups(self) -> int:
        """How many backups there are."""
        return len(self._backups)

    def backed_up(self, book: Book) -> None:
        """The root was copied to the next backup."""
        self._backups.append(deepcopy(book.roots[self.place]))

    def backup(self, number: int) -> Path:
        """Where a backup is."""
        return self.top / "backups" / str(number)

    def order(self, config: dict[str, Any], host: str) -> dict[str, Any]:
        """The directories of a process."""
        return {
            "root": str(self.root),
            "disk": str(self.disk) if self._mounted else None,
            "backups": str(self.top / "backups"),
            "fast": {tier: str(self.top / "hosts" / host / tier) for tier in (RAM, SSD)},
            "host": host,
            **config,
        }

    @staticmethod
    def _command(*words: Any) -> None:
        code, said = run_command(*map(str, words))
        if code:
            raise Disagreement(f"`ckptkit {' '.join(map(str, words))}` ends with {code}: {said}")

    def apply(self, event: Event, book: Book) -> None:
        """Changes the directories between two runs, and tells the book. No effect where the event cannot happen."""
        kind, *rest = event
        place, other = self.place, PLACES[1 - PLACES.index(self.place)]
        match kind:
            case "reboot" | "replace":
                tiers = (RAM,) if kind == "reboot" else (RAM, SSD)
                for tier in tiers:
                    shutil.rmtree(self.top / "hosts" / rest[0] / tier, ignore_errors=True)
                book.lose(rest[0], tiers)
            case "put back" if rest[0] < self.backups:
                shutil.rmtree(self.root, ignore_errors=True)
                shutil.copytree(self.backup(rest[0]), self.root, symlinks=True)
                book.put_back(place, deepcopy(self._backups[rest[0]]))
            case "remove" if self.root.exists():
                shutil.rmtree(self.root)
                book.roots.pop(place, None)
            case "back up" if self.root.exists():
                shutil.copytree(self.root, self.backup(self.backups), symlinks=True)
                self.backed_up(book)
            case "copy" if self.root.exists():  # the run goes on in the copy
                shutil.rmtree(self.disk / other, ignore_errors=True)
                shutil.copytree(self.root, self.disk / other, symlinks=True)
                book.roots[other] = deepcopy(book.roots[place])
                self.place = other
            case "prune" if book.saves and self.root.exists():
                self._command("prune", self.root, "--keep", f"newest={rest[0]}")
                book.pruned(place, rest[0])
            case "rollback" if self.root.exists() and rest[0] < len(targets := book.targets(place)):
                self._command("rollback", self.root, "--to", targets[rest[0]].step)
                book.rolled_back(place, targets[rest[0]])
            case "scrub" if self.root.exists():
                self._command("scrub", self.root, "--repair")
            case "tiers clean":
                for tier in (RAM, SSD):
                    if (path := self.top / "hosts" / rest[0] / tier).exists():
                        self._command("tiers", "clean", path, "--idle", "0s")
                        book.cleaned(rest[0], (tier,))
            case "ckptkit copy" if self.root.exists() and book.targets(place):
                shutil.rmtree(self.disk / other, ignore_errors=True)
                self._command("copy", self.root, self.disk / other)
                book.roots[other] = deepcopy(book.roots[place])
                self.place = other
            case "move" if self.root.exists():
                shutil.rmtree(self.disk / other, ignore_errors=True)
                self.root.rename(self.disk / other)
                book.roots[other] = deepcopy(book.roots[place])
                book.roots.pop(place, None)
                self.place = other
