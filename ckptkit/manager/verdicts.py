"""One verdict of all processes on what each of them tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ckptkit.coordination import Coordinator
from ckptkit.errors import CorruptCheckpointError, ItemNotFoundError, heard_from

_T = TypeVar("_T")


def act_together(
    coordinator: Coordinator, channel: str, act: Callable[[], _T], *, timeout_s: float
) -> tuple[str | None, _T | None]:
    """Does its part and votes: why all reject, or what `act` gave. What is fatal anywhere raises everywhere."""
    error: Exception | None = None
    done = None
    try:
        done = act()
    except Exception as caught:  # noqa: BLE001  voted on: who does not vote leaves the others waiting
        error = caught
    verdict = _vote(coordinator, channel, error, timeout_s)
    if verdict["fatal"] is not None:
        if error is not None and _is_fatal(error):
            raise error
        raise heard_from(*verdict["fatal"])
    return verdict["reject"], done


def _vote(coordinator: Coordinator, channel: str, error: Exception | None, timeout_s: float) -> dict[str, Any]:
    """One verdict for all: a fatal error raises everywhere, a rejection sends everybody to the next candidate."""
    value = None if error is None else [_is_fatal(error), type(error).__name__, str(error)]

    def worst(values: list[Any]) -> dict[str, Any]:
        said = [(process, *each) for process, each in enumerate(values) if each is not None]
        fatal = [[process, name, text] for process, is_fatal, name, text in said if is_fatal]
        reject = [f"process {process}: {name}: {text}" for process, is_fatal, name, text in said if not is_fatal]
        return {"fatal": fatal[0] if fatal else None, "reject": "; ".join(reject) or None}

    return coordinator.agree(channel, value, worst, timeout_s=timeout_s)


def _is_fatal(error: Exception) -> bool:
    """Only what is proven bad or absent falls back to something older; unreachable is not absent."""
    return not isinstance(error, CorruptCheckpointError | FileNotFoundError | ItemNotFoundError)
