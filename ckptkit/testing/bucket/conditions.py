"""The conditions and byte ranges of a request. Preconditions are checked under the lock of the commit."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.records import BucketRecord, ObjectRecord

Versioned = ObjectRecord | BucketRecord
_NUMBER: Final = re.compile(r"\d{1,19}")
_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.IGNORECASE)
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preconditions:
    """All must hold at the moment of the commit; generation 0 means that no live object has the name."""

    generation: int | None = None
    generation_not: int | None = None
    metageneration: int | None = None
    metageneration_not: int | None = None
    etag: str | None = None
    etag_not: str | None = None

    @classmethod
    def parse(cls, query: Mapping[str, str], headers: Mapping[str, str]) -> "Preconditions":
        """Read `ifGenerationMatch` and its kin from the query, etags from the headers."""
        return cls(
            generation=number(query, "ifGenerationMatch"),
            generation_not=number(query, "ifGenerationNotMatch"),
            metageneration=number(query, "ifMetagenerationMatch"),
            metageneration_not=number(query, "ifMetagenerationNotMatch"),
            etag=headers.get("If-Match"),
            etag_not=headers.get("If-None-Match"),
        )

    @classmethod
    def parse_source(cls, query: Mapping[str, str]) -> "Preconditions":
        """Read `ifSourceGenerationMatch` and its kin, for copy, rewrite and move."""
        return cls(
            generation=number(query, "ifSourceGenerationMatch"),
            generation_not=number(query, "ifSourceGenerationNotMatch"),
            metageneration=number(query, "ifSourceMetagenerationMatch"),
            metageneration_not=number(query, "ifSourceMetagenerationNotMatch"),
        )

    @classmethod
    def parse_xml(cls, headers: Mapping[str, str]) -> "Preconditions":
        """Read the XML API's `x-goog-if-*` headers."""
        return cls(
            generation=number(headers, "x-goog-if-generation-match"),
            generation_not=number(headers, "x-goog-if-generation-not-match"),
            metageneration=number(headers, "x-goog-if-metageneration-match"),
            metageneration_not=number(headers, "x-goog-if-metageneration-not-match"),
            etag=headers.get("If-Match"),
            etag_not=headers.get("If-None-Match"),
        )

    def check(self, found: Versioned | None) -> None:
        """Raise 412 when a match fails and 304 when a `NotMatch` fails; None: no live object has the name."""
        if self._mismatched(found):
            raise errors.condition_not_met()
        if self._forbidden(found):
            # https://cloud.google.com/storage/docs/request-preconditions
            raise errors.GoogleError(304, "notModified", "")

    def check_source(self, found: Versioned) -> None:
        """Raise 412 when anything fails: the source of a copy has no 304."""
        if self._mismatched(found) or self._forbidden(found):
            raise errors.condition_not_met()

    def _mismatched(self, found: Versioned | None) -> bool:
        if self.generation is not None and self.generation != (found.generation if found else 0):
            return True
        if self.metageneration is not None and (found is None or self.metageneration != found.metageneration):
            return True
        return self.etag is not None and (found is None or not _lists(self.etag, found.etag))

    def _forbidden(self, found: Versioned | None) -> bool:
        if found is None:  # a generation that must not match is one of a live object
            return self.generation_not is not None
        if self.generation_not == found.generation or self.metageneration_not == found.metageneration:
            return True
        return self.etag_not is not None and _lists(self.etag_not, found.etag)


def number(values: Mapping[str, str], key: str) -> int | None:
    """The number under `key`, None when absent, 400 when it is not one."""
    text = values.get(key)
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None:
        raise errors.invalid(f"Invalid value for {key}: {text[:64]!a}")
    return int(text)


def _lists(header: str, etag: str) -> bool:
    return any(item.strip().strip('"') in {"*", etag} for item in header.split(","))


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
        raise errors.GoogleError(
            416,
            "requestedRangeNotSatisfiable",
            "Request range not satisfiable",
            location=("header", "Range"),
            headers={"Content-Range": f"bytes */{size_bytes}"},
        )
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
