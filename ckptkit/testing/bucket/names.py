"""The bucket and object names that Google accepts, and the file name of each."""

import hashlib
import re
from typing import Final
from urllib.parse import unquote_to_bytes

from ckptkit.testing.bucket import errors

OBJECT_NAME_LIMIT_BYTES: Final = 1024
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


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
