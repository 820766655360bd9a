"""Which saves are under way, to which tiers; and what becomes of them when the process ends."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import final

from ckptkit.model.tiers import DURABLE
from ckptkit.util import clock
from ckptkit.util.clock import Deadline
from ckptkit.util.notice import Notice

_log = logging.getLogger("ckptkit")
_LOOK_S = 1.0  # how often it is looked for progress


@final
class SavesUnderWay:
    """The tiers that each save has still to reach, by step. Safe from several threads; questions take no lock."""

    def __init__(self, written_bytes: Callable[[], int] = lambda: 0):
        """`written_bytes` grows while a tier is written that reports no phases."""
        self._written_bytes = written_bytes
        self._lock = threading.RLock()
        self._notice = Notice()
        self._tiers: dict[int, list[str]] = {}
        self._durable_bytes: dict[int, int] = {}  # of the saves that the durable tier has still to reach
        self._counted_bytes = 0  # had been written when these began to be
        self._advances = 0

    def begin(self, step: int, tiers: frozenset[str], *, share_bytes: int = 0) -> None:
        """A save of `step` has begun, that is due in `tiers`; this process writes at most `share_bytes` to each."""
        with self._lock:
            self._tiers[step] = sorted({*self._tiers.get(step, []), *tiers})
            if DURABLE in tiers:
                if not self._durable_bytes:
                    self._counted_bytes = self._written_bytes()
                self._durable_bytes[step] = share_bytes
            self._advance()

    def advance(self) -> None:
        """Some save came further."""
        with self._lock:
            self._advance()

    def end(self, step: int, tier: str | None = None) -> None:
        """A save has reached `tier`, or will not; None: that holds for all its tiers."""
        with self._lock:
            left = [each for each in self._tiers.pop(step, []) if tier is not None and each != tier]
            if left:
                self._tiers[step] = left
            if DURABLE not in left and self._durable_bytes.pop(step, None) is not None:
                self._counted_bytes = self._written_bytes()  # durable saves are written one after the other
            self._advance()

    def left_bytes(self) -> int:
        """The bytes that this process has still to write to the durable tier, at most: compression and unchanged leaves
        make them less."""
        return max(0, sum(list(self._durable_bytes.values())) - self._written_bytes() + self._counted_bytes)

    def left(self) -> dict[int, list[str]]:
        """The tiers that each save has not reached yet, by step."""
        return dict(self._tiers)

    def wait(self, deadline: Deadline) -> bool:
        """Waits until nothing is under way; False where time ran out first."""
        return self._notice.wait_for(lambda: not self._tiers, deadline.left_s)

    def progress(self) -> tuple[int, int]:
        """Differs from what it was as long as saves advance."""
        return self._advances, self._written_bytes()

    def _advance(self) -> None:
        self._advances += 1
        self._notice.give()


@final
class StallWatch:
    """Distinguishes saves that are slow from saves that hang: `stalled` after `limit_s` without any progress."""

    def __init__(self, under_way: SavesUnderWay, limit_s: float):
        self.limit_s = limit_s
        self._under_way = under_way
        self._seen = under_way.progress()
        self._since_s = clock.monotonic_s()

    @property
    def stalled(self) -> bool:
        """Whether nothing advanced for `limit_s`."""
        now_s, seen = clock.monotonic_s(), self._under_way.progress()
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        return now_s - self._since_s > self.limit_s

    def look(self) -> Deadline:
        """The deadline of the wait before the next look."""
        return Deadline(min(_LOOK_S, self.limit_s))


def described(left: dict[int, list[str]]) -> str:
    """Saves and the tiers that they have not reached, for a log line."""
    return ", ".join(f"step {step} in {' and '.join(tiers)}" for step, tiers in sorted(left.items())) or "no save"


@final
class ExitDrain:
    """Waits at the end of the process for the saves of managers that were not closed.

    Holds them weakly: a save under way keeps its own alive. Of managers that a fork has copied it knows nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._limits_s: weakref.WeakKeyDictionary[SavesUnderWay, tuple[int, float]] = weakref.WeakKeyDictionary()
        self._registered = False

    def add(self, under_way: SavesUnderWay, timeout_s: float) -> None:
        """Waits for these at the end, for `timeout_s` at most."""
        with self._lock:
            self._limits_s[under_way] = (os.getpid(), timeout_s)
            if self._registered:
                return
            self._registered = True
        # Functions of `atexit` run after `concurrent.futures` has shut down, with which durable steps are written.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(self.run)

    def remove(self, under_way: SavesUnderWay) -> None:
        """Their manager was closed."""
        with self._lock:
            self._limits_s.pop(under_way, None)

    def run(self) -> None:
        """Waits for all, and logs what is lost. Raises nothing."""
        began_s = clock.monotonic_s()
        for under_way, (process_id, timeout_s) in list(self._limits_s.items()):
            if process_id == os.getpid():
                _drain(under_way, began_s + timeout_s - clock.monotonic_s(), timeout_s)


def _drain(under_way: SavesUnderWay, left_s: float, timeout_s: float) -> None:
    left, began_s = under_way.left(), clock.monotonic_s()
    if not left:
        return
    _log.warning(
        "the process ends without CheckpointManager.close(): it waits up to %g s for %s", timeout_s, described(left)
    )
    if under_way.wait(Deadline(max(0.0, left_s))):
        _log.warning("the saves ended after %.1f s; close() reports failures", clock.monotonic_s() - began_s)
        return
    _log.error(
        "lost at the end of the process: %s; not written within close_timeout_s=%g. Call CheckpointManager.close(), "
        "which waits for as long as saves advance",
        described(under_way.left()),
        timeout_s,
    )


exit_drain = ExitDrain()
