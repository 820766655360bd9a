"""Rewrites that take several calls: the token holds the progress of one, and is valid for its request alone."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ckptkit.testing.bucket import errors
from ckptkit.testing.bucket.conditions import number
from ckptkit.testing.bucket.records import BucketRecord, JsonObject, ObjectRecord, now_us
from ckptkit.testing.bucket.resources import location_of, storage_class_of

TOKEN_LIFE_US: Final = 7 * 86_400 * 1_000_000  # https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite
CALL_BYTES: Final = 4 << 20  # of one call, where the caller leaves it to the service
_UNIT_BYTES: Final = 1 << 20
_TOKEN_LENGTH_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a rewrite is after a call. `token` leads to the next call, and is None once all bytes are rewritten."""

    rewritten_bytes: int
    token: str | None


def moves_bytes(source: ObjectRecord, origin: BucketRecord, target: BucketRecord, fields: JsonObject) -> bool:
    """Whether a rewrite changes location or storage class: only then it may need several calls."""
    wanted = fields.get("storageClass") or storage_class_of(target)
    return location_of(origin) != location_of(target) or wanted != storage_class_of(source)


def advance(source: ObjectRecord, query: Mapping[str, str], request: JsonObject) -> Progress:
    """One call's part of the rewrite of `source`; `request` is all that has to be the same in each call.

    Raises 400 for a token of another request and 410 for one that is too old.
    """
    limit_bytes = number(query, "maxBytesRewrittenPerCall") or CALL_BYTES
    if limit_bytes % _UNIT_BYTES:
        raise errors.invalid("maxBytesRewrittenPerCall must be an integral multiple of 1048576.")
    digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    began_us, done_bytes, size_bytes = now_us(), 0, source.content.size_bytes
    if token := query.get("rewriteToken"):
        known = _read(token)
        if known.get("request") != digest or known.get("generation") != source.generation:
            raise errors.invalid("The rewrite token does not belong to this request.")
        began_us, done_bytes = known["began_us"], known["done_bytes"]
        if now_us() - began_us > TOKEN_LIFE_US:
            raise errors.GoogleError(410, "gone", "The rewrite token has expired.")
    done_bytes = min(size_bytes, done_bytes + limit_bytes)
    if done_bytes == size_bytes:
        return Progress(rewritten_bytes=size_bytes, token=None)
    state = {"request": digest, "generation": source.generation, "began_us": began_us, "done_bytes": done_bytes}
    text = base64.urlsafe_b64encode(json.dumps(state).encode()).decode()
    return Progress(rewritten_bytes=done_bytes, token=text)


def _read(token: str) -> JsonObject:
    try:
        known = json.loads(base64.b64decode(token[:_TOKEN_LENGTH_MAX], altchars=b"-_", validate=True))
        if not all(isinstance(known[name], int) for name in ("generation", "began_us", "done_bytes")):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise errors.invalid(f"Invalid value for rewriteToken: {token[:64]!a}") from error
    return known
