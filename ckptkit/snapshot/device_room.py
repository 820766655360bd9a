"""How much memory copies of a save may take on a device, so that no step of the caller's runs out of it."""

from __future__ import annotations

import threading
import weakref
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
    """The budget of each device for copies: at most `bytes_max`; None: no limit of the caller's.

    The peak of a device contains the copies of earlier saves, and JAX has no peak without them. So a budget is at most
    the memory that was never in use: the earlier contents of the device then fit next to the copies. It is half of that
    at first, and the size of earlier copies later. With copies of at most half of the free memory, the peak leaves the
    other half free, so the budget does not shrink from save to save.

    So a program fits next to the copies if it needs no more than the largest one before it. A larger one may come at
    any time, such as the first evaluation. Only the caller knows: that is `bytes_max`.

    Without `bytes_max` nothing is copied until the state has changed or the peak has risen since the first save:
    before, no step may have run, and its memory is not in the peak.
    """

    def __init__(self, memory: DeviceMemory, bytes_max: int | None = None):
        self._memory = memory
        self._bytes_max = bytes_max
        self._lock = threading.RLock()
        self._first: tuple[list[weakref.ref[Any]], dict[Any, int]] | None = None
        self._stepped = bytes_max is not None
        self._live = Counter[Any]()  # bytes of copies that are not dropped yet
        self._largest = Counter[Any]()  # that there ever were at a time

    def look(self, arrays: Sequence[Any], devices: Sequence[Any]) -> tuple[dict[Any, int], str]:
        """The bytes that each device has room for, and why, for a save of `arrays`. Cost: 0.2 microseconds per array,
        and one question to each device."""
        if self._bytes_max == 0:
            return dict.fromkeys(devices, 0), "device_copy_bytes_max is 0"
        stats = {device: self._memory.stats(device) for device in devices}
        if not all("bytes_limit" in each for each in stats.values()):
            return dict.fromkeys(devices, 0), "the devices do not report their memory"
        peaks = {device: max(each.get(name, 0) for name in _USED) for device, each in stats.items()}
        with self._lock:
            if not self._stepped and not self._has_stepped(arrays, peaks):
                return dict.fromkeys(devices, 0), "no step has run since the first save, so its memory is not known"
            budget = {}
            for device, peak in peaks.items():
                never = max(0, stats[device]["bytes_limit"] - peak)
                allowed = max(never // 2, min(self._largest[device], never))
                if self._bytes_max is not None:
                    allowed = min(allowed, self._bytes_max)
                budget[device] = max(0, allowed - self._live[device])
        return budget, f"{min(budget.values(), default=0) / 1e9:.1f} GB of each device are free for copies"

    def free_now(self, devices: Sequence[Any]) -> dict[Any, int] | None:
        """The bytes that are not in use on each device, at most those of the caller's limit. None without a limit
        if a device does not report its memory."""
        stats = {device: self._memory.stats(device) for device in devices}
        if self._bytes_max is None and not all("bytes_limit" in each for each in stats.values()):
            return None
        free = {}
        for device, each in stats.items():
            room = each.get("bytes_limit", 1 << 60) - each.get("bytes_in_use", 0)
            free[device] = room if self._bytes_max is None else min(room, self._bytes_max - self._live[device])
        return free

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

    def _has_stepped(self, arrays: Sequence[Any], peaks: Mapping[Any, int]) -> bool:
        if self._first is None:
            self._first = [weakref.ref(array) for array in arrays], dict(peaks)
            return False
        refs, before = self._first
        same = len(refs) == len(arrays) and all(ref() is array for ref, array in zip(refs, arrays, strict=True))
        self._stepped = not same or any(peak > before.get(device, 0) for device, peak in peaks.items())
        if self._stepped:
            self._first = None
        return self._stepped


_USED = ("peak_bytes_in_use", "bytes_in_use")
