"""Decodes one node of an OCDBT tree from its bytes.

The format is TensorStore's (its page "ocdbt key-value store driver", Storage format): a header, columns of varints,
keys that share prefixes, and a CRC-32C. TensorStore's own `ocdbt.dump` of 0.1.86 never frees what it returns, 4 to
5 MiB for a step of 4,000 leaves.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import google_crc32c
import numpy as np
import zstandard

NODE_BYTES_MAX: Final = 1 << 30  # decoded; Orbax's have some 100 MB
_MAGIC: Final = 0x0CDB20DE.to_bytes(4, "big")
_HEAD_BYTES, _CRC_BYTES = 12, 4  # magic and length; the checksum ends a node
_ENTRIES_MAX = 1 << 20  # this limit and the next two are TensorStore's
_NAME_BYTES_MAX = (1 << 16) - 1
_INLINE_BYTES_MAX = 1 << 20
_VARINT_BYTES_MAX = 10
_PIECE_BYTES = 1 << 20
_FILE_BYTES_MAX = 1 << 63  # a tree may hold 64 bits; the system allows 63


class Placed(NamedTuple):
    """The place of a value: bytes `[start, start + length)` of a file, by its path below the tree's directory."""

    path: str
    start: int
    length: int


class Child(NamedTuple):
    """The place of a node below another. Its keys go after `prefix`, its paths after `directory`."""

    placed: Placed
    prefix: bytes
    directory: bytes


class Node(NamedTuple):
    """The fields of a node: its `children`, or (at height 0) its `values`, the key of each with its place or bytes."""

    height: int
    children: list[Child]
    values: list[tuple[bytes, Placed | bytes]]


def decoded_node(data: bytes, at: Child) -> Node:
    """The node with bytes `data`, which were read `at` their place. Keys and paths are whole.

    Cost: some microseconds an entry. Raises ValueError if they are not a node that a writer would write.
    """
    body = _Columns(_body(data))
    (height,) = body.take(1)
    files = _files(body, at.directory)
    count = body.varint()
    if not 0 < count <= _ENTRIES_MAX:
        raise ValueError(f"a node of {count} entries")
    shared = [0, *body.varints(count - 1)]
    own = body.varints(count)
    common = body.varints(count) if height else []
    keys = _front_coded(body, shared, own, at.prefix)
    if not height:
        values = list(zip(keys, _values(files, body, count), strict=True))
        body.require_end()
        return Node(0, [], [(key, value) for key, value in values if value is not None])
    children = []
    for (placed, base), key, length in zip(_places(files, body, count), keys, common, strict=True):
        if placed is None:
            raise ValueError("a node is where no file can be")
        children.append(Child(placed, key[: len(at.prefix) + length], base))
    body.varints(3 * count)  # statistics of each
    body.require_end()
    return Node(height, children, [])


def _body(data: bytes) -> memoryview:
    view = memoryview(data)
    whole = len(view) >= _HEAD_BYTES + 2 + _CRC_BYTES and int.from_bytes(view[4:_HEAD_BYTES], "little") == len(view)
    if not whole or view[:4] != _MAGIC:
        raise ValueError("no node of a database is there")
    if int.from_bytes(view[-_CRC_BYTES:], "little") != google_crc32c.value(bytes(view[:-_CRC_BYTES])):
        raise ValueError("the checksum of a node is wrong")
    version, compression = view[_HEAD_BYTES : _HEAD_BYTES + 2]
    body = view[_HEAD_BYTES + 2 : -_CRC_BYTES]
    if version != 0 or compression > 1:
        raise ValueError(f"a node of version {version}, compressed by method {compression}")
    return memoryview(_decompressed(body)) if compression else body


def _decompressed(data: memoryview) -> bytearray:
    found = bytearray()
    try:
        for piece in zstandard.ZstdDecompressor().read_to_iter(data, write_size=_PIECE_BYTES):
            found += piece
            if len(found) > NODE_BYTES_MAX:
                raise ValueError(f"a node of more than {NODE_BYTES_MAX} bytes")
    except zstandard.ZstdError as error:
        raise ValueError(f"a node cannot be decompressed: {error}") from error
    return found


@final
class _Columns:
    """The body of a node, column by column. Raises ValueError where a column goes beyond the end."""

    def __init__(self, body: memoryview):
        self._body, self._at = body, 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > len(self._body) - self._at:
            raise ValueError("a node ends early")
        self._at += count
        return bytes(self._body[self._at - count : self._at])

    def varint(self) -> int:
        """The next number: 7 bits a byte, the lowest first."""
        return self.varints(1)[0]

    def varints(self, count: int) -> list[int]:
        """The next numbers."""
        window = np.frombuffer(self._body[self._at : self._at + count * _VARINT_BYTES_MAX], np.uint8)
        last = np.flatnonzero(window < 0x80)[:count]
        if len(last) < count:
            raise ValueError("a node ends early")
        first = np.concatenate([[0], last[:-1] + 1]) if count else last
        lengths = last - first + 1
        if count and lengths.max() > _VARINT_BYTES_MAX:
            raise ValueError("a number of more than 64 bits")
        found = np.zeros(count, np.uint64)
        for byte in range(int(lengths.max(initial=0))):
            some = lengths > byte
            bits = (window[first[some] + byte] & 0x7F).astype(np.uint64)
            found[some] |= bits << np.uint64(7 * byte)
        self._at += int(last[-1]) + 1 if count else 0
        return found.tolist()

    def require_end(self) -> None:
        """Raises ValueError if something is left."""
        if self._at != len(self._body):
            raise ValueError("a node goes on after its end")


def _front_coded(body: _Columns, shared: list[int], own: list[int], prefix: bytes = b"") -> list[bytes]:
    """Names of which each begins with `shared` bytes of the one before it; `prefix` goes before all of them."""
    longest = max((len(prefix) + kept + length for kept, length in zip(shared, own, strict=True)), default=0)
    if longest > _NAME_BYTES_MAX or sum(shared) + sum(own) + len(prefix) * len(own) > NODE_BYTES_MAX:
        raise ValueError(f"a node has names of {longest} bytes, or too many")
    joined = body.take(sum(own))
    found, last, at = [], b"", 0
    for kept, length in zip(shared, own, strict=True):
        if kept > len(last):
            raise ValueError("a name shares more than the one before it has")
        last = last[:kept] + joined[at : at + length]
        at += length
        found.append(prefix + last)
    return found


def _files(body: _Columns, directory: bytes) -> list[tuple[str | None, bytes]]:
    """The files that a node names: the path of each, None for one that no writer would name, and the directory that
    goes before the paths of a node in it."""
    count = body.varint()
    if count > _ENTRIES_MAX:
        raise ValueError(f"a node of {count} files")
    shared = [0, *body.varints(count - 1)] if count else []
    own = body.varints(count)
    bases = body.varints(count)
    paths = _front_coded(body, shared, own)
    return [(_path(directory + path), directory + path[:base]) for path, base in zip(paths, bases, strict=True)]


def _path(raw: bytes) -> str | None:
    path = raw.decode(errors="replace")
    return None if not path or path.startswith("/") or ".." in path.split("/") else path


def _places(
    files: list[tuple[str | None, bytes]], body: _Columns, count: int, lengths: list[int] | None = None
) -> list[tuple[Placed | None, bytes]]:
    """Places of `count` values or nodes, each with the directory of its file; None for one that cannot be read."""
    numbers, starts = body.varints(count), body.varints(count)
    lengths = body.varints(count) if lengths is None else lengths
    if max(numbers, default=-1) >= len(files):
        raise ValueError("a node names a file that it does not have")
    found = []
    for number, start, length in zip(numbers, starts, lengths, strict=True):
        path, base = files[number]
        placed = Placed(path, start, length) if path is not None and start + length < _FILE_BYTES_MAX else None
        found.append((placed, base))
    return found


def _values(files: list[tuple[str | None, bytes]], body: _Columns, count: int) -> list[Placed | bytes | None]:
    lengths, kinds = body.varints(count), body.take(count)
    if max(kinds) > 1:
        raise ValueError("a node has a value of an unknown kind")
    if any(length > _INLINE_BYTES_MAX for length, kind in zip(lengths, kinds, strict=True) if not kind):
        raise ValueError(f"a node holds a value of more than {_INLINE_BYTES_MAX} bytes")
    outside = [length for length, kind in zip(lengths, kinds, strict=True) if kind]
    placed = iter(_places(files, body, len(outside), outside))
    return [next(placed)[0] if kind else body.take(length) for length, kind in zip(lengths, kinds, strict=True)]
