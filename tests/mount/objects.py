"""A mounted bucket as a program sees it: objects under a tree of names, in memory.

Like GCSFuse on a bucket without a hierarchical namespace. A file becomes an object when it is closed or synced. A
rename copies and deletes; a renamed directory does that object by object. Hard links do not exist.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from tests.mount import protocol
from tests.mount.protocol import Attributes, Request


@dataclass(slots=True)
class Node:
    """A file or a directory. `content` is the object's; `unsynced` is what was written to the file since."""

    number: int
    names: dict[str, Node] | None = None  # None: a file
    content: bytes | None = None  # None: the object does not exist yet
    unsynced: bytearray | None = None
    changed_s: float = field(default_factory=time.time)

    @property
    def shown(self) -> bytes | bytearray:
        """The content that a reader on this mount gets."""
        return self.unsynced if self.unsynced is not None else self.content or b""

    def attributes(self) -> Attributes:
        """What `stat` shows."""
        mode = stat.S_IFREG | 0o644 if self.names is None else stat.S_IFDIR | 0o755
        return Attributes(self.number, mode, len(self.shown), self.changed_s)


def _below(names: dict[str, Node], prefix: str) -> Iterator[tuple[str, str]]:
    for name, node in names.items():
        if node.names is None:
            yield prefix + name, hashlib.sha256(node.shown).hexdigest()
        else:
            yield prefix + name, "directory"
            yield from _below(node.names, f"{prefix}{name}/")


@final
class ObjectTree:
    """The requests of the kernel, acted on. `changes` counts requests that change the bucket.

    After `changes_max` of them the mount is dead: every call fails with EIO, until `revive`, which also loses what was
    not an object yet. A listing shows a new name `listing_lag` changes late, a look at the name at once. The kernel
    may remember a name and its attributes for `cached_s` seconds.
    """

    def __init__(self, cached_s: int = 0) -> None:
        self._cached_s = cached_s
        self._numbers = itertools.count(2)
        self._root = Node(1, names={})
        self._nodes = {1: self._root}
        self._born: dict[int, int] = {}  # node: the change that made it
        self.changes = 0
        self.changes_max: int | None = None
        self.listing_lag = 0
        self.acts: dict[int, Callable[[Request], bytes]] = {
            1: self._lookup,
            3: lambda request: self._attributes(self._nodes[request.node]),
            4: self._set_attributes,
            9: self._make_directory,
            10: self._unlink,
            11: self._remove_directory,
            12: lambda request: self._rename(request, 8),
            14: self._open,
            15: self._read,
            16: self._write,
            17: lambda request: protocol.filesystem_answer(),
            18: self._close,
            20: self._sync,
            25: self._sync,
            26: lambda request: protocol.init_answer(request.body),
            27: lambda request: protocol.opened_answer(0),
            28: self._list,
            29: lambda request: b"",
            30: lambda request: b"",
            34: lambda request: b"",
            35: self._create,
            45: self._rename_with_flags,
            protocol.DESTROY: lambda request: b"",
        }

    @property
    def is_dead(self) -> bool:
        """Whether the limit of changes is reached."""
        return self.changes_max is not None and self.changes >= self.changes_max

    def answer(self, request: Request) -> bytes:
        """The reply to one request."""
        if self.is_dead and request.opcode not in (26, 18, 29, protocol.DESTROY):
            return request.answer(error=errno.EIO)
        return protocol.answered(request, self.acts)

    def revive(self) -> None:
        """The mount after its program, and the host, have died: files that were not yet objects are lost."""
        self.changes, self.changes_max = 0, None
        self._drop_unsynced(self._root)

    def put(self, name: str, source: Path) -> None:
        """A copy of a directory as a new one at the top, not through the mount: another client of the bucket."""
        top = self._root.names
        assert top is not None
        top[name] = self._copied(source)

    def _copied(self, source: Path) -> Node:
        node = Node(next(self._numbers))
        if source.is_dir():
            node.names = {each.name: self._copied(each) for each in source.iterdir()}
        else:
            node.content = source.read_bytes()
        self._nodes[node.number] = node
        return node

    def delete(self, name: str) -> None:
        """Deletes a directory at the top with all in it, or nothing, not through the mount.

        Its nodes stay, as those of a deleted file do: the kernel may still ask for one that it knows.
        """
        assert self._root.names is not None
        self._root.names.pop(name, None)

    def listing(self, name: str) -> dict[str, str]:
        """Each file below a directory at the top by its SHA-256 and each directory as "directory", by relative path."""
        assert self._root.names is not None
        top = self._root.names.get(name)
        return dict(_below(top.names or {}, "")) if top is not None else {}

    def _drop_unsynced(self, node: Node) -> None:
        for name, each in list((node.names or {}).items()):
            each.unsynced = None
            if each.names is None and each.content is None:
                del (node.names or {})[name]
            self._drop_unsynced(each)

    def _change(self) -> None:
        """Counts a change of the bucket; raises EIO instead of the one that is too many."""
        if self.is_dead:
            raise OSError(errno.EIO, "the mount is dead")
        self.changes += 1

    def _directory(self, number: int) -> dict[str, Node]:
        names = self._nodes[number].names
        if names is None:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return names

    def _found(self, number: int, name: str) -> Node:
        node = self._directory(number).get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, name)
        return node

    def _new(self, parent: int, name: str, node: Node) -> bytes:
        if name in self._directory(parent):
            raise FileExistsError(errno.EEXIST, name)
        self._directory(parent)[name] = node
        self._nodes[node.number] = node
        self._born[node.number] = self.changes
        return self._entry(node)

    def _entry(self, node: Node) -> bytes:
        return protocol.entry_answer(node.attributes(), self._cached_s)

    def _attributes(self, node: Node) -> bytes:
        return protocol.attributes_answer(node.attributes(), self._cached_s)

    def _lookup(self, request: Request) -> bytes:
        return self._entry(self._found(request.node, protocol.names_in(request.body)[0]))

    def _set_attributes(self, request: Request) -> bytes:
        node, size = self._nodes[request.node], protocol.new_size(request.body)
        if size is not None:
            buffer = self._buffer(node)
            buffer[:] = buffer[:size] + bytes(max(0, size - len(buffer)))
        return self._attributes(node)

    def _make_directory(self, request: Request) -> bytes:
        self._change()
        return self._new(request.node, protocol.names_in(request.body[8:])[0], Node(next(self._numbers), names={}))

    def _create(self, request: Request) -> bytes:
        node = Node(next(self._numbers), unsynced=bytearray())  # no object, and no change of the bucket, until closed
        return self._new(request.node, protocol.names_in(request.body[16:])[0], node) + protocol.opened_answer(0)

    def _unlink(self, request: Request) -> bytes:
        name = protocol.names_in(request.body)[0]
        self._found(request.node, name)
        self._change()
        del self._directory(request.node)[name]
        return b""

    def _remove_directory(self, request: Request) -> bytes:
        name = protocol.names_in(request.body)[0]
        if self._found(request.node, name).names:
            raise OSError(errno.ENOTEMPTY, name)
        return self._unlink(request)

    def _open(self, request: Request) -> bytes:
        if struct.unpack_from("<I", request.body)[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return protocol.opened_answer(0)

    def _read(self, request: Request) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", request.body)
        return bytes(self._nodes[request.node].shown[offset : offset + size])

    def _write(self, request: Request) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", request.body)
        node, data = self._nodes[request.node], request.body[40 : 40 + size]
        buffer = self._buffer(node)
        buffer.extend(bytes(max(0, offset - len(buffer))))
        buffer[offset : offset + size] = data
        node.changed_s = time.time()
        return struct.pack("<II", size, 0)

    def _buffer(self, node: Node) -> bytearray:
        if node.unsynced is None:
            node.unsynced = bytearray(node.content or b"")
        return node.unsynced

    def _sync(self, request: Request) -> bytes:
        node = self._nodes[request.node]
        if node.unsynced is not None:
            self._change()
            node.content, node.unsynced = bytes(node.unsynced), None
        return b""

    def _close(self, request: Request) -> bytes:
        return b""  # the kernel has sent a FLUSH before

    def _list(self, request: Request) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", request.body)
        shown = [
            (name, node.attributes())
            for name, node in self._directory(request.node).items()
            if not self.listing_lag or self._born.get(node.number, 0) + self.listing_lag <= self.changes
        ]
        return protocol.directory_answer(shown, offset, size)

    def _rename_with_flags(self, request: Request) -> bytes:
        if struct.unpack_from("<QI", request.body)[1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._rename(request, 16)

    def _rename(self, request: Request, names_at: int) -> bytes:
        (target,) = struct.unpack_from("<Q", request.body)
        old, new = protocol.names_in(request.body[names_at:])
        node, standing = self._found(request.node, old), self._directory(target).get(new)
        if standing is not None and standing.names:
            raise OSError(errno.ENOTEMPTY, new)
        if node.names is not None:
            self._move_directory(self._directory(request.node), old, self._directory(target), new)
        else:
            self._move_file(self._directory(request.node), old, self._directory(target), new)
        return b""

    def _move_file(self, source: dict[str, Node], old: str, target: dict[str, Node], new: str) -> None:
        node = source[old]
        self._change()
        copied = Node(next(self._numbers), content=node.content, unsynced=node.unsynced, changed_s=node.changed_s)
        self._nodes[copied.number] = target[new] = copied
        self._change()
        del source[old]
        self._nodes[node.number] = copied  # the kernel keeps the old number for the new name

    def _move_directory(self, source: dict[str, Node], old: str, target: dict[str, Node], new: str) -> None:
        node = source[old]
        self._change()
        copied = Node(next(self._numbers), names={})
        self._nodes[copied.number] = target[new] = copied
        assert node.names is not None
        assert copied.names is not None
        for name in sorted(node.names):
            move = self._move_file if node.names[name].names is None else self._move_directory
            move(node.names, name, copied.names, name)
        self._change()
        del source[old]
        self._nodes[node.number] = copied
