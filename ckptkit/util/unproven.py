"""Programs that this process runs before they are proven: none of their results may be saved."""

from __future__ import annotations

from collections.abc import Callable

_proofs: dict[int, Callable[[], None]] = {}


def add(key: int, prove: Callable[[], None]) -> None:
    """From now on `wait` calls `prove`, which returns once the thing is proven, and raises if it is refuted."""
    _proofs[key] = prove


def remove(key: int) -> None:
    """It is proven, or not used any more."""
    _proofs.pop(key, None)


def wait() -> None:
    """Returns when everything in use is proven, at once if it is; raises what the proof of a refuted thing raises."""
    for prove in tuple(_proofs.values()):
        prove()
