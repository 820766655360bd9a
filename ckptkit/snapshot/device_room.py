"""How much memory copies of a save may take on a device, so that no step of the caller's runs out of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, final


class DeviceMemory:
    """This process's requests to its devices. Tests give a model of an allocator instead."""

    def stats(self, device: Any) -> Mapping[str, int]:
        """Bytes in use, their peak and their limit, by JAX's names; empty where the device does not report them."""
        return device.memory_stats() or {}

    def put(self, arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        """Copies of arrays: dispatched by one call that waits for nothing and compiles nothing.

        Raises JAX's RESOURCE_EXHAUSTED without room; then nothing of the copies is left.
        """
        import jax  # here alone: the class is a seam for tests

        return jax.device_put(list(arrays), list(shardings), may_alias=False)


@final
class DeviceRoom:
    """The budget of each device for copies: at most `bytes_max`, which the caller keeps free for them.

    Nothing tells how much memory the next program of the caller needs: a larger one than all before may come at any
    time, such as the first evaluation. Only the caller knows, so the default of `bytes_max` is nothing.

    Below it, a budget is at most the memory that was never in use: the earlier contents of the device then fit next to
    the copies. The peak of a device contains the copies of earlier saves, and JAX has no peak without them. So a budget
    is half of that at first, and the size of earlier copies later. With copies of at most half of the free memory, the
    peak leaves the other half free, so the budget does not shrink from save to save.
    """

    def __init__(self, memory: DeviceMemory, bytes_max: int):
        self._memory = memory
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._live = Counter[Any]()  # bytes of copies that are not dropped yet
        self._largest = Counter[Any]()  # that there ever were at a time

    def look(self, devices: Sequence[Any]) -> tuple[dict[Any, int], str]:
        """The bytes that each device has room for, and why. Cost: one question to each device."""
        if not self._bytes_max:
            return dict.fromkeys(devices, 0), "device_copy_bytes_max is 0"
        stats = {device: self._memory.stats(device) for device in devices}
        if not all("bytes_limit" in each for each in stats.values()):
            return dict.fromkeys(devices, 0), "the devices do not report their memory"
        budget = {}
        with self._lock:
            for device, each in stats.items():
                never = max(0, each["bytes_limit"] - max(each.get(name, 0) for name in _USED))
                allowed = min(self._bytes_max, max(never // 2, min(self._largest[device], never)))
                budget[device] = max(0, allowed - self._live[device])
        return budget, f"{min(budget.values(), default=0) / 1e9:.1f} GB of each device are free for copies"

    def take(self, taken: Mapping[Any, int]) -> None:
        """Copies of so many bytes are made."""
        with self._lock:
            self._live.update(taken)
            for device in taken:
                self._largest[device] = max(self._largest[device], self._live[device])

    def give_back(self, taken: Mapping[Any, int]) -> None:
        """Copies of so many bytes are dropped."""
        with self._lock:
            self._live.subtract(taken)


_USED = ("peak_bytes_in_use", "bytes_in_use")
