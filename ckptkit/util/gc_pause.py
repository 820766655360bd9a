"""Python's cyclic garbage collector, where a great many objects are made that all stay."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

# No lock: a signal handler may save in the middle of a pause's first or last line. Of two pauses that begin and end at
# the same moment one may be without effect; the collector is enabled after both.
_pauses: dict[int, weakref.ref[_Pause]] = {}  # by the `id` of each
_was_enabled = False  # whether the last pause that ends enables the collector again
_AGED_MAX = 8  # how often all objects are made old between two full collections
_aged = (-1, 0)  # the number of full collections, and how often all objects were made old since the last one


class _Pause:
    """One that goes on as long as it is held: a handler may raise in the middle of `end`, which the next end makes up
    for."""

    def __init__(self) -> None:
        global _was_enabled
        _pauses[id(self)] = weakref.ref(self)
        if gc.isenabled():
            _was_enabled = True
            gc.disable()

    def end(self) -> None:
        """The collector runs again if no other pause goes on."""
        global _was_enabled
        _pauses.pop(id(self), None)
        for key in [key for key, pause in list(_pauses.items()) if pause() is None]:
            _pauses.pop(key, None)
        if not _pauses and _was_enabled:
            gc.enable()
            if not _pauses:  # one that began meanwhile, and disabled it again, enables it at its end
                _was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """The collector does not run meanwhile, in any thread of the process; it is left as it was found.

    It looks at all objects again whenever their number has grown by a quarter: a third of the time of restoring 4,000
    leaves, nothing of which it may free. For what is over in seconds: the cycles of other threads wait as well.
    Pauses of several threads may overlap.
    """
    pause = _Pause()
    try:
        yield
    finally:
        pause.end()


@contextmanager
def old_afterwards() -> Iterator[None]:
    """`collection_paused`, after which all objects count as old, so that only the next full collection looks at them.

    Otherwise a collection follows at once: 5 to 11 ms for 4,000 leaves. The young garbage is collected first, which
    takes less than a millisecond. For rare events such as restores. All objects are made old a few times at most
    between two full collections, because each time defers the next one.
    """
    if gc.isenabled():
        gc.collect(1)
    with collection_paused():
        yield
        _make_old()


def _make_old() -> None:
    global _aged
    full = gc.get_stats()[2]["collections"]
    times = _aged[1] if _aged[0] == full else 0
    if times >= _AGED_MAX or not _was_enabled:
        return
    if gc.get_freeze_count():  # a caller's frozen objects stay so; to count 200,000 takes 23 ms, so not each time
        _aged = (full, _AGED_MAX)
        return
    _aged = (full, times + 1)
    gc.freeze()  # moves all objects out of the young generations, and looks at none of them
    gc.unfreeze()
