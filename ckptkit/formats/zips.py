"""Zip archives of tensors, read by byte range: entries are checked before anything is taken from them."""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib
from dataclasses import dataclass
from typing import TypeVar, final

import numpy as np

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.ranges import RangeFile, Ranges
from ckptkit.inspection.places import readable

Bytes = TypeVar("Bytes", bytes, memoryview)

_LOCAL_HEADER = 30
_RATIO_MAX = 1040  # deflate's bound is 1032:1; a member that claims more is not valid
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipEntry:
    """One member: the position of its stored bytes, and its length."""

    name: str
    start: int
    stored_bytes: int
    size_bytes: int
    compressed: bool
    comment: bytes
    checksum: int  # CRC-32 of what it holds uncompressed


def read_entries(ranges: Ranges) -> dict[str, ZipEntry]:
    """The members of an archive by name. Cost: its directory, and a small read per member.

    Raises `CorruptCheckpointError` for members that overlap, occur twice, are encrypted, or claim more than deflate can
    hold.
    """
    with readable(ranges.path):
        try:
            with zipfile.ZipFile(RangeFile(ranges)) as archive:  # pyright: ignore[reportArgumentType]
                infos = archive.infolist()
        except (
            zipfile.BadZipFile,
            zipfile.LargeZipFile,
            NotImplementedError,
            struct.error,
            EOFError,
            OSError,
        ) as error:
            raise ValueError(f"no zip archive: {error}") from error
        entries = {info.filename: _entry(ranges, info) for info in infos if not info.is_dir()}
        if len(entries) != sum(not info.is_dir() for info in infos):
            raise ValueError("a member occurs twice in it")
        at = 0
        for entry in sorted(entries.values(), key=lambda entry: entry.start):
            if entry.start < at:
                raise ValueError(f"member {entry.name} overlaps another")
            at = entry.start + entry.stored_bytes
        return entries


def _entry(ranges: Ranges, info: zipfile.ZipInfo) -> ZipEntry:
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"member {info.filename} is encrypted, or compressed as method {info.compress_type}")
    compressed = info.compress_type == zipfile.ZIP_DEFLATED
    if compressed and info.file_size > info.compress_size * _RATIO_MAX:
        raise ValueError(f"member {info.filename} claims {info.file_size} bytes in {info.compress_size}")
    if not compressed and info.file_size != info.compress_size:
        raise ValueError(f"member {info.filename} has {info.compress_size} bytes and claims {info.file_size}")
    header = ranges.read(info.header_offset, _LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"member {info.filename} is not at the place that the directory gives")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    start = info.header_offset + _LOCAL_HEADER + name_bytes + extra_bytes
    if start + info.compress_size > ranges.size:
        raise ValueError(f"member {info.filename} ends behind the file; it is truncated")
    return ZipEntry(
        name=info.filename,
        start=start,
        stored_bytes=info.compress_size,
        size_bytes=info.file_size,
        compressed=compressed,
        comment=info.comment,
        checksum=info.CRC,
    )


@final
class EntryRanges:
    """The uncompressed bytes of a member as a file. A compressed member is best read in order: a read further on also
    decompresses the bytes between, and a read further back begins at the start.

    If it is `summed`, a reader that has read the whole member in order gets `CorruptCheckpointError` on a wrong
    checksum. Bytes that are read in parts, or in another order, are not compared.
    """

    def __init__(self, ranges: Ranges, entry: ZipEntry, *, summed: bool = False):
        self._sum, self._summed_to, self._lock = 0, 0 if summed else entry.size_bytes, threading.Lock()
        self.path = f"{ranges.path}, member {entry.name}"
        self.size = entry.size_bytes
        self._ranges = ranges
        self._entry = entry
        self._begin()

    def read(self, start: int, count: int) -> bytes:
        """See `Ranges.read`."""
        if start < 0 or count < 0 or start + count > self.size:
            raise CorruptCheckpointError(
                f"{self.path} has {self.size} bytes, and bytes {start} to {start + count} are named in it",
                path=self.path,
            )
        if not self._entry.compressed:
            return self._checked(start, self._ranges.read(self._entry.start + start, count))
        if start < self._at:
            self._begin()
        while self._at < start:
            self._next(min(_READ_BYTES, start - self._at))
        parts = []
        while count:
            parts.append(self._next(min(_READ_BYTES, count)))
            count -= len(parts[-1])
        return self._checked(start, b"".join(parts))

    def read_into(self, start: int, into: np.ndarray) -> None:
        """See `Ranges.read_into`."""
        if not self._entry.compressed and start + into.nbytes <= self.size:
            self._ranges.read_into(self._entry.start + start, into)
            self._checked(start, into.data)
            return
        for at in range(0, into.nbytes, _READ_BYTES):
            part = into[at : at + _READ_BYTES]
            part[:] = np.frombuffer(self.read(start + at, part.nbytes), np.uint8)

    def close(self) -> None:
        """Does nothing: the owner of the archive's file closes it."""

    def _checked(self, start: int, data: Bytes) -> Bytes:
        """Returns `data`. The part that continues the bytes summed before is added to the checksum."""
        with self._lock:
            known = self._summed_to
            if start <= known < start + len(data):
                self._sum = zlib.crc32(memoryview(data)[known - start :], self._sum)
                self._summed_to = start + len(data)
                if self._summed_to == self.size and self._sum != self._entry.checksum:
                    raise CorruptCheckpointError(
                        f"{self.path} does not match its checksum in the archive", path=self.path
                    )
        return data

    def _begin(self) -> None:
        self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        self._taken = 0
        self._at = 0
        self._left = b""

    def _next(self, count: int) -> bytes:
        """At most `count` of the bytes that follow, and at least one."""
        while True:
            raw = self._left
            if not raw and self._taken < self._entry.stored_bytes:
                more = min(_READ_BYTES // 16, self._entry.stored_bytes - self._taken)
                raw = self._ranges.read(self._entry.start + self._taken, more)
                self._taken += more
            try:
                found = self._inflate.decompress(raw, count)
            except zlib.error as error:
                raise CorruptCheckpointError(f"{self.path} cannot be decompressed: {error}", path=self.path) from error
            self._left = self._inflate.unconsumed_tail
            if found:
                self._at += len(found)
                return found
            if self._inflate.eof or (not self._left and self._taken >= self._entry.stored_bytes):
                raise CorruptCheckpointError(f"{self.path} ends at byte {self._at} of {self.size}", path=self.path)
