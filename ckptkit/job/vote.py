"""One verdict of all processes on what each of them tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptkit.errors import CorruptCheckpointError, ItemNotFoundError, Reason, heard_from
from ckptkit.job.coordination import Coordinator

# Only what is known to be damaged or absent falls back to something older; unreachable is not absent.
REJECTING = (CorruptCheckpointError, FileNotFoundError, ItemNotFoundError)
_TOLD_MAX = 4  # reasons: thousands of processes reject the same damaged step, and each of them gets every reason
_CHARS_MAX = 2000  # of a reason; who has it raises all of it


class RejectedError(Exception):
    """The processes reject what they tried together: raised on every process, with the same reason."""

    def __init__(self, reason: Reason):
        super().__init__(reason.text)
        self.reason = reason


@contextmanager
def voted(
    coordinator: Coordinator,
    channel: str,
    *,
    timeout_s: float | None = None,
    rejecting: tuple[type[Exception], ...] = REJECTING,
) -> Iterator[None]:
    """A block of which all processes do their part, and vote at its end.

    An `Exception` in it is the vote of its process. If one is none of `rejecting`, it is raised where it came from, and
    the others raise one that names that process (`heard_from`). Else, if there is any, all raise `RejectedError`. An
    exception of another kind, as that of Ctrl-C, is not voted on: the others time out.
    """
    error: Exception | None = None
    try:
        try:
            yield
        except Exception as caught:  # noqa: BLE001  voted on: who does not vote leaves the others waiting
            error = caught
        is_fatal = error is not None and not isinstance(error, rejecting)
        verdict = _vote(coordinator, channel, error, is_fatal, timeout_s)
        if verdict["fatal"] is not None:
            if error is not None and is_fatal:
                raise error
            raise heard_from(*verdict["fatal"])
        if (reason := Reason.of_json(verdict["reject"])) is not None:
            raise RejectedError(reason)
    finally:
        error = None  # its traceback holds this frame


def _vote(
    coordinator: Coordinator, channel: str, error: Exception | None, is_fatal: bool, timeout_s: float | None
) -> dict[str, Any]:
    """One verdict for all: a fatal error raises everywhere, a rejection sends every process to the next candidate."""
    value = None
    if error is not None:
        value = [is_fatal, type(error).__name__, str(error)[:_CHARS_MAX], Reason.of(error).causes]

    def worst(values: list[Any]) -> dict[str, Any]:
        said = {process: each for process, each in enumerate(values) if each is not None}
        fatal = [[process, name, message] for process, (is_fatal, name, message, *_) in said.items() if is_fatal]
        rejections = {
            process: Reason(f"{name}: {message}", tuple(causes))
            for process, (is_fatal, name, message, causes) in said.items()
            if not is_fatal
        }
        return {"fatal": fatal[0] if fatal else None, "reject": Reason.of_processes(rejections, _TOLD_MAX)}

    return coordinator.agree(channel, value, worst, timeout_s=timeout_s)
