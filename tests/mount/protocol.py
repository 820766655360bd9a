"""The messages between the kernel and a FUSE program that `ObjectTree` needs (linux/fuse.h, version 7.31)."""

from __future__ import annotations

import errno
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

REQUEST_BYTES_MAX = 1 << 20
WRITE_BYTES_MAX = 128 << 10
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_BIG_WRITES = 1 << 5
_SIZE = 1 << 3  # FATTR_SIZE
FORGET, BATCH_FORGET, INTERRUPT, DESTROY = 2, 42, 36, 38
UNANSWERED: Final = frozenset({FORGET, BATCH_FORGET, INTERRUPT})


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the kernel: what it wants, of which node, and its arguments."""

    opcode: int
    unique: int
    node: int
    body: bytes

    @classmethod
    def of(cls, data: bytes) -> Request:
        """From what `/dev/fuse` gave."""
        _, opcode, unique, node, *_ = _IN.unpack_from(data)
        return cls(opcode, unique, node, data[_IN.size :])

    def answer(self, body: bytes = b"", error: int = 0) -> bytes:
        """The reply; with `error`, an errno and nothing else."""
        body = b"" if error else body
        return _OUT.pack(_OUT.size + len(body), -error, self.unique) + body


class Attributes(NamedTuple):
    """The result of `stat` for a node."""

    node: int
    mode: int
    size: int
    changed_s: float


def init_answer(body: bytes) -> bytes:
    """Of the first request: our version and limits."""
    _, _, readahead, _ = struct.unpack_from("<IIII", body)
    return struct.pack("<IIIIHHIIHHI28x", 7, 31, readahead, _BIG_WRITES, 12, 10, WRITE_BYTES_MAX, 1, 256, 0, 0)


def attributes(of: Attributes) -> bytes:
    """`fuse_attr`."""
    seconds, nanoseconds = divmod(int(of.changed_s * 1e9), 10**9)
    links = 2 if stat.S_ISDIR(of.mode) else 1
    return struct.pack(
        "<QQQQQQIIIIIIIIII",
        *(of.node, of.size, -(-of.size // 512), seconds, seconds, seconds),
        *(nanoseconds, nanoseconds, nanoseconds, of.mode, links, 0, 0, 0, 4096, 0),
    )


def attributes_answer(of: Attributes, valid_s: int) -> bytes:
    """`fuse_attr_out`: the kernel asks again after `valid_s` seconds."""
    return struct.pack("<QII", valid_s, 0, 0) + attributes(of)


def entry_answer(of: Attributes, valid_s: int) -> bytes:
    """`fuse_entry_out`: the kernel asks again after `valid_s` seconds."""
    return struct.pack("<QQQQII", of.node, 0, valid_s, valid_s, 0, 0) + attributes(of)


def opened_answer(handle: int) -> bytes:
    """`fuse_open_out`."""
    return struct.pack("<QII", handle, 0, 0)


def filesystem_answer() -> bytes:
    """`fuse_statfs_out`: room for everything."""
    blocks = 1 << 28
    return struct.pack("<QQQQQIIII24x", blocks, blocks, blocks, 1 << 20, 1 << 20, 4096, 255, 4096, 0)


def names_in(body: bytes) -> list[str]:
    """The names at the end of a request, each with a zero byte."""
    return [part.decode("utf-8", "surrogateescape") for part in body.split(b"\0")[:-1]]


def directory_answer(entries: list[tuple[str, Attributes]], offset: int, size: int) -> bytes:
    """The entries from `offset` on that have room in `size` bytes."""
    found = b""
    for index, (name, of) in enumerate(entries[offset:], offset + 1):
        encoded = name.encode("utf-8", "surrogateescape")
        entry = struct.pack("<QQII", of.node, index, len(encoded), of.mode >> 12) + encoded
        entry += bytes(-len(entry) % 8)
        if len(found) + len(entry) > size:
            break
        found += entry
    return found


def new_size(body: bytes) -> int | None:
    """The size that a SETATTR asks for; None where it asks for something else."""
    valid, _, _, size = struct.unpack_from("<IIQQ", body)
    return size if valid & _SIZE else None


def answered(request: Request, acts: Mapping[int, Callable[[Request], bytes]]) -> bytes:
    """The reply to a request by the act of its opcode: ENOSYS without one, the errno of an `OSError` that it raises."""
    act = acts.get(request.opcode)
    if act is None:
        return request.answer(error=errno.ENOSYS)
    try:
        return request.answer(act(request))
    except OSError as error:
        return request.answer(error=error.errno or errno.EIO)
