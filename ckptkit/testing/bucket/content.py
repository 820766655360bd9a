"""The bytes of one object: spooled to disk while they arrive, hashed on the way, immutable afterwards."""

import base64
import binascii
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import google_crc32c

from ckptkit.testing.bucket import errors

BLOCK_BYTES: Final = 256 * 1024  # Google persists resumable uploads in multiples of 256 KiB
_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The facts about stored bytes; `id` names their file, hashes are base64 as Google writes them."""

    id: str
    size_bytes: int
    crc32c: str
    md5: str | None
    components: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksums:
    """The client's claims about the bytes that it sends."""

    crc32c: str | None = None
    md5: str | None = None

    @classmethod
    def parse(cls, metadata: Mapping[str, object], headers: Mapping[str, str]) -> "Checksums":
        """Read `crc32c` and `md5Hash` of the metadata, `x-goog-hash` and `Content-MD5` of the headers."""
        found = {"crc32c": metadata.get("crc32c"), "md5": metadata.get("md5Hash")}
        for item in headers.get("x-goog-hash", "").split(","):
            algorithm, _, value = item.strip().partition("=")
            if algorithm in found and value:
                found[algorithm] = value
        if "Content-MD5" in headers:
            found["md5"] = headers["Content-MD5"]
        return cls(crc32c=_digest(found["crc32c"], 4, "CRC32C"), md5=_digest(found["md5"], 16, "MD5"))

    def check(self, content: Content) -> None:
        """Raise 400 when the bytes that arrived are not those that were sent."""
        for label, expected, found in (
            ("CRC32C", self.crc32c, content.crc32c),
            ("MD5 hash", self.md5, content.md5),
        ):
            if expected is not None and expected != found:
                raise errors.invalid(f'Provided {label} "{expected}" doesn\'t match calculated {label} "{found}".')


@final
class Spool:
    """Appends bytes to a file that no reader can see; `write` and `hash` may run in two other threads at once.

    Memory is bounded by the chunks given to one `append`, not by the size of the object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.stem
        self._file_lock = threading.Lock()
        self._hash_lock = threading.Lock()
        self._file = path.open("ab")
        self._rehash()

    def append(self, chunks: Sequence[bytes]) -> None:
        """Write and hash `chunks`."""
        self.write(chunks)
        self.hash(chunks)

    def write(self, chunks: Sequence[bytes]) -> None:
        """Half of `append`: the file; the caller hashes the same chunks in the same order."""
        with self._file_lock:
            for chunk in chunks:
                self._file.write(chunk)

    def hash(self, chunks: Sequence[bytes]) -> None:
        """The other half of `append`: size and hashes."""
        with self._hash_lock:
            for chunk in chunks:
                self._absorb(chunk)

    def drop_partial_block(self) -> None:
        """Forget what was not hashed and the bytes after the last whole block; reads the file if there are any."""
        with self._file_lock:
            self._file.flush()
            found_bytes = self.path.stat().st_size
            if found_bytes == self.size_bytes and found_bytes % BLOCK_BYTES == 0:
                return
            kept_bytes = min(found_bytes, self.size_bytes)
            self._file.truncate(kept_bytes - kept_bytes % BLOCK_BYTES)
            self._rehash()

    def seal(self, *, components: int | None = None) -> Content:
        """Flush, and return the content that was written; a composite has no MD5, as with Google."""
        with self._file_lock, self._hash_lock:
            self._file.flush()
            return Content(
                id=self.id,
                size_bytes=self.size_bytes,
                crc32c=_base64(self._crc32c.to_bytes(4, "big")),
                md5=None if components else _base64(self._md5.digest()),
                components=components,
            )

    def close(self) -> None:
        """Stop writing and leave the file."""
        with self._file_lock:
            self._file.close()

    def discard(self) -> None:
        """Stop writing and remove the file; a committed object keeps its own link to the bytes."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _absorb(self, chunk: bytes) -> None:
        self.size_bytes += len(chunk)
        self._crc32c = google_crc32c.extend(self._crc32c, chunk)
        self._md5.update(chunk)

    def _rehash(self) -> None:
        self.size_bytes = 0
        self._crc32c = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        with self._hash_lock, self.path.open("rb") as file:
            while chunk := file.read(_COPY_BYTES):
                self._absorb(chunk)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode("ascii")


def _digest(value: object, length_bytes: int, label: str) -> str | None:
    if value is None:
        return None
    try:
        digest = base64.b64decode(str(value), validate=True)
    except (binascii.Error, ValueError) as error:
        raise errors.invalid(f"Invalid {label} value: {str(value)[:64]!a}") from error
    if len(digest) != length_bytes:
        raise errors.invalid(f"Invalid {label} value: {str(value)[:64]!a}")
    return _base64(digest)
