"""Python's cyclic garbage collector, where a great many objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False
_AGED_MAX = 8  # how often, from one full collection to the next: it is due after so many of the others
_aged = (-1, 0)  # the full collections so far, and how often since the last one


@contextmanager
def collection_paused() -> Iterator[None]:
    """The collector does not run meanwhile, in any thread of the process; it is left as it was found.

    It looks at all objects again whenever their number has grown by a quarter: a third of the time of restoring 4,000
    leaves, nothing of which it may free. For what is over in seconds: the cycles of other threads wait as well.
    Pauses of several threads may overlap. What was made in the pause counts as old after it, so that only the next full
    collection looks at it: else one would follow at once, 10 ms for 4,000 leaves. A few times at
    most before that collection has run, which would otherwise never be due.
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
                _all_count_as_old()
                gc.enable()


def _all_count_as_old() -> None:
    global _aged
    full = gc.get_stats()[2]["collections"]
    times = _aged[1] if _aged[0] == full else 0
    if times < _AGED_MAX and not gc.get_freeze_count():  # a caller's frozen objects stay so
        _aged = (full, times + 1)
        gc.freeze()  # moves all objects out of the young generations, and looks at none of them
        gc.unfreeze()
