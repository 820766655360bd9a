"""Proven boxes onto devices, and memory of a CPU device's own for what is read: there before its bytes are."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype

from ckptkit.model.boxes import Box
from ckptkit.restore.plan import Key
from ckptkit.restore.tree import Target
from ckptkit.util.pages import advise_huge

_log = logging.getLogger(__name__)
_FROM_BYTES = 1 << 20


class DeviceBuffer(np.ndarray):
    """Host memory that is a CPU device's array. A view keeps the array alive, but does not prevent its donation."""

    array: jax.Array | None = None


def device_buffers_of(targets: Iterable[Target]) -> dict[Key, DeviceBuffer]:
    """Device buffers for the leaves of `targets` that can have one (`can_allocate`); none where JAX cannot."""
    by_sharding: dict[Any, list[Target]] = {}
    for target in targets:
        if target.sharding is not None and can_allocate(target.shape, np.dtype(target.dtype), target.sharding):
            by_sharding.setdefault(target.sharding, []).append(target)
    found: dict[Key, DeviceBuffer] = {}
    for sharding, several in by_sharding.items():
        try:
            blocks = allocate_buffers([(target.shape, np.dtype(target.dtype)) for target in several], sharding)
        except Exception as error:  # noqa: BLE001 - experimental: without it a restore is slower, and no less right
            _log.debug("restored arrays take over the memory that is read into: %s", error)
            return found
        found |= zip((target.key for target in several), blocks, strict=True)
    return found


def can_allocate(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> bool:
    """Whether an array gets memory of its device's own: large ones that are whole on a single CPU device."""
    if sharding is None or math.prod(shape) * dtype.itemsize < _FROM_BYTES or sharding.num_devices != 1:
        return False
    (device,) = sharding.device_set
    usual = sharding.memory_kind in (None, device.default_memory().kind)
    return usual and device.platform == "cpu" and _lies_as_in_numpy(dtype) and dtype == canonicalize_dtype(dtype)


def allocate_buffers(
    wanted: Iterable[tuple[tuple[int, ...], np.dtype]], sharding: jax.sharding.Sharding
) -> list[DeviceBuffer]:
    """Uninitialised arrays, each with its host memory, to be written before anything else uses it.

    An array that takes over other memory cannot be donated: the first step would copy it. Nothing is touched here: the
    first write makes the pages, huge ones where the kernel gives them. Cost: one small program, compiled in 20 ms and
    0.2 ms for each array. Raises what JAX raises where it has no such program.
    """
    make = _allocation(tuple((shape, dtype.name) for shape, dtype in wanted), sharding)
    found = []
    for array in jax.block_until_ready(make()):
        start = array.unsafe_buffer_pointer()
        advise_huge(start, array.nbytes)
        memory: Any = (ctypes.c_ubyte * array.nbytes).from_address(start)
        memory.owner = array
        landing = np.frombuffer(memory, array.dtype).reshape(array.shape).view(DeviceBuffer)
        landing.array = array
        found.append(landing)
    return found


@lru_cache(maxsize=4)
def _allocation(wanted: tuple[tuple[tuple[int, ...], str], ...], sharding: jax.sharding.Sharding) -> Any:
    from jax.experimental.buffer_callback import buffer_callback

    results = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in wanted]
    # XLA gives a callback that works in place the memory of its results as it comes, and this one leaves it so.
    return jax.jit(buffer_callback(lambda context, out: None, results), out_shardings=sharding)


def _lies_as_in_numpy(dtype: np.dtype) -> bool:
    """Whether XLA keeps it as NumPy does: types of less than a byte are packed."""
    return dtype.isbuiltin == 1 or dtype.name == "bfloat16" or dtype.name.startswith("float8_")


def place(target: Target, blocks: Mapping[Box, np.ndarray]) -> Any:
    """The leaf from its proven blocks. Never references tier memory: the blocks are this restore's own.

    On the CPU backend the array takes the blocks' memory as it is; on others they are transferred, whatever
    `jax.transfer_guard` is set to: the caller has asked for it.
    """
    with jax.transfer_guard("allow"):
        return _placed(target, blocks)


def _placed(target: Target, blocks: Mapping[Box, np.ndarray]) -> Any:
    if target.sharding is None:
        (block,) = blocks.values()
        return block if target.kind in ("numpy", "jax") else block.item()
    if not blocks:
        return _place_nothing(target, target.sharding)
    if len(blocks) == 1 and target.sharding.num_devices == 1:
        (block,) = blocks.values()
        array = block.array if isinstance(block, DeviceBuffer) else None
        if array is None:
            array = jax.make_array_from_callback(target.shape, target.sharding, lambda _: block)
        return jax.random.wrap_key_data(array, impl=target.key_impl) if target.key_impl else array
    indices = target.sharding.addressable_devices_indices_map(target.shape)
    if len(indices) == len(blocks):
        only, *more = blocks.values()
        array = jax.make_array_from_callback(
            target.shape,
            target.sharding,
            lambda index: blocks[Box.of_index(index or (), target.shape)] if more else only,
        )
    else:
        array = _place_copies(target, blocks, indices)
    return jax.random.wrap_key_data(array, impl=target.key_impl) if target.key_impl else array


def _place_nothing(target: Target, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array of which no device of this process holds a shard."""
    array = jax.make_array_from_single_device_arrays(target.shape, sharding, [], dtype=np.dtype(target.dtype))
    return jax.random.wrap_key_data(array, impl=target.key_impl) if target.key_impl else array


def _place_copies(target: Target, blocks: Mapping[Box, np.ndarray], indices: Mapping[Any, Any]) -> jax.Array:
    """Devices must not share host memory: on the CPU backend a transfer may alias it, and a step may donate it."""
    taken: set[Box] = set()
    shards = []
    for device, index in indices.items():
        box = Box.of_index(index or (), target.shape)
        block = blocks[box].copy() if box in taken else blocks[box]
        taken.add(box)
        shards.append(jax.device_put(block, device))
    assert target.sharding is not None
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)
