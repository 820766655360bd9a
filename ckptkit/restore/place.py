"""Proven boxes onto devices."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ckptkit.model.boxes import Box
from ckptkit.restore.device_buffers import DeviceBuffer, allocate_buffers, can_allocate
from ckptkit.restore.plan import Key
from ckptkit.restore.tree import Target

_log = logging.getLogger(__name__)


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


def place(target: Target, blocks: Mapping[Box, np.ndarray]) -> Any:
    """The leaf from its proven blocks. Never references tier memory: the blocks are this restore's own.

    On the CPU backend the array takes the blocks' memory as it is; on others they are transferred.
    """
    if target.sharding is None:
        (block,) = blocks.values()
        return block if target.kind in ("numpy", "jax") else block.item()
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
