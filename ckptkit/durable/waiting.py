"""Waits for TensorStore with a deadline, says its errors in ours, and remembers what has not ended.

An operation that is given up is not over: no API ends it. What it was reading may then be overwritten, and what it
writes may land at any time, so nothing else is written where it may land until it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ckptkit.clock import Deadline
from ckptkit.errors import StoreError, TransientStoreError
from ckptkit.store import Store, open_store
from ckptkit.store.refused import Needed, is_refusal, refused
from ckptkit.store.roots import is_remote
from ckptkit.tuning import DurableProfile

UNREACHABLE = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_SMALL_TIMEOUT_S = 20.0  # of one request for a small object,
_SMALL_TRIES = 3  # and for how many times that it is tried
_LEAST_WAIT_S = 1e-3  # what has ended is taken also when no time is left

_T = TypeVar("_T")
_late_lock = threading.Lock()
_late: dict[str, list[Any]] = {}  # where a write may land that was given up


def small_objects(url: str, profile: DurableProfile) -> Store:
    """The store of a step's small objects, under the profile's limit for an operation."""
    timeout_s = min(_SMALL_TIMEOUT_S, profile.operation_timeout_s)
    return open_store(url, deadline_s=_SMALL_TRIES * timeout_s, timeout_s=timeout_s)


def awaited(
    futures: Sequence[Any], profile: DurableProfile, where: str, *, nbytes: int = 0, needs: Needed = "get"
) -> list[Any]:
    """What TensorStore's futures give, which move `nbytes` together and need this permission.

    Raises `StoreError` where a permission is refused, `TransientStoreError` where the service does not answer, fails
    or takes longer than `DurableProfile.limit_s`; what else TensorStore raises, ValueError, as it is.
    """
    limit_s = profile.limit_s(nbytes)
    deadline = Deadline(limit_s)
    try:
        return [translated(lambda each=each: each.result(timeout=_left_s(deadline)), where, needs) for each in futures]
    except TimeoutError as error:
        raise TransientStoreError(
            f"{where}: no end within {limit_s:g} s; look at the network and at the service, or raise "
            "DurableProfile.operation_timeout_s",
            path=where,
        ) from error


def awaited_write(futures: Sequence[Any], profile: DurableProfile, where: str, *, nbytes: int = 0) -> None:
    """`awaited`, for writes below the directory `where`: those that are given up are remembered."""
    try:
        awaited(futures, profile, where, nbytes=nbytes, needs="create")
    except BaseException:
        give_up(futures, where)
        raise


def give_up(futures: Sequence[Any], directory: str) -> None:
    """Remembers writes below a directory that nobody waits for any more."""
    left = [future for future in futures if not future.done()]
    if left:
        with _late_lock:
            for place in [place for place, late in _late.items() if all(future.done() for future in late)]:
                del _late[place]
            _late.setdefault(directory, []).extend(left)


def late_writes(directory: str, timeout_s: float) -> str | None:
    """What was given up below a directory and has still not ended after `timeout_s`; None where nothing is."""
    deadline = Deadline(timeout_s)
    with _late_lock:
        mine = [where for where in _late if where == directory or where.startswith(f"{directory}/")]
        futures = [future for where in mine for future in _late[where]]
    for future in futures:
        try:
            future.result(timeout=_left_s(deadline))
        except TimeoutError:
            return f"a write to {directory} that was given up has not ended, and may still land there"
        except ValueError:
            pass  # it has ended
    with _late_lock:
        for where in mine:
            _late.pop(where, None)
    return None


def translated(operation: Callable[[], _T], where: str, needs: Needed = "get") -> _T:
    """TensorStore raises ValueError for everything. The status name in its text tells access problems apart, which
    become ours; what names none is left to the caller, who knows whether it is damage."""
    try:
        return operation()
    except ValueError as error:
        text = str(error)
        if is_remote(where) and is_refusal(text):
            raise refused(where, text, needs=needs) from error
        if is_refusal(text):
            raise StoreError(f"{where}: {text}", path=where) from error
        if any(status in text for status in UNREACHABLE):
            raise TransientStoreError(f"{where}: {text}", path=where) from error
        raise


def _left_s(deadline: Deadline) -> float:
    return max(_LEAST_WAIT_S, deadline.left_s)
