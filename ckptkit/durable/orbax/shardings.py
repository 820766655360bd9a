"""A sharding as Orbax's JSON and back, so that stock Orbax and we read the same words."""

from __future__ import annotations

import json

import jax
import orbax.checkpoint as ocp

_NAMED = "NamedSharding"
_SINGLE = "SingleDeviceSharding"


def sharding_text(sharding: jax.sharding.Sharding) -> str | None:
    """Orbax's JSON of a sharding; None for the kinds that it has no words for."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    return None


def sharding_of_text(text: str) -> jax.sharding.Sharding | None:
    """The sharding on today's devices; None where they cannot form it."""
    try:
        words = json.loads(text)
        if words.get("sharding_type") == _NAMED:
            return ocp.metadata.NamedShardingMetadata.from_deserialized_dict(words).to_jax_sharding()
        if words.get("sharding_type") == _SINGLE:
            return ocp.metadata.SingleDeviceShardingMetadata.from_deserialized_dict(words).to_jax_sharding()
    except (ValueError, KeyError, RuntimeError, AttributeError, IndexError):
        pass  # saved on devices that are not there now
    return None
