"""The pace of durable writes: a rate on average, and fast tiers first."""

from __future__ import annotations

import threading
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.cells import pacing
from ckptkit.durable.cells.pacing import Pace
from ckptkit.durable.steps import DurableSteps
from ckptkit.job.coordination import make_coordinator
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.testing.bucket import BucketServer
from ckptkit.util import clock
from tests.states import abstract, assert_same


def test_average_rate_is_limited() -> None:
    """The durable tier would take the network that the training needs."""
    pace = Pace(1e6)
    began_s = clock.monotonic_s()
    waits = [pace.take(50_000) for _ in range(5)]
    assert clock.monotonic_s() - began_s >= 0.2  # 250 kB at 1 MB/s, and the last piece is not waited for
    assert waits[0] < 0.05


def test_unlimited_rate_never_waits() -> None:
    """A setting that was not made would cost throughput."""
    assert sum(Pace().take(1 << 40) for _ in range(100)) < 1.0


def test_fast_tier_save_has_priority() -> None:
    """A commit of milliseconds would take as long as the durable tier's next pieces."""
    pace = Pace()
    pace.begin_urgent("step 1")
    taken = threading.Event()
    thread = threading.Thread(target=lambda: (pace.take(1), taken.set()))
    thread.start()
    assert not taken.wait(0.1)
    pace.end_urgent("step 1")
    pace.end_urgent("step 1")  # reported twice: at its commit, and at its end
    assert taken.wait(60)
    thread.join()


def test_continuous_fast_saves_do_not_starve_the_durable_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that saves all the time would never have a durable step."""
    monkeypatch.setattr(pacing, "YIELD_S_MAX", 0.05)
    pace = Pace()
    pace.begin_urgent("step 1")
    assert pace.take(1) >= 0.04


def test_manager_keeps_to_its_part_of_the_rate_of_the_job(tmp_path: Path) -> None:
    """The setting would be taken and have no effect."""
    profile = DurableProfile(job_write_bytes_per_s=4e6)
    coordinator = make_coordinator()
    steps = DurableSteps(str(tmp_path / "run"), ocp.CheckpointManagerOptions(), coordinator, profile=profile)
    try:
        began_s = clock.monotonic_s()
        for _ in range(3):
            steps.pace.take(1_000_000)
        assert clock.monotonic_s() - began_s >= 0.4  # two of the three are waited for, at 4 MB/s
        assert steps.profile.write_bytes_per_s == 4e6 / coordinator.count
    finally:
        steps.close()


@pytest.mark.parametrize("root", ["directory", "bucket"])
def test_restores_keep_to_their_part_of_the_rate_of_the_job(root: str, tmp_path: Path, server: BucketServer) -> None:
    """A thousand hosts that start again would take the network, or the bucket's bandwidth, from other jobs."""
    url = str(tmp_path / "run") if root == "directory" else "gs://runs/run"
    state = {name: jnp.arange(1 << 18, dtype=jnp.float32) + n for n, name in enumerate("abcd")}  # 4 MiB
    with ckptkit.CheckpointManager(url) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
    durable = DurableProfile(job_read_bytes_per_s=4 << 20)
    with ckptkit.CheckpointManager(url, durable=durable) as manager:
        began_s = clock.monotonic_s()
        found = manager.restore(1, args=ocp.args.StandardRestore(abstract(state)))  # pyright: ignore[reportCallIssue]
        assert clock.monotonic_s() - began_s >= 0.7  # the last cell is not waited for
        assert manager._durable._read_pace.taken_bytes == 4 << 20
    assert_same(found, state)
