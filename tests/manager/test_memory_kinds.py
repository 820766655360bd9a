"""Leaves that are offloaded to the host's memory stay there."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit


@pytest.mark.parametrize("tier", ["ram", "durable"])
def test_offloaded_leaves_come_back_to_host_memory(tmp_path: Path, tier: str) -> None:
    """Moments that were offloaded would fill the device's memory after a restart."""
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    kinds = {"weights": "device", "moments": "pinned_host"}
    state = {
        name: jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("fsdp"), memory_kind=kind))
        for name, kind in kinds.items()
    }
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if tier == "ram" else []
    for turn in ("save", "restore"):
        with ckptkit.CheckpointManager(tmp_path / "root", tiers=tiers, host_id="h") as manager:
            if turn == "save":
                manager.save(1, args=ocp.args.StandardSave(state))
                continue
            found = manager.restore(1, args=ocp.args.StandardRestore(ckptkit.abstract_state(state)))
    assert {name: leaf.sharding.memory_kind for name, leaf in found.items()} == kinds
    for leaf in found.values():
        np.testing.assert_array_equal(leaf, np.arange(8.0))
