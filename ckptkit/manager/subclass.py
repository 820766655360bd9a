"""The methods of a manager that a subclass has put in place of ours.

Orbax's managers call some of their own methods in `save`, `restore(None)`, `delete` and `close`, so a subclass decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from ckptkit.errors import StepNotFoundError

Own = Callable[[str], Callable[..., Any] | None]  # from the name of a method to the caller's own, None if it is ours


def nothing_own(name: str) -> None:
    """For calls in which no subclass is asked."""
    del name


@final
class Overrides:
    """Finds what a subclass of `base`, or this one object, overrides. Cost: two look-ups for each question."""

    def __init__(self, manager: Any, base: type):
        self._manager, self._base = manager, base
        self._asking: int | None = None  # the thread

    def own(self, name: str) -> Callable[..., Any] | None:
        """The method in place of ours; None where it is ours."""
        method = getattr(self._manager, name)
        return None if getattr(method, "__func__", None) is getattr(self._base, name) else method

    def latest_step(self, ours: int | None) -> int | None:
        """The latest step of a subclass; None if the method is ours, or agrees with it: damage has a fallback then."""
        latest_step = self.own("latest_step")
        if latest_step is None or (found := latest_step()) == ours:
            return None
        if found is None:
            raise StepNotFoundError(f"latest_step() is None for {self._manager.directory}: no step to restore")
        return found

    @contextmanager
    def asking(self) -> Iterator[None]:
        """In the block this thread is in `save` or `close`, which may ask a subclass."""
        before, self._asking = self._asking, threading.get_ident()
        try:
            yield
        finally:
            self._asking = before  # a signal handler's block may be in the middle of another

    @property
    def is_asking(self) -> bool:
        """Whether this thread is in such a block: a method of a subclass calls ours then."""
        return self._asking == threading.get_ident()
