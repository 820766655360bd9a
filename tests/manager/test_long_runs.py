"""The memory, open files and slots that a run of many saves and starts leaves behind."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.job import vote as job_vote
from ckptkit.job.coordination import LocalCoordinator
from ckptkit.manager.metadata import MetadataIndex
from ckptkit.save.decider import Decider

args: Any = ocp.args


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_metrics_of_deleted_steps_are_dropped(tmp_path: Path) -> None:
    """A run of a million saves would keep a million metrics."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], max_to_keep=2)
    known: list[int] = []
    with ckptkit.CheckpointManager(tmp_path / "run", options=options) as manager:
        index = MetadataIndex(options, manager._durable, manager._components.history.inventory, lambda: known)
        for step in range(2000):
            known[:] = [*known[-1:], step]
            index.taken(step, {"loss": -step})
        assert len(index._metrics) <= 65
        assert index.best_of([1998, 1999]) == 1998
        assert index.cached_metrics(1999) == {"loss": -1999}


def test_decider_remembers_a_bounded_number_of_steps() -> None:
    """A run of a million saves would keep a million records, and show them to a policy at each save."""
    decider = Decider(ocp.CheckpointManagerOptions(), (), [], LocalCoordinator())
    for step in range(3000):
        decider.taken(step, frozenset({"durable"}))
    assert [info.step for info in decider._durable] == list(range(2000, 3000))


@pytest.mark.parametrize("medium", ["ram", "ssd"])
def test_restores_close_slots_without_the_collector(tmp_path: Path, medium: str) -> None:
    """Slots that were deleted would keep their memory until the collector runs, which trainers turn off."""
    tier = getattr(ckptkit.Tier, medium)(str(tmp_path / "tier"), save=ckptkit.EverySteps(1))
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=[tier], host_id="host") as manager:
        manager.save(0, args=args.StandardSave({"w": jnp.arange(1000.0)}))
        manager.wait_until_finished()
        manager.restore(0)
        gc.collect()
        gc.disable()
        try:
            before = open_files()
            for _ in range(5):
                manager.restore(0)
            assert open_files() == before
        finally:
            gc.enable()


def test_rejected_restores_keep_no_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on to older saves while it holds the errors would hold one more state for each on its devices."""
    verdict = {"fatal": None, "reject": ["process 1: CorruptCheckpointError: w is damaged", ["damaged"]]}
    vote, errors, held = job_vote._vote, list[Exception](), list[int]()

    def of_another(coordinator: Any, channel: str, *rest: Any) -> Any:
        return verdict if channel == "restore" else vote(coordinator, channel, *rest)

    tier = ckptkit.Tier.ram(str(tmp_path / "tier"), save=ckptkit.EverySteps(1))
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=[tier], host_id="host") as manager:
        manager.save(0, args=args.StandardSave({"w": jnp.arange(1013.0)}))
        manager.wait_until_finished()
        monkeypatch.setattr(job_vote, "_vote", of_another)
        for _ in range(3):
            with pytest.raises(ckptkit.CorruptCheckpointError) as raised:
                manager.restore(0)
            errors.append(raised.value)
            held.append(sum(array.shape == (1013,) for array in jax.live_arrays()))
    assert held == [0, 0, 0]


def test_slots_of_hosts_that_left_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hosts whose names change would fill the ramdisk, until a save finds no room."""

    def start(host: str) -> list[str]:
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "ckptkit"),
            ckptkit.CheckpointManager(
                tmp_path / "run", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))], host_id=host
            ) as manager,
        ):
            step = (manager.latest_step() or 0) + 1
            manager.save(step, args=args.StandardSave({"w": jnp.arange(1000.0)}))
        return [each.getMessage() for each in caplog.records if "tiers clean" in each.getMessage()]

    assert start("pod-a") == []
    assert start("pod-a") == []
    (warning,) = start("pod-b")
    assert "hosts that are not in this job: pod-a" in warning
