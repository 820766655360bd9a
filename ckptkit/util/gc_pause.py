"""Python's cyclic garbage collector, where a great many objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """The collector does not run meanwhile, in any thread of the process; it is left as it was found.

    It looks at all objects again whenever their number has grown by a quarter: a third of the time of restoring 4,000
    leaves, nothing of which it may free. For what is over in seconds: the cycles of other threads wait as well.
    Pauses of several threads may overlap.
    """
    global _pauses, _was_enabled
    with _lock:
        _pauses += 1
        if _pauses == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()
