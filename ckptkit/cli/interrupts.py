"""Ctrl-C ends a command, wherever it arrives.

Python raises `KeyboardInterrupt` in the code that the main thread runs. In a callback of the garbage collector (JAX has
one) or in `__del__` the exception is only printed, and some C code drops it: the command would run to its end.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, final

_AGAIN_S = 0.05  # after which an interrupt that no code handles is raised again


@final
class Interrupts(AbstractContextManager["Interrupts"]):
    """In this context SIGINT raises `KeyboardInterrupt` in the main thread, and does so again if that was lost.

    Outside the main thread, or where SIGINT is ignored (a shell's background job), it changes nothing.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None
        self._hook: Callable[[Any], Any] = sys.unraisablehook
        self._main = threading.main_thread().ident or 0
        self._ending = threading.Lock()  # between the last signal that is sent and the end
        self._ends = False

    def __enter__(self) -> Interrupts:
        self._hook = sys.unraisablehook
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._lost
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._ending:
            self._ends = True
        if self._before is not None:
            sys.unraisablehook = self._hook
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._ends:
            return
        if not self.seen:
            self.seen = True
            _thread.start_new_thread(self._watch, ())
        raise KeyboardInterrupt

    def handled(self) -> None:
        """The interrupt has ended what the user meant, and the command continues: it is not sent again."""
        with self._ending:
            self.seen = False

    def _watch(self) -> None:
        """Sends the signal again as long as the main thread neither ends nor handles an interrupt."""
        while self.seen and not self._ends:
            time.sleep(_AGAIN_S)
            with self._ending:
                if self.seen and not self._ends and not _handles_interrupt(self._main):
                    signal.pthread_kill(self._main, signal.SIGINT)

    def _lost(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._hook(unraisable)


def _handles_interrupt(thread: int) -> bool:
    """Whether a thread is in an `except` or `finally` of an interrupt: it propagates."""
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # Python 3.11 gives type, value and traceback
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
