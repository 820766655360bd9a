"""Host memory that saves take, as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.saving_process import LEAF_BYTES, LEAVES

BUFFERS_BYTES = (
    64 + 16
) << 20  # in addition to the snapshot: one cell, or the probe of a disk, and what the libraries take


@pytest.mark.disk
@pytest.mark.long
@pytest.mark.parametrize("tiers", ["durable", "ssd"])
def test_saves_use_one_snapshot_for_any_number_of_tiers(tiers: str, tmp_path: Path) -> None:
    """A state that fits into a host with one snapshot would be killed by its own checkpoints."""
    command = [sys.executable, "-m", "tests.system.saving_process", tiers, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    taken_bytes = int(done.stdout.split()[-1])
    assert LEAVES * LEAF_BYTES * 0.9 < taken_bytes < LEAVES * LEAF_BYTES + BUFFERS_BYTES
