"""The lines of docs/DASHBOARDS.md for TensorBoard and W&B, run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BEFORE = "import ckptkit\nevents = ckptkit.EventLog()\n"
AFTER = """
import jax.numpy as jnp, orbax.checkpoint as ocp
with ckptkit.CheckpointManager("root", events=events) as manager:
    for step in range(3):
        manager.save(step, args=ocp.args.StandardSave({"w": jnp.zeros(8)}))
        manager.wait_until_finished()
"""


def run_lines(tool: str, end: str, directory: Path) -> None:
    """Runs the block of the page that names `tool`, then a short training."""
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "DASHBOARDS.md").read_text(), re.M | re.S)
    (code,) = [block for block in blocks if tool in block]
    command = [sys.executable, "-c", BEFORE + code + AFTER + end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=directory, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed at" not in done.stderr, done.stderr


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    """Breaks when a reader copies the lines, and TensorBoard shows nothing."""
    pytest.importorskip("tensorboardX")
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install '.[telemetry-test]'"
    )
    run_lines("tensorboardX", "writer.close()", tmp_path)
    found = accumulators.EventAccumulator(str(tmp_path / "runs" / "x" / "tensorboard")).Reload()
    assert [scalar.step for scalar in found.Scalars("commit_s/durable")] == [0, 1, 2]
    assert [scalar.step for scalar in found.Scalars("stall_s")] == [0, 1, 2]


def test_wandb_keeps_the_scalars_offline(tmp_path: Path) -> None:
    """Breaks when a reader copies the lines, and W&B logs nothing."""
    pytest.importorskip("wandb", reason="pip install '.[telemetry-test]'")
    run_lines("wandb", "run.finish()", tmp_path)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"commit_s/durable" in log.read_bytes()
