"""Distinguishes damage from a store that did not answer, by the error of a failed read or write of a step."""

from __future__ import annotations

import errno
import json

from ckptkit.durable.cells.tensorstore_wait import UNREACHABLE
from ckptkit.errors import CheckpointError, TransientStoreError
from ckptkit.store.refused import is_refusal

_DAMAGED = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION", "Error decoding", "Truncated")
_TRANSIENT_ERRNOS = (
    errno.EAGAIN,
    errno.EINTR,
    errno.EIO,  # of a network mount
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTUNREACH,
)


def is_damage(error: Exception) -> bool:
    """Whether an error of stock Orbax in a restore means that the step is damaged, not that access was refused."""
    if isinstance(error, FileNotFoundError | json.JSONDecodeError | KeyError):
        return True
    text = str(error)
    return any(word in text for word in _DAMAGED) and not (
        is_refusal(text) or any(word in text for word in UNREACHABLE)
    )


def is_transient(error: BaseException) -> bool:
    """Whether a failed write may succeed when it is tried again: the store did not answer, throttled or hung up."""
    if isinstance(error, TransientStoreError | ConnectionError):
        return True
    if isinstance(error, CheckpointError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_ERRNOS
    status = getattr(error, "code", getattr(error, "status", None))
    if isinstance(status, int):
        return status in (408, 429) or 500 <= status < 600
    return isinstance(error, TimeoutError) or any(word in str(error) for word in UNREACHABLE)
