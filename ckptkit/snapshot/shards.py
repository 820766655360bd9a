"""The arrays that a save reads: for each box of this process one array, under an object of the save's own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, final

import jax
import numpy as np

from ckptkit.snapshot.describe import Description, LeafSource, SlotExtent

PINNED = "pinned_host"
_Made = TypeVar("_Made")
Shard = tuple[Any, SlotExtent]  # a single-device array or a NumPy one, and where it goes


@dataclass(frozen=True, slots=True)
class Held:
    """An array that holds one box, or one on each of its devices, and where each box goes. `devices` is empty for
    arrays of NumPy."""

    array: Any
    devices: tuple[Any, ...]  # of the boxes
    extents: tuple[SlotExtent, ...]
    kind: str | None = None  # of the memory that the array is in, where it is not its devices' usual one

    def sharding(self, kind: str | None) -> jax.sharding.Sharding:
        """That of a copy in memory of `kind`, None for the array's own."""
        if len(self.devices) == 1:
            return on_device(self.devices[0], kind or self.kind)
        return self.array.sharding if kind is None else self.array.sharding.with_memory_kind(kind)

    @property
    def is_transferred(self) -> bool:
        """Whether the boxes come out of a device's own memory."""
        return self.extents[0].device is not None

    def shards(self, array: Any = None, *, in_place: bool = False) -> list[Shard]:
        """One array for each box, of this array or of `array`, a copy of it.

        JAX keeps a host copy of what was transferred with the array object: these objects are new, so the host copy
        goes when the save drops them. A copy in pinned memory is read where it is. So is the caller's array with
        `in_place`: a step that donates it while it is read would free the memory that is read.
        """
        if self.kind == PINNED and (in_place or array is not None):
            return [(Pinned(each), extent) for each, extent in self._single(array)]
        return self._single(array)

    def _single(self, array: Any) -> list[Shard]:
        kept = array is None and (self.is_transferred or self.kind is not None)
        array = self.array if array is None else array
        if not self.devices:
            return [(array, self.extents[0])]
        if len(self.extents) == 1:
            return [(array.addressable_data(0) if kept else array, self.extents[0])]
        local = {shard.device: shard.data for shard in array.addressable_shards}
        placed = zip(self.devices, self.extents, strict=True)
        return [(local[device].addressable_data(0) if kept else local[device], extent) for device, extent in placed]


@lru_cache(maxsize=64)
def has_pinned(device: Any) -> bool:
    """Whether a device transfers to pinned host memory."""
    return any(memory.kind == PINNED for memory in device.addressable_memories())


@lru_cache(maxsize=64)
def is_read_from_pinned(device: Any) -> bool:
    """Whether the bytes of a device are read from a copy in pinned memory, a window of it at a time. JAX's own host
    copies are of pageable memory: on an H200 1.9 GB/s, against 54 to pinned memory (bench/LOG.md). A TPU may keep
    another layout there than NumPy's, so its arrays would be copied once more."""
    return device.platform == "gpu" and has_pinned(device)


def unless_full(make: Callable[[], _Made]) -> _Made | None:
    """The result of `make`; None if a device, or JAX's pinned memory, has no room for it (RESOURCE_EXHAUSTED)."""
    try:
        return make()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def in_pinned_memory(shards: Sequence[Shard]) -> list[Shard]:
    """The shards from copies in pinned memory of their devices: one call, which waits for no transfer, and for nothing
    else once JAX has as much pinned memory in its pool.

    Raises JAX's RESOURCE_EXHAUSTED without room; then nothing of the copies is left.
    """
    copies = jax.device_put([array for array, _ in shards], [on_device(extent.device, PINNED) for _, extent in shards])
    return [(Pinned(copy), extent) for copy, (_, extent) in zip(copies, shards, strict=True)]


@final
class Pinned:
    """An array in pinned host memory, whose bytes NumPy is given without another copy. The view does not keep a step
    from donating the array."""

    def __init__(self, array: Any):
        self._array = array

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        array = jax.block_until_ready(self._array)
        return view_of(array) if _is_plain(array) else np.asarray(array)


def _is_plain(array: Any) -> bool:
    """Whether the memory of a single-device array has NumPy's layout. A TPU may tile it in host memory, too."""
    (device,) = array.devices()
    layout = array.format.layout
    rows_first = layout is not None and layout.major_to_minor == tuple(range(array.ndim))
    return rows_first and device.platform in ("cpu", "gpu") and lies_as_in_numpy(array.dtype)


def view_of(array: Any) -> np.ndarray:
    """The memory of a single-device array that is in host memory, as it is; the view keeps the array alive."""
    memory: Any = (ctypes.c_ubyte * array.nbytes).from_address(array.unsafe_buffer_pointer())
    memory.owner = array
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def lies_as_in_numpy(dtype: np.dtype) -> bool:
    """Whether XLA keeps it as NumPy does: types of less than a byte are packed."""
    return dtype.isbuiltin == 1 or dtype.name == "bfloat16" or dtype.name.startswith("float8_")


def held_arrays(description: Description, trees: Mapping[str, Any]) -> list[Held]:
    """The shards that this process stores, in the order of the offsets. Moves no bytes.

    An array whose local devices all hold different boxes stays whole: one object is cheaper to copy than its shards.
    """
    extents = iter(description.extents)
    return [
        held
        for item, sources in description.items.items()
        for source, value in zip(sources, jax.tree.leaves(trees[item]), strict=True)
        for held in _held(source, value, extents)
    ]


def local_shards(description: Description, trees: Mapping[str, Any]) -> list[Shard]:
    """One local shard for every box that this process stores, in the order of their offsets. Moves no bytes."""
    return [shard for held in held_arrays(description, trees) for shard in held.shards()]


def by_device(source: LeafSource, value: Any) -> dict[Any, Any]:
    """The local shards of a leaf that lives on devices, each as a single-device array of plain dtype."""
    return {shard.device: shard.data for shard in _plain(source, value).addressable_shards}


def _held(source: LeafSource, value: Any, extents: Iterator[SlotExtent]) -> Iterator[Held]:
    """The arrays of one leaf: none where this process has no device of the leaf's."""
    count = len(source.record.boxes)
    if source.sharding is not None and not source.devices:
        return
    if not source.devices:
        yield Held(np.asarray(value, np.dtype(source.record.dtype)), (), (next(extents),))
        return
    value, kind = _plain(source, value), unusual_kind(source.sharding, source.devices[0])
    if source.first and value.is_fully_replicated:
        yield Held(value.addressable_data(0), source.devices, (next(extents),), kind)
    elif value.is_fully_addressable and count == value.sharding.num_devices:
        yield Held(value, source.devices, tuple(next(extents) for _ in range(count)), kind)
    else:
        local = {shard.device: shard.data for shard in value.addressable_shards}
        for device in source.devices:
            yield Held(local[device], (device,), (next(extents),), kind)


@lru_cache(maxsize=4096)
def unusual_kind(sharding: jax.sharding.Sharding | None, device: Any) -> str | None:
    """The kind of memory of an array where it is not its device's usual one."""
    kind = None if sharding is None else sharding.memory_kind
    return None if kind == device.default_memory().kind else kind


@lru_cache(maxsize=4096)
def on_device(device: Any, kind: str | None) -> jax.sharding.SingleDeviceSharding:
    """The sharding of an array in one kind of a device's memory."""
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def _plain(source: LeafSource, value: Any) -> Any:
    """A leaf without the type of its keys: JAX has the data at hand, and runs no program to give it."""
    return jax.random.key_data(value) if "key_impl" in source.record.extra else value
