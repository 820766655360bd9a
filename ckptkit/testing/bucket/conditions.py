"""Generation, metageneration and etag preconditions, checked under the lock of the commit."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from ckptkit.testing.bucket import errors

_NUMBER: Final = re.compile(r"\d{1,19}")


class Versioned(Protocol):
    """The state that a precondition checks."""

    @property
    def generation(self) -> int: ...  # noqa: D102

    @property
    def metageneration(self) -> int: ...  # noqa: D102

    @property
    def etag(self) -> str: ...  # noqa: D102


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

    def check_read(self, found: Versioned) -> None:
        """Raise 412 when a match fails and 304 when a `NotMatch` fails."""
        if self._mismatched(found):
            raise errors.condition_not_met()
        if self._forbidden(found):
            raise errors.not_modified()

    def check_write(self, found: Versioned | None) -> None:
        """Raise as `check_read` does; `found` is None when no live object has the name."""
        if self._mismatched(found):
            raise errors.condition_not_met()
        if self._forbidden(found):
            raise errors.not_modified()

    def check_source(self, found: Versioned) -> None:
        """Raise 412 when anything fails: the source of a copy has no 304."""
        if self._mismatched(found) or self._forbidden(found):
            raise errors.condition_not_met()

    def as_json(self) -> dict[str, int | str]:
        """The conditions that a resumable session keeps on disk."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def _mismatched(self, found: Versioned | None) -> bool:
        if self.generation is not None and self.generation != (found.generation if found else 0):
            return True
        if self.metageneration is not None and (found is None or self.metageneration != found.metageneration):
            return True
        return self.etag is not None and (found is None or not _lists(self.etag, found.etag))

    def _forbidden(self, found: Versioned | None) -> bool:
        if found is None:  # a generation that must not match is one of a live object
            return self.generation_not is not None
        if self.generation_not == found.generation:
            return True
        if self.metageneration_not == found.metageneration:
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
