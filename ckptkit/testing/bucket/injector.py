"""Decides for each request which faults of the plan in force hit it, keeps the counts, and paces transfers."""

import asyncio
import random
import threading
from collections import Counter
from fnmatch import fnmatchcase
from typing import Final, final

from ckptkit.testing.bucket.call import CallKind
from ckptkit.testing.bucket.faults import Delay, Effect, Fault, FaultPlan

QUANTUM_BYTES: Final = 64 * 1024  # taken at once: small, so that competing readers get equal shares


@final
class Injector:
    """Holds the plan in force and the shared bandwidth; the plan may be replaced at any time, from any thread."""

    def __init__(self, plan: FaultPlan) -> None:
        self._lock = threading.Lock()
        self.download = TokenBucket()
        self.upload = TokenBucket()
        self.set_plan(plan)

    @property
    def plan(self) -> FaultPlan:
        """The plan in force."""
        return self._plan

    def set_plan(self, plan: FaultPlan) -> None:
        """Replace the plan; counts begin anew, transfers in flight continue at the new bandwidth."""
        with self._lock:
            self._plan = plan
            self._matched = [0] * len(plan.faults)
            self._fired = [0] * len(plan.faults)
            self._asked: Counter[tuple[int, CallKind, str]] = Counter()
            self.download.rate = plan.download_bytes_per_s
            self.upload.rate = plan.upload_bytes_per_s

    def fired(self) -> list[int]:
        """How many requests each fault of the plan has hit."""
        with self._lock:
            return list(self._fired)

    def decide(self, kind: CallKind, name: str) -> tuple[float, Effect | None]:
        """Walk the plan for one request, and count: a wait in seconds, then at most one effect."""
        delay_s = 0.0
        with self._lock:
            for line, fault in enumerate(self._plan.faults):
                source = self._hit(line, fault, kind, name)
                if source is None:
                    continue
                if not isinstance(fault.effect, Delay):
                    return delay_s, fault.effect
                delay_s += fault.effect.latency.draw(source)
        return delay_s, None

    def _hit(self, line: int, fault: Fault, kind: CallKind, name: str) -> random.Random | None:
        if (fault.kinds and kind not in fault.kinds) or not fnmatchcase(name, fault.objects):
            return None
        self._matched[line] += 1
        if self._matched[line] <= fault.skip or (fault.count is not None and self._fired[line] >= fault.count):
            return None
        self._asked[line, kind, name] += 1
        source = random.Random(f"{self._plan.seed}/{line}/{kind}/{name}/{self._asked[line, kind, name]}")
        if source.random() >= fault.probability:
            return None
        self._fired[line] += 1
        return source


@final
class TokenBucket:
    """Sums to at most `rate` bytes per second over all takers, first come first served; None: unlimited.

    Nothing is saved up while idle, so a transfer of n bytes takes at least n / rate seconds. Event loop only, except
    that `rate` may be set from any thread.
    """

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._free_at_s = 0.0

    async def take(self, size_bytes: int) -> None:
        """Return when `size_bytes` have passed the bottleneck."""
        rate = self.rate
        if rate is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(now_s, self._free_at_s) + size_bytes / rate
        await asyncio.sleep(self._free_at_s - now_s)
