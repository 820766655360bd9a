"""A sharding as Orbax's JSON and back, so that stock Orbax and we read the same words."""

from __future__ import annotations

import json
from functools import lru_cache

import jax
import numpy as np
import orbax.checkpoint as ocp

_NAMED = "NamedSharding"
_SINGLE = "SingleDeviceSharding"
_MEMORY_KIND = "memory_kind"
_LISTED_DEVICES_MAX = 64  # a short list stays: with it stock Orbax restores the mesh where there are more devices


def sharding_text(sharding: jax.sharding.Sharding) -> str | None:
    """Orbax's JSON of a sharding; None for the kinds that it has no words for.

    A mesh of many devices that are all there are, in order, is written without their list: so Orbax reads such a text.
    A kind of memory that is not the usual one is written before Orbax's text. Orbax ignores it there.
    """
    if isinstance(sharding, jax.sharding.NamedSharding):
        text = _named_words(sharding).to_serialized_string()
        if sharding.memory_kind in (None, jax.local_devices()[0].default_memory().kind):
            return text
        return f'{{"{_MEMORY_KIND}": {json.dumps(sharding.memory_kind)}, {text[1:]}'
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    return None


@lru_cache(maxsize=256)
def sharding_of_text(text: str) -> jax.sharding.Sharding | None:
    """The sharding on today's devices; None where they cannot form it. Remembered: 8 ms for a list of 512 devices."""
    try:
        words = json.loads(text)
        if words.get("sharding_type") == _NAMED:
            named = ocp.metadata.NamedShardingMetadata.from_deserialized_dict(words)
            sharding = named.to_jax_sharding() if named.device_mesh else _on_first_devices(named)
            return _in_memory(sharding, words.get(_MEMORY_KIND))
        if words.get("sharding_type") == _SINGLE:
            return ocp.metadata.SingleDeviceShardingMetadata.from_deserialized_dict(words).to_jax_sharding()
    except (ValueError, KeyError, RuntimeError, AttributeError, IndexError):
        pass  # saved on devices that are not there now
    return None


@lru_cache(maxsize=256)
def without_devices(text: str) -> str:
    """The text for a file that repeats it for every leaf: without a list of many devices, where they are all there are.

    Orbax puts such a mesh on today's devices in their own order: other devices may hold a box, of the same bits.
    """
    words, found, _ = text.partition(', "device_mesh": ')
    if not found:
        return text
    devices = int(np.prod(json.loads(f"{words}}}")["shape"]))
    return f"{words}}}" if devices == jax.device_count() > _LISTED_DEVICES_MAX else text


def _named_words(sharding: jax.sharding.NamedSharding) -> ocp.metadata.NamedShardingMetadata:
    mesh = sharding.mesh
    if mesh.size > _LISTED_DEVICES_MAX and list(np.asarray(mesh.devices).flat) == jax.devices():
        return ocp.metadata.NamedShardingMetadata(
            shape=np.array(list(mesh.shape.values())),
            axis_names=list(mesh.axis_names),
            axis_types=tuple(mesh.axis_types),
            partition_spec=tuple(sharding.spec),
        )
    return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)


def _in_memory(sharding: jax.sharding.Sharding, kind: str | None) -> jax.sharding.Sharding:
    """The sharding in memory of a kind, where today's devices have it."""
    kinds = {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
    return sharding.with_memory_kind(kind) if kind is not None and kind in kinds else sharding


def _on_first_devices(named: ocp.metadata.NamedShardingMetadata) -> jax.sharding.Sharding:
    """The mesh on as many of today's devices as it had, where there are more."""
    devices = np.array(jax.devices()[: int(np.prod(named.shape))]).reshape(named.shape)
    axes = {"axis_names": named.axis_names, "axis_types": named.axis_types}
    return jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, **axes), jax.sharding.PartitionSpec(*named.partition_spec)
    )
