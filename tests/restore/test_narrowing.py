"""64-bit arrays that are restored while JAX has 32-bit arrays alone: a warning."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit


@pytest.mark.parametrize("wide", [True, False])
def test_restore_warns_of_64_bit_arrays_that_jax_cuts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wide: bool
) -> None:
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))]
    with jax.enable_x64(True), ckptkit.CheckpointManager(tmp_path / "root", tiers=tiers, host_id="host") as manager:
        state = {"count": jnp.full(4, 2**40 + 1), "w": jnp.zeros(4, jnp.float32)}
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    with jax.enable_x64(wide), ckptkit.CheckpointManager(tmp_path / "root", tiers=tiers, host_id="host") as manager:
        found = manager.restore(1, args=ocp.args.StandardRestore())  # pyright: ignore[reportCallIssue]
    assert found is not None
    assert found["count"].dtype == ("int64" if wide else "int32")
    warned = [record.getMessage() for record in caplog.records if "jax_enable_x64" in record.getMessage()]
    assert warned == ([] if wide else warned[:1])
    assert wide or "leaf count of item 'default' is int64 in the save, and int32" in warned[0]
