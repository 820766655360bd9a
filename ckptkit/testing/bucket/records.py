"""The records of objects and buckets, the names that Google accepts, and the JSON on disk."""

import base64
import hashlib
import re
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.content import Content

JsonObject = dict[str, Any]

METADATA_LIMIT_BYTES: Final = 8 * 1024  # https://cloud.google.com/storage/quotas: custom metadata per object
_SETTABLE: Final = (
    "contentType",
    "contentEncoding",
    "contentDisposition",
    "contentLanguage",
    "cacheControl",
    "customTime",
    "storageClass",
    "metadata",
)
OBJECT_NAME_LIMIT_BYTES: Final = 1024
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """One live object; a new generation or metageneration is a new record."""

    name: str
    generation: int
    metageneration: int = 1
    created_us: int
    updated_us: int
    content: Content
    fields: JsonObject

    @property
    def etag(self) -> str:
        """Differs between any two generations or metagenerations."""
        return base64.b64encode(f"{self.generation}/{self.metageneration}".encode()).decode("ascii")

    def patched(self, fields: JsonObject) -> "ObjectRecord":
        """The next metageneration with `fields`."""
        return replace(self, fields=fields, metageneration=self.metageneration + 1, updated_us=now_us())

    @classmethod
    def from_json(cls, value: JsonObject) -> "ObjectRecord":
        """Read the `asdict` of a record."""
        return cls(**{**value, "content": Content(**value["content"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRecord:
    """One bucket."""

    name: str
    created_us: int
    updated_us: int
    metageneration: int = 1
    fields: JsonObject = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """Buckets have no generations; a precondition on one never holds."""
        return -1

    @property
    def etag(self) -> str:
        """Differs between any two metagenerations."""
        return base64.b64encode(str(self.metageneration).encode()).decode("ascii")

    def patched(self, fields: JsonObject) -> "BucketRecord":
        """The next metageneration with `fields`."""
        return replace(self, fields=fields, metageneration=self.metageneration + 1, updated_us=now_us())


def settable_fields(metadata: JsonObject) -> JsonObject:
    """The part of an object resource that a client may set; 400 when it is too large or of wrong types."""
    return _checked({key: metadata[key] for key in _SETTABLE if metadata.get(key) is not None})


def patched_fields(fields: JsonObject, change: JsonObject) -> JsonObject:
    """`fields` with `change` applied: null removes, `metadata` merges key by key."""
    result = dict(fields)
    for key in _SETTABLE:
        if key not in change:
            continue
        value = change[key]
        if key == "metadata" and isinstance(value, dict):
            merged = {**result.get("metadata", {}), **value}
            value = {name: text for name, text in merged.items() if text is not None}
        if value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return _checked(result)


def now_us() -> int:
    """The wall clock; generations are made of it, as Google's are."""
    return time.time_ns() // 1000


def _checked(fields: JsonObject) -> JsonObject:
    custom = fields.get("metadata", {})
    if not isinstance(custom, dict) or not all(isinstance(value, str) for value in custom.values()):
        raise errors.invalid("Invalid value for metadata: it maps strings to strings.")
    for key, value in fields.items():
        if key != "metadata" and (not isinstance(value, str) or not value.isprintable()):
            raise errors.invalid(f"Invalid value for {key}: {str(value)[:64]!a}")
    if sum(_size_bytes(key) + _size_bytes(value) for key, value in custom.items()) > METADATA_LIMIT_BYTES:
        raise errors.invalid("The metadata for your object is too large.")
    return fields


def _size_bytes(text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeError as error:
        raise errors.invalid("The metadata is not valid UTF-8.") from error


def decode_segment(segment: str) -> str:
    """Percent-decode one path segment; 400 when it is not UTF-8."""
    try:
        return unquote_to_bytes(segment).decode("utf-8")
    except UnicodeError as error:
        raise errors.invalid(f"Invalid percent-encoding in the request path: {segment!a}") from error


def check_bucket(name: str) -> str:
    """Return `name`, or raise 400 as Google does for a name that no bucket can have."""
    if _BUCKET.fullmatch(name) is None or any(len(part) > 63 for part in name.split(".")):
        raise errors.invalid(f"Invalid bucket name: '{ascii(name)[1:-1]}'")
    return name


def check_object(name: object) -> str:
    """Return `name`, or raise 400 for one that no object can have."""
    if not isinstance(name, str) or not name:
        raise errors.required("name")
    try:
        encoded = name.encode("utf-8")
    except UnicodeError as error:
        raise errors.invalid("The object name is not valid UTF-8.") from error
    if len(encoded) > OBJECT_NAME_LIMIT_BYTES:
        raise errors.invalid(
            f"The maximum object length is {OBJECT_NAME_LIMIT_BYTES} characters, but got a name with "
            f"{len(encoded)} characters: '{name[:32]}...'"
        )
    if name in {".", ".."} or "\r" in name or "\n" in name or name.startswith(".well-known/acme-challenge/"):
        raise errors.invalid(f"Disallowed object name: {name!a}")
    return name


def file_name(name: str) -> str:
    """The hash under which a name is stored, so that no name can lead out of its directory."""
    return hashlib.sha256(name.encode("utf-8")).hexdigest()
