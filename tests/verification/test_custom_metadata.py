"""The custom metadata of a step: a change is found, and steps of earlier versions are read as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.model.manifest import Manifest, custom_digest
from ckptkit.v1 import Checkpointer

CUSTOM = {"pos": 1000, "name": "run", "nested": {"b": [1, 2.5, None], "a": float("nan")}}


def _saved(root: Path, custom: dict[str, Any] | None) -> Path:
    with ckptkit.CheckpointManager(root) as manager:
        args = ocp.args.StandardSave({"w": jnp.arange(4.0)})  # pyright: ignore[reportCallIssue]
        manager.save(1, args=args, custom_metadata=custom)
    return root / "1/_CHECKPOINT_METADATA"


def _state(root: Path) -> str:
    return ckptkit.verify(str(root)).steps[0].state


@pytest.mark.parametrize("custom", [None, {}, CUSTOM, {"1": "a", "ä": True}])
def test_custom_metadata_as_saved_is_proven(tmp_path: Path, custom: dict[str, Any] | None) -> None:
    """Every step with custom metadata would be called damaged."""
    _saved(tmp_path, custom)
    assert _state(tmp_path) == "proven"
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert json.dumps(manager.metadata(1).custom_metadata) == json.dumps(custom or {})


@pytest.mark.parametrize("custom", [None, CUSTOM])
def test_changed_custom_metadata_is_found(tmp_path: Path, custom: dict[str, Any] | None) -> None:
    """A restart would go on from another position in its data."""
    file = _saved(tmp_path, custom)
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps({**recorded, "custom_metadata": {**(custom or {}), "pos": 9000}}))
    (proof,) = ckptkit.verify(str(tmp_path)).steps
    assert proof.state == "corrupt"
    assert "custom_metadata in _CHECKPOINT_METADATA is not what was saved" in str(proof.findings[0])
    with (
        ckptkit.CheckpointManager(tmp_path) as manager,
        pytest.raises(ckptkit.CorruptCheckpointError, match="custom_metadata"),
    ):
        manager.metadata(1)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ckptkit.CorruptCheckpointError, match="custom_metadata"):
        checkpointer.checkpointables_metadata(1)


def test_step_of_an_earlier_version_is_read_as_before(tmp_path: Path) -> None:
    """Every step of an earlier version would be called damaged."""
    file = _saved(tmp_path, CUSTOM)
    sidecar = tmp_path / "1/default/_ckptkit/process-0.json"
    body = json.loads(sidecar.read_text())["manifest"]
    assert body.pop("custom") == custom_digest(CUSTOM)
    found = Manifest.from_bytes(sidecar.read_bytes(), path="")
    older = Manifest(
        save_id=found.save_id, writer=found.writer, slot="", arrays=found.arrays, inline=found.inline
    ).to_bytes()
    assert json.loads(older)["manifest"] == body
    sidecar.write_bytes(older)
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps({**recorded, "custom_metadata": {"pos": 9000}}))
    assert _state(tmp_path) == "proven"
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.metadata(1).custom_metadata == {"pos": 9000}


def test_step_mended_from_a_slot_keeps_the_digest(tmp_path: Path) -> None:
    """A repair would make a step whose custom metadata nobody proves."""
    args: Any = ocp.args.StandardSave({"w": jnp.arange(4.0)})  # pyright: ignore[reportCallIssue]
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))]
    with ckptkit.CheckpointManager(tmp_path / "root", tiers=tiers, host_id="h") as manager:
        manager.save(1, args=args, custom_metadata=CUSTOM)
    sidecar = tmp_path / "root/1/default/_ckptkit/process-0.json"
    sidecar.unlink()
    assert _state(tmp_path / "root") == "corrupt"
    ckptkit.scrub(str(tmp_path / "root"), [str(tmp_path / "ram")], repair=True, host_id="h")
    assert _state(tmp_path / "root") == "proven"
    assert Manifest.from_bytes(sidecar.read_bytes(), path="").custom == custom_digest(CUSTOM)
