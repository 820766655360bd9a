"""A run of two steps that every tier holds, to be damaged; put back after each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.cli.conftest import ckpt as ckpt
from tests.states import make_state, save_args

HOST = "h0"
STEPS = (0, 1)


@dataclass(frozen=True, slots=True)
class Job:
    """Its directories; the ramdisk, the disk and the durable root hold steps 0 and 1."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "root"

    @property
    def tiers(self) -> tuple[str, str]:
        return str(self.home / "ram"), str(self.home / "ssd")

    def slots(self, tier: str) -> Path:
        (found,) = (self.home / tier).glob(f"*/{HOST}/0")
        return found

    def manifest(self, tier: str, step: int) -> Path:
        (found,) = self.slots(tier).glob(f"step-{step:012d}-*.json")
        return found

    def manager(self, **options: Any) -> ckptkit.CheckpointManager:
        ram, ssd = self.tiers
        tiers = [ckptkit.Tier.ram(ram), ckptkit.Tier.ssd(ssd, save=ckptkit.EverySteps(1))]
        orbax_options = ocp.CheckpointManagerOptions(save_interval_steps=1, **options)
        return ckptkit.CheckpointManager(
            self.root, options=orbax_options, tiers=tiers, host_id=HOST, processes=ckptkit.ProcessOptions(timeout_s=30)
        )


@pytest.fixture(autouse=True)
def no_deletion_meanwhile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `test_running_job` has another process that deletes steps; the others need not wait for its deletions."""
    if not request.path.name.startswith("test_running"):
        monkeypatch.setattr("ckptkit.verification.durable._SETTLE_S", 0.01)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Not to be changed: see `job`."""
    job = Job(tmp_path_factory.mktemp("job"))
    with job.manager() as manager:
        for step in STEPS:
            manager.save(step, args=save_args(make_state(step), step))
            manager.wait_until_finished()
    return job


@pytest.fixture
def job(saved: Job) -> Iterator[Job]:
    """`saved`, to be damaged: at the same path, because a fast tier's job is named by the path of its root."""
    kept = saved.home.with_name(saved.home.name + "-kept")
    shutil.copytree(saved.home, kept)
    yield saved
    shutil.rmtree(saved.home)
    kept.rename(saved.home)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of stock Orbax with step 3, and `zarr3` and `files` that it wrote without a manager."""
    home = tmp_path_factory.mktemp("stock")
    state = make_state(3)
    with ocp.CheckpointManager(home / "root") as manager:
        manager.save(3, args=save_args(state, 3))
    plain = {name: leaf for name, leaf in state.items() if name not in ("key", "keys")}
    for name, handler, tree in (
        ("files", ocp.PyTreeCheckpointHandler(use_ocdbt=False), plain),
        ("zarr3", ocp.PyTreeCheckpointHandler(use_zarr3=True), state),
    ):
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(home / name, args=ocp.args.PyTreeSave(tree))  # pyright: ignore[reportCallIssue]
    return home
