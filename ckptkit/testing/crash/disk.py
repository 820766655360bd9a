"""A file system as the operations that made it: any of them can be left out, as a crash does.

Files and directories are numbered nodes, and a name is an entry of a directory node. So the bytes of a file do not
depend on whether the operation that named it reached the disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, final

ROOT = 0  # the node of the directory that is modelled
NodeKind = Literal["file", "directory", "link"]


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes of a file. The gap between its end and `offset` becomes zeros."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file cut, or grown with zeros, to `size_bytes`; with `grows`, never cut."""

    node: int
    size_bytes: int
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Entries of directories that change in one step: `(directory, name, node)`, no node where the name goes."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """Everything before it of this file, or the names in this directory, is on the device."""

    node: int


@dataclass(frozen=True, slots=True)
class Note:
    """A note of the traced program: not an operation."""

    text: str


DiskEffect = Write | Resize | Names | Sync | Note


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a trace: the system call, the path below the root as it was then, the effect, and the process
    (0: from before the trace)."""

    call: str
    path: str
    effect: DiskEffect
    process: int = 0


@final
class Disk:
    """The state after some operations. `kinds` has the kind of each node; a link's bytes are its target."""

    def __init__(self, kinds: Mapping[int, NodeKind]):
        self._kinds = kinds
        self._bytes: dict[int, bytearray] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._lent = set[int]()  # nodes whose bytes a copy has too: copied before they change
        self._digests: dict[int, bytes] = {}

    def copy(self) -> Disk:
        """The same state, which changes by itself. Cost: that of the names; bytes are copied where they change."""
        other = Disk(self._kinds)
        other._bytes, other._digests = dict(self._bytes), dict(self._digests)
        other._entries = {directory: dict(entries) for directory, entries in self._entries.items()}
        self._lent, other._lent = set(self._bytes), set(self._bytes)
        return other

    def apply(self, effect: DiskEffect) -> None:
        """Does what the operation did."""
        match effect:
            case Write(node, offset, data):
                content = self._own(node)
                if len(content) < offset:
                    content.extend(bytes(offset - len(content)))
                content[offset : offset + len(data)] = data
            case Resize(node, size_bytes, grows):
                content = self._own(node)
                if not grows:
                    del content[size_bytes:]
                content.extend(bytes(max(0, size_bytes - len(content))))
            case Names(changes):
                for directory, name, node in changes:
                    entries = self._entries.setdefault(directory, {})
                    if node is None:
                        entries.pop(name, None)
                    else:
                        entries[name] = node
            case _:
                pass

    def replay(self, effects: Iterable[DiskEffect]) -> Disk:
        """The same, after all of these."""
        for effect in effects:
            self.apply(effect)
        return self

    def find(self, path: str) -> int | None:
        """The node at a path below the root; None where nothing is. Links are not followed."""
        node = ROOT
        for part in PurePosixPath(path).parts:
            found = self._entries.get(node, {}).get(part)
            if found is None:
                return None
            node = found
        return node

    def entry(self, directory: int, name: str) -> int | None:
        """The node that a name in a directory refers to."""
        return self._entries.get(directory, {}).get(name)

    def path_of(self, node: int) -> str | None:
        """A path of the node below the root; None where it has no name."""
        return "" if node == ROOT else next((path for path, found in self.tree() if found == node), None)

    def content(self, node: int) -> bytes:
        """The bytes of a file."""
        return bytes(self._bytes.get(node, b""))

    def tree(self, below: str = "") -> Iterator[tuple[str, int]]:
        """Every path below the root (or one of its directories) with its node, sorted, directories first."""
        start = self.find(below)
        if start is not None:
            yield from self._walk(below, start)

    def digest(self, below: Iterable[str] = ("",)) -> str:
        """One value for equal trees: names, kinds and bytes."""
        digest = hashlib.blake2b(digest_size=16)
        for start in below:
            for path, node in self.tree(start):
                digest.update(f"{path}\0{self._kinds[node]}\0".encode())
                if node not in self._digests:
                    self._digests[node] = hashlib.blake2b(self._bytes.get(node, b""), digest_size=16).digest()
                digest.update(self._digests[node])
        return digest.hexdigest()

    def materialise(self, target: Path, below: Iterable[str] = ("",)) -> None:
        """Writes the tree below `target`, or only these directories of it; what stood there goes. The names of one file
        are hard links."""
        files: dict[int, Path] = {}
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for start in below:
            (target / start).mkdir(parents=True, exist_ok=True)
            for path, node in self.tree(start):
                place = target / path
                if self._kinds[node] == "directory":
                    place.mkdir()
                elif self._kinds[node] == "link":
                    place.symlink_to(os.fsdecode(self.content(node)))
                elif node in files:
                    place.hardlink_to(files[node])
                else:
                    files[node] = place
                    place.write_bytes(self._bytes.get(node, b""))

    def _own(self, node: int) -> bytearray:
        """The bytes of a file, to be changed."""
        self._digests.pop(node, None)
        if node in self._lent:
            self._lent.discard(node)
            self._bytes[node] = bytearray(self._bytes[node])
        return self._bytes.setdefault(node, bytearray())

    def _walk(self, path: str, node: int) -> Iterator[tuple[str, int]]:
        for name, child in sorted(self._entries.get(node, {}).items()):
            below = f"{path}/{name}" if path else name
            yield below, child
            if self._kinds[child] == "directory":
                yield from self._walk(below, child)
