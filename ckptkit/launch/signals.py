"""Signals as calls, for the time of a block, and the requests that an agent got by them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

_FOR_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True)
class Told:
    """How often an agent was asked to preempt the job, and to stop it."""

    preempted: int = 0
    stopped: int = 0

    @property
    def stops(self) -> int:
        """How often it was asked to stop. A repeated request to preempt counts too: the agent is to hurry."""
        return self.stopped + max(0, self.preempted - 1)

    def note(self, other: Told) -> None:
        """Adds the requests to another agent. A scheduler sends one request to all agents: it counts once."""
        self.preempted = max(self.preempted, other.preempted)
        self.stopped = max(self.stopped, other.stopped)


def passed_by(act: Callable[[int], None]) -> dict[signal.Signals, Callable[[], None]]:
    """The signals that a scheduler sends to all agents and means for their workers, as calls of `act`."""
    return {signum: lambda signum=signum: act(signum) for signum in (signal.SIGUSR1, signal.SIGUSR2)}


@contextmanager
def signals_mean(acts: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """The signals call the acts in the block. In another thread than the main one nothing changes.

    SIGINT and SIGHUP stay ignored where they are: below `nohup`, or in the background of a script.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = [each for each in _FOR_THE_TERMINAL if signal.getsignal(each) == signal.SIG_IGN]
    taken = {signum: act for signum, act in acts.items() if signum not in ignored}
    before = {signum: signal.signal(signum, lambda *_, act=act: act()) for signum, act in taken.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
