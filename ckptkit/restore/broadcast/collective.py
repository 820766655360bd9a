"""Host bytes from process to process over the devices' interconnect: one jitted all-gather, of integers.

Nothing is added or cast during the transfer: bits of every dtype arrive as they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ckptkit.restore.broadcast.schedule import Groups
from ckptkit.util.own_context import own_context

_WORD = np.dtype(np.uint32)


def links_of(count: int) -> list[list[Any]]:
    """The devices over which each of `count` processes sends: equally many of each, none where one has none."""
    devices: list[list[Any]] = [[] for _ in range(count)]
    for device in sorted(jax.devices(), key=lambda device: device.id):
        devices[device.process_index].append(device)
    links = min(map(len, devices))
    return [own[:links] for own in devices]


@final
class AllGather:
    """Gives every process of a group what each of them puts in. Compiled when it is made.

    All processes of all `groups` call it together, on the thread that launches their collectives; nothing may keep one
    of them away once another has begun. Device memory of a process: its own bytes, and those of its group. A multiple
    of 4 bytes for each device is transferred.

    A process without room for the result must not find out in the collective, where the others wait for it. So `put`
    holds memory of the size of a result, and the processes vote after `put`. The call frees that memory and launches.
    """

    @own_context()
    def __init__(self, groups: Groups, width: int, links: Sequence[Sequence[Any]], process: int):
        self._own = links[process]
        self._shape = (len(groups), len(groups[0]), len(self._own), width // len(self._own) // _WORD.itemsize)
        assert self._shape[2] * self._shape[3] * _WORD.itemsize == width, "the width is shared evenly"
        mesh = Mesh(
            np.array([[links[member] for member in group] for group in groups]),
            ("group", "replica", "link"),
            axis_types=(AxisType.Auto,) * 3,
        )
        self._sent = NamedSharding(mesh, PartitionSpec("group", "replica", "link"))
        received = NamedSharding(mesh, PartitionSpec("group", None, "link"))
        gather = jax.jit(lambda words: words, out_shardings=received)
        self._gather = gather.lower(jax.ShapeDtypeStruct(self._shape, _WORD, sharding=self._sent)).compile()
        self._into = np.zeros((self._shape[1], width), np.uint8)
        self._reserved: Any = None  # the size of a result on each device: of the last one, from the second round on

    @own_context()
    def put(self, window: np.ndarray) -> jax.Array:
        """The bytes of this process (`uint8[width]`) on its devices, and room for the result; launches no collective.

        `window` must not change until the gather is done: a CPU device takes it as it is. Raises JAX's
        RESOURCE_EXHAUSTED where a device has no room.
        """
        parts = window.view(_WORD).reshape(len(self._own), 1, 1, 1, -1)
        shards = [jax.device_put(part, device) for part, device in zip(parts, self._own, strict=True)]
        if self._reserved is None:
            result = self._into.view(_WORD).reshape(self._shape[2], -1)
            self._reserved = jax.block_until_ready(jax.device_put(list(result), self._own, may_alias=False))
        return jax.make_array_from_single_device_arrays(self._shape, self._sent, shards)

    @own_context()
    def __call__(self, sent: jax.Array) -> np.ndarray:
        """`uint8[replicas, width]`: the windows of this process's group, in its order. Overwritten by the next call."""
        self._reserved = None
        received = self._gather(sent)
        self._reserved = received
        into = self._into.view(_WORD).reshape(self._shape[1], self._shape[2], self._shape[3])
        for shard in received.addressable_shards:
            link = self._own.index(shard.device)
            # Of an object of its own: JAX keeps the host copy with the object, and `received` stays.
            into[:, link] = np.asarray(shard.data.addressable_data(0))[0, :, 0]
        return self._into
