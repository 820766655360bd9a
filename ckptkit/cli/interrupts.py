"""Ctrl-C ends a command, wherever it arrives.

Python raises `KeyboardInterrupt` in whatever the main thread runs. In a callback of the garbage collector (JAX has
one), in `__del__`, or in a callback from C the exception is only printed, and the command would run to its end.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, final

_AGAIN_S = 0.02  # after a lost interrupt: by then the callback has returned


@final
class Interrupts(AbstractContextManager["Interrupts"]):
    """In this context SIGINT raises `KeyboardInterrupt` in the main thread, and does so again if that was lost.

    Outside the main thread, or where SIGINT is ignored (a shell's background job), it changes nothing.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None
        self._hook: Callable[[Any], Any] = sys.unraisablehook
        self._timers: list[threading.Timer] = []
        self._ends = False

    def __enter__(self) -> Interrupts:
        self._hook = sys.unraisablehook
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._lost
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends = True
        if self._before is not None:
            sys.unraisablehook = self._hook
            signal.signal(signal.SIGINT, self._before)
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.seen = True
        if not self._ends:
            raise KeyboardInterrupt

    def _lost(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._hook(unraisable)
            return
        timer = threading.Timer(_AGAIN_S, self._send)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _send(self) -> None:
        if not self._ends:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
