"""Access to storage through TensorStore: what it needs besides a URL, waits with a deadline, and its errors translated.

A timed-out operation is not over: no API ends it. The memory it was reading may then be overwritten, and its writes may
land at any time, so nothing may refer to them: see `writer.publish`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ckptkit.errors import CheckpointError, CorruptCheckpointError, StoreError, StoreFullError, TransientStoreError
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.paths import is_utf8
from ckptkit.store import Store, open_store
from ckptkit.store.backends import BACKENDS, Needed, backend_of, is_refusal, properties_of, refused
from ckptkit.util.clock import Deadline

BUCKET_DRIVERS = sorted(
    {each.driver for each in BACKENDS.values() if each.driver is not None and not each.properties.file_system}
)
UNREACHABLE = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_SMALL_TIMEOUT_S = 20.0  # of one request for a small object,
_SMALL_TRIES = 3  # and for how many times that it is tried
_LEAST_WAIT_S = 1e-3  # what has ended is taken also when no time is left

_T = TypeVar("_T")
_DAMAGED = ("DATA_LOSS", "OUT_OF_RANGE", "NOT_FOUND", "FAILED_PRECONDITION", "Error decoding", "Truncated")
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))  # which TensorStore calls RESOURCE_EXHAUSTED
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


def require_usable(directory: str) -> None:
    """Raises `StoreError` for a path with a backslash: TensorStore takes it for a slash, and would write elsewhere."""
    if "\\" in directory and backend_of(directory).properties.file_system:
        raise StoreError(
            f"{directory} has a backslash, which TensorStore takes for a slash: rename the directory", path=directory
        )


def base_of(directory: str) -> str | dict[str, Any]:
    """The key-value store below a directory, a path or a bucket URL, which ends in `/`.

    In parts, since a name may have what a URL gives a meaning (`%`, `#`, `?`, a space). Raises what the service's
    client raises without credentials; ImportError without that client; `StoreError` as `require_usable` does, and for a
    path that is not UTF-8.
    """
    require_usable(directory)
    if not is_utf8(directory):
        what = "is not UTF-8, and TensorStore reads no such path; rename the directory, or use a link with another name"
        raise StoreError(f"{directory} {what}", path=directory)
    backend = backend_of(directory)
    if backend.driver is None:
        return f"{directory}/"
    if backend.properties.file_system:
        return {"driver": backend.driver, "path": f"{directory}/"}
    bucket, _, path = directory.partition("://")[2].partition("/")
    return {"driver": backend.driver, "bucket": bucket, "path": f"{path}/" if path else "", **backend.service()}


def small_objects(url: str, profile: DurableProfile) -> Store:
    """The store of a step's small objects, under the profile's limit for an operation."""
    timeout_s = min(_SMALL_TIMEOUT_S, profile.operation_timeout_s)
    return open_store(url, deadline_s=_SMALL_TRIES * timeout_s, timeout_s=timeout_s)


def large_objects(url: str, profile: DurableProfile, size_bytes: int) -> Store:
    """The store of objects of up to `size_bytes`, each of which may take as long as the profile allows for so much."""
    timeout_s = profile.limit_s(size_bytes)
    return open_store(url, deadline_s=_SMALL_TRIES * timeout_s, timeout_s=timeout_s)


def awaited(
    futures: Sequence[Any], profile: DurableProfile, where: str, *, nbytes: int = 0, needs: Needed = "get"
) -> list[Any]:
    """The results of TensorStore futures, which move `nbytes` together and need this permission.

    Raises `StoreError` where a permission is refused, `StoreFullError` for a full disk, `TransientStoreError` where the
    service does not answer, fails or takes longer than `DurableProfile.limit_s`; what else TensorStore raises,
    ValueError, as it is.
    """
    limit_s = profile.limit_s(nbytes)
    deadline = Deadline(limit_s)
    try:
        return [
            translated(lambda each=each: each.result(timeout=max(_LEAST_WAIT_S, deadline.left_s)), where, needs)
            for each in futures
        ]
    except TimeoutError as error:
        raise TransientStoreError(
            f"{where}: no end within {limit_s:g} s; look at the network and at the service, or raise "
            "DurableProfile.operation_timeout_s",
            path=where,
        ) from error


def translated(operation: Callable[[], _T], where: str, needs: Needed = "get") -> _T:
    """TensorStore raises ValueError for everything. The status name in its text shows access problems, which
    become ours; what names none is left to the caller, who knows whether it is damage."""
    try:
        return operation()
    except ValueError as error:
        text = words_of(error)
        if not properties_of(where).file_system and is_refusal(text):
            raise refused(where, text, needs=needs) from error
        if is_refusal(text):
            raise StoreError(f"{where}: {text}", path=where) from error
        if full := [words for words in _FULL if words in text]:
            raise StoreFullError(
                f"{where}: {full[0]}; free some space or take another directory", path=where
            ) from error
        if any(status in text for status in UNREACHABLE):
            raise TransientStoreError(f"{where}: {text}", path=where) from error
        raise


def undamaged(operation: Callable[[], _T], url: str, where: str) -> _T:
    """The result of `operation`; raises `CorruptCheckpointError` for every error that is not an access problem. A
    damaged node of an OCDBT tree is INVALID_ARGUMENT, the one status that TensorStore does not name."""
    try:
        return translated(operation, url)
    except ValueError as error:
        raise CorruptCheckpointError(f"{where}: {words_of(error)}", path=url) from error


def finished(future: Any, where: str, timeout_s: float, *, path: str | None = None) -> Any:
    """The result of one future, within a limit of the caller's own. `path` is that of its errors, if `where` has more
    words than a path. Raises as `undamaged`, and `TransientStoreError` if it takes longer."""
    path = path or where
    try:
        return undamaged(lambda: future.result(timeout=timeout_s), path, where)
    except TimeoutError as error:
        raise TransientStoreError(f"{where}: no answer within {timeout_s:g} s; try again", path=path) from error


def words_of(error: BaseException) -> str:
    """TensorStore's message of an error, without the spec that it appends."""
    return str(error).partition(" [tensorstore_spec=")[0].strip()


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
