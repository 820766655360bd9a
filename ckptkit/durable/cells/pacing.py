"""When the next bytes may go to the durable tier, or come from it: at the rate that is allowed, and after a fast tier's
commit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Hashable
from typing import final

from ckptkit.model.durable_profile import DurableProfile
from ckptkit.store.backends import properties_of
from ckptkit.util import clock

YIELD_S_MAX = (
    5.0  # of one wait for a fast tier: a loop that saves without a pause slows the durable tier and does not stop it
)

_spread = random.Random()  # its own: a job that seeds `random` would have all its processes start at the same time


def spread_start(profile: DurableProfile, url: str) -> None:
    """Waits for a random part of `DurableProfile.start_spread_s` if the URL is in a bucket: the processes of a job that
    starts again do not all send their first requests at once."""
    if profile.start_spread_s is not None and properties_of(url).round_trips:
        time.sleep(_spread.uniform(0, profile.start_spread_s))


@final
class Pace:
    """The pace of all durable writes of a process, or of all its durable reads. Safe from several threads.

    `bytes_per_s` None: without a limit.
    """

    def __init__(self, bytes_per_s: float | None = None):
        self._rate = bytes_per_s
        self.taken_bytes = 0  # so far
        self._changed = threading.Condition()
        self._urgent: set[Hashable] = set()
        self._free_s = 0.0  # monotonic: when what was taken so far has gone at the rate that is allowed

    def begin_urgent(self, key: Hashable) -> None:
        """A save waits for its first commit: durable writes let it pass, until `end_urgent`."""
        with self._changed:
            self._urgent.add(key)

    def end_urgent(self, key: Hashable) -> None:
        """It has passed; nothing where it had before."""
        with self._changed:
            self._urgent.discard(key)
            self._changed.notify_all()

    def take(self, nbytes: int) -> float:
        """Waits until `nbytes` may go, and returns how long that was in seconds: `YIELD_S_MAX` at most for fast tiers,
        and for the rate until what was taken before has gone."""
        began_s = clock.monotonic_s()
        with self._changed:
            self.taken_bytes += nbytes
            self._changed.wait_for(lambda: not self._urgent, YIELD_S_MAX)
            if self._rate is not None:
                # A thread that arrives meanwhile goes after this one.
                start_s = max(self._free_s, clock.monotonic_s())
                self._free_s = start_s + nbytes / self._rate
                while (left_s := start_s - clock.monotonic_s()) > 0:
                    self._changed.wait(left_s)
        return clock.monotonic_s() - began_s
