"""A token bucket that all transfers of one direction share."""

import asyncio
from typing import Final, final

QUANTUM_BYTES: Final = 64 * 1024  # taken at once: small, so that competing readers get equal shares


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
