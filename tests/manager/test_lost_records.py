"""Missing records, not damaged ones: the remaining files show the loss; no restart goes back unnoticed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.states import abstract, assert_same, make_state, restore_args, save_args


class Job:
    def __init__(self, home: Path):
        self.home = home
        self.rejected: list[ckptkit.Event] = []
        with self.manager() as manager:
            for step in range(3):
                manager.save(step, args=save_args(make_state(step), step))
                manager.wait_until_finished()
        assert self.rejected == []

    def manager(self) -> ckptkit.CheckpointManager:
        log = ckptkit.EventLog()
        log.observe(lambda event: self.rejected.append(event) if event.kind == ckptkit.Kind.REJECTED else None)
        tiers = [
            ckptkit.Tier.ram(str(self.home / "ram")),
            ckptkit.Tier.ssd(str(self.home / "ssd"), save=ckptkit.EverySteps(1)),
        ]
        options = ocp.CheckpointManagerOptions(save_interval_steps=1)
        return ckptkit.CheckpointManager(self.home / "root", options=options, tiers=tiers, host_id="h", events=log)

    def restored(self) -> int:
        with self.manager() as manager:
            found = manager.restore(None, args=restore_args(abstract(make_state())))
        step = found["data"]["step"]
        assert_same(found["state"], make_state(step))
        return step


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_lost_manifest_of_the_newest_save_is_reported(job: Job, tier: str) -> None:
    """A run would train the last steps again, or on another branch, and nobody would know why."""
    (path,) = (job.home / tier).rglob("step-000000000002-*.json")
    path.unlink()
    assert job.restored() == 2, "the other tiers have it"
    for other in {"ram", "ssd", "root"} - {tier}:
        for step in range(3):
            shutil.rmtree(job.home / other / str(step), ignore_errors=True)
        if other != "root":
            shutil.rmtree(job.home / other)
    job.rejected.clear()
    assert job.restored() < 2
    said = [
        (event.step, event.tier) for event in job.rejected if f"manifest {path} is missing" in event.fields["reason"]
    ]
    assert set(said) == {(2, tier)}


def test_lost_older_manifests_are_not_reported(job: Job) -> None:
    """An alarm at every restart is one that nobody reads."""
    with job.manager() as manager:
        manager.restore(0, args=restore_args(abstract(make_state())))  # a rollback: 1 and 2 are abandoned
        for step in (1, 2, 3):
            manager.save(step, args=save_args(make_state(step), step))
            manager.wait_until_finished()
        manager.delete(3)
        manager.save(4, args=save_args(make_state(4), 4))
        manager.wait_until_finished()
    (older,) = (job.home / "ram").rglob("step-000000000002-*.json")
    older.unlink()
    job.rejected.clear()
    assert job.restored() == 4
    assert job.rejected == []
    with job.manager() as manager:
        manager.delete(4)
    assert job.restored() == 2
    assert job.rejected == []


def test_step_that_lost_its_sidecars_is_rejected(job: Job) -> None:
    """A step of ours would be restored as one of stock Orbax: unproven, with whatever bits are there."""
    shutil.rmtree(job.home / "root/2/state/_ckptkit")
    assert ckptkit.verify(str(job.home / "root"), 2).corrupt
    assert job.restored() == 2, "from a fast tier"
    shutil.rmtree(job.home / "ram")
    shutil.rmtree(job.home / "ssd")
    job.rejected.clear()
    assert job.restored() == 1
    assert any("2/state has lost its sidecars" in event.fields["reason"] for event in job.rejected)
    with ocp.CheckpointManager(job.home / "root") as stock:
        found: Any = stock.restore(2, args=restore_args(abstract(make_state())))
    assert_same(found["state"], make_state(2))


def test_lost_epoch_record_is_read_from_its_copy(job: Job) -> None:
    """A restart would refuse the root, or not know which branch was abandoned."""
    record, copy = sorted((job.home / "root/_ckptkit/epochs").iterdir(), reverse=True)
    for damage in (record.unlink, lambda: record.write_bytes(b"{"), copy.unlink):
        whole = record.read_bytes()
        damage()
        job.rejected.clear()
        assert job.restored() == 2
        said = [event.fields["reason"] for event in job.rejected if "epoch record" in event.fields["reason"]]
        assert len(said) == (damage != copy.unlink)
        record.write_bytes(whole)
