"""The sizes of chunks and data files that the save arguments ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import ckptkit
from ckptkit import direct

STATE = {"w": jnp.arange(1024.0).reshape(8, 128), "n": np.arange(6), "epoch": 3}
WISHES = {"w": ocp.SaveArgs(chunk_byte_size=512), "n": ocp.SaveArgs(chunk_byte_size=8), "epoch": ocp.SaveArgs()}


def chunks(item: Path, leaf: str) -> list[int]:
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{leaf}/"}}
    layout: Any = ts.open(spec, open=True).result().chunk_layout
    return list(layout.read_chunk.shape)


@pytest.mark.parametrize("kind", [ocp.args.StandardSave, ocp.args.PyTreeSave])
def test_chunk_byte_size_rules_the_cells_of_each_tier(kind: Any, tmp_path: Path) -> None:
    """A reader of single rows would read whole arrays."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))]
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=tiers, host_id="h") as manager:
        manager.save(0, args=kind(STATE, WISHES))
        manager.save(1, args=kind(STATE))
        manager.wait_until_finished()
        for restored in (manager.restore(0), manager.restore(1)):
            assert jax.tree.all(jax.tree.map(np.array_equal, restored, STATE))
    assert chunks(tmp_path / "run/0/default", "w") == [1, 128]
    assert chunks(tmp_path / "run/1/default", "w") == [8, 128]
    for place in ("run", "ram"):
        assert {step.state for step in ckptkit.verify(str(tmp_path / place)).steps} == {"proven"}
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        assert np.array_equal(stock.restore(0, args=ocp.args.StandardRestore())["w"], STATE["w"])


def test_chunk_byte_size_rules_a_tree_at_a_path(tmp_path: Path) -> None:
    """The argument would do nothing where no manager writes the tree."""
    direct.PyTreeCheckpointer().save(tmp_path / "tree", STATE, save_args=WISHES)
    assert chunks(tmp_path / "tree", "w") == [1, 128]
    assert np.array_equal(direct.load(tmp_path / "tree")["w"], STATE["w"])


def test_target_size_rules_the_data_files_of_an_item(tmp_path: Path) -> None:
    """Files would be of the size of the profile, whatever the caller asks for."""
    state = {str(n): jnp.arange(1 << 16, dtype=jnp.float32) + n for n in range(8)}
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state, ocdbt_target_data_file_size=1 << 18))
        manager.save(1, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
    small, large = ([path.stat().st_size for path in (tmp_path / f"run/{n}/default/d").iterdir()] for n in (0, 1))
    assert len(small) >= 4 > len(large)
    assert max(small) <= 1 << 19 < max(large)
