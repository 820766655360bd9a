"""CPU devices that pass for accelerators, with a model of their allocator, and a training loop on one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ckptkit.snapshot import describe
from ckptkit.snapshot.device_room import DeviceMemory
from ckptkit.snapshot.staging import Stager

PIECE = 64 << 10
FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"


class Allocator(DeviceMemory):
    """The memory of each device: a limit, what is in use, and the peak of that. Copies are made by JAX, and counted."""

    def __init__(self, limit: int, *, reports: bool = True):
        self.limit, self.reports = limit, reports
        self.in_use, self.peak = Counter[Any](), Counter[Any]()
        self.puts: list[tuple[int, str | None]] = []  # bytes, and the kind of memory

    def stats(self, device: Any) -> Mapping[str, int]:
        if not self.reports:
            return {}
        return {
            "bytes_in_use": self.in_use[device],
            "peak_bytes_in_use": self.peak[device],
            "bytes_limit": self.limit,
        }

    def use(self, device: Any, nbytes: int) -> None:
        if self.in_use[device] + nbytes > self.limit:
            raise jax.errors.JaxRuntimeError(FULL)
        self.in_use[device] += nbytes
        self.peak[device] = max(self.peak[device], self.in_use[device])

    def step(self, device: Any, nbytes: int) -> None:
        self.use(device, nbytes)
        self.in_use[device] -= nbytes

    def put(self, arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
        used = Counter[Any]()
        for array, sharding in zip(arrays, shardings, strict=True):
            if sharding.memory_kind != "pinned_host":
                for device in sharding.device_set:
                    used[device] += array.nbytes // len(sharding.device_set)
        for device, nbytes in used.items():
            if self.in_use[device] + nbytes > self.limit:
                raise jax.errors.JaxRuntimeError(FULL)
        for device, nbytes in used.items():
            self.use(device, nbytes)
        copies = super().put(arrays, shardings)
        self.puts += [(array.nbytes, sharding.memory_kind) for array, sharding in zip(arrays, shardings, strict=True)]
        return copies


def pieces(count: int, value: int = 0) -> dict[str, Any]:
    """A state of so many leaves of `PIECE` bytes on one device."""
    on = SingleDeviceSharding(jax.devices()[0])
    whole = [np.full(PIECE // 4, value + number, np.float32) for number in range(count)]
    return {str(number): array for number, array in enumerate(jax.device_put(whole, [on] * count))}


class Run:
    """A training loop on one device: its state, steps and saves; `room` counts copies until their save is finished."""

    def __init__(self, limit: int, leaves: int, stager: Stager | None = None, *, kept_free: int | None = None):
        self.device = jax.devices()[0]
        self.allocator = Allocator(limit)
        self.leaves, self.number = leaves, 0
        self.allocator.use(self.device, leaves * PIECE)
        self.state = pieces(leaves)
        self.stager = stager or Stager(None, self.allocator, device_bytes_max=kept_free)
        self.under_way: list[tuple[Any, int, np.ndarray, Any, int]] = []

    def step(self, nbytes: int) -> None:
        self.allocator.step(self.device, nbytes)
        self.number += 1
        self.state = pieces(self.leaves, self.number)

    def save(self, choice: Any = "auto") -> int:
        """The bytes that were copied on the device."""
        before = self.allocator.in_use[self.device]
        description = describe.describe_items({"default": self.state})
        memory = np.zeros(description.slot_bytes, np.uint8)
        begun = self.stager.begin(choice, description, {"default": self.state}, memory)
        taken = self.allocator.in_use[self.device] - before
        self.under_way.append((begun, taken, memory, description, self.number))
        return taken

    def finish(self) -> None:
        """Ends the oldest save, and checks what it holds."""
        begun, taken, memory, description, number = self.under_way.pop(0)
        found = begun.finish()
        assert found.keys() == {extent.number for extent in description.extents}
        for leaf, extent in zip(description.items["default"], description.extents, strict=True):
            expected = float(number + int(leaf.record.name))
            assert (memory[extent.offset : extent.stop].view(np.float32) == expected).all()
        self.allocator.in_use[self.device] -= taken
