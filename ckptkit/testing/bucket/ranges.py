"""`Range` of reads and `Content-Range` of resumable uploads. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from ckptkit.testing.bucket import errors

_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.IGNORECASE)
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Which bytes a chunk holds: `[start, stop)` of `total`; None where the header has a star."""

    start: int | None
    stop: int | None
    total: int | None


def read_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """`[start, stop)`, or None for the whole object: an invalid range is ignored (RFC 9110, 14.2).

    Several ranges in one header are ignored too. Raises 416 when the range begins after the last byte.
    """
    found = _RANGE.fullmatch(header.strip()) if header else None
    if found is None or not (found[1] or found[2]) or (found[1] and found[2] and int(found[1]) > int(found[2])):
        return None
    if not found[1]:
        start, stop = max(0, size_bytes - int(found[2])), size_bytes
    else:
        start, stop = int(found[1]), min(size_bytes, int(found[2]) + 1 if found[2] else size_bytes)
    if start >= size_bytes:
        raise errors.range_not_satisfiable(size_bytes)
    return start, stop


def chunk_range(header: str) -> ChunkRange:
    """Read `bytes a-b/n`, `bytes a-b/*`, `bytes */n` or `bytes */*`; 400 for anything else."""
    found = _CONTENT_RANGE.fullmatch(header.strip())
    if found is None:
        raise errors.invalid("Failed to parse Content-Range header.")
    total = None if found[3] == "*" else int(found[3])
    if found[1] is None:
        return ChunkRange(start=None, stop=None, total=total)
    start, stop = int(found[1]), int(found[2]) + 1
    if stop <= start or (total is not None and stop > total):
        raise errors.invalid("Failed to parse Content-Range header.")
    return ChunkRange(start=start, stop=stop, total=total)
