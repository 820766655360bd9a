"""Signals as calls, for the time of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def signals_mean(acts: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """The signals call the acts in the block. In another thread than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, lambda *_, act=act: act()) for signum, act in acts.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
