"""Programs that this process runs before they are proven: none of their results may be saved."""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.RLock()
_proofs: dict[int, Callable[[], None]] = {}


def add(key: int, prove: Callable[[], None]) -> None:
    """From now on `wait` calls `prove`, which returns once the thing is proven, and raises if it is refuted."""
    with _lock:
        _proofs[key] = prove


def remove(key: int) -> None:
    """It is proven, or not used any more."""
    with _lock:
        _proofs.pop(key, None)


def wait() -> None:
    """Returns when everything in use is proven, at once if it is; raises what the proof of a refuted thing raises."""
    with _lock:
        proofs = tuple(_proofs.values())
    for prove in proofs:
        prove()
