"""Signals as calls, for the time of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


def passed_by(act: Callable[[int], None]) -> dict[signal.Signals, Callable[[], None]]:
    """The signals that a scheduler sends to all agents and means for their workers, as calls of `act`."""
    return {signum: lambda signum=signum: act(signum) for signum in (signal.SIGUSR1, signal.SIGUSR2)}


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
