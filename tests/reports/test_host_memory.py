"""Host memory of a restore."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckptkit
from tests.forked import run_forked
from tests.reports.managers import args, restored
from tests.reports.reported import reported
from tests.reports.resuming_process import LEAF_BYTES, LEAVES
from tests.states import assert_same

STATE_BYTES = LEAVES * LEAF_BYTES
READ_AHEAD_BYTES = ckptkit.DurableProfile().read_ahead_bytes
REST_BYTES = 64 << 20  # what the libraries take


@reported("marin-community/marin/pull/8480", "The host memory of a resume is known beforehand, and held.")
def test_restore_takes_the_state_and_what_is_read_ahead(tmp_path: Path) -> None:
    """docs/TUNING.md has the same sum: one state, and a second one only where the template holds it."""
    peaks = {}
    for what in ("save", "abstract", "state"):
        command = [sys.executable, "-m", "tests.reports.resuming_process", what, str(tmp_path)]
        done = run_forked(command, timeout=100, check=True)
        peaks[what] = int(done.stdout.split()[-1]) if what != "save" else 0
    for what, states in (("abstract", 1), ("state", 2)):
        assert states * STATE_BYTES * 0.9 < peaks[what] < states * STATE_BYTES + READ_AHEAD_BYTES + REST_BYTES, peaks


@reported("AI-Hypercomputer/maxtext/pull/1298", "An array larger than the memory for reading ahead is restored.")
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_array_larger_than_the_limit_of_reading_is_restored(tmp_path: Path, compression: Any) -> None:
    profile = ckptkit.DurableProfile(read_ahead_bytes=1 << 20, in_flight_bytes=1 << 20, compression=compression)
    tree = {"w": jnp.arange(1 << 21)}
    with ckptkit.CheckpointManager(tmp_path, durable=profile) as manager:
        manager.save(0, args=args.StandardSave(tree))
        manager.wait_until_finished()
        assert_same(manager.restore(0), tree)
    assert_same(restored(tmp_path), tree)
