"""The last step of a run that was killed in its durable upload, where a restart has nothing left to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit

ARGS: Any = ocp.args


def manager_at(home: Path, **options: Any) -> ckptkit.CheckpointManager:
    return ckptkit.CheckpointManager(
        home / "durable",
        options=ocp.CheckpointManagerOptions(save_interval_steps=1, **options),
        tiers=[ckptkit.Tier.ram(str(home / "ram"))],
        host_id="host",
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Step 2 is in the ramdisk, and its upload was cut off."""
    with manager_at(tmp_path) as manager:
        for step in (1, 2):
            assert manager.save(step, args=ARGS.StandardSave({"w": np.full(4, step)}))
            manager.wait_until_finished()
    (tmp_path / "durable" / "2").rename(tmp_path / "cut off")
    return tmp_path


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "is only in tier" in (text := record.getMessage())]


def test_restored_step_in_fast_tiers_alone_is_named_at_close(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run would end as finished, and a reboot would lose its last step without a message."""
    with manager_at(home) as manager:
        manager.restore(None)
    (text,) = warned(caplog)
    assert text.startswith("step 2 is only in tier ram: the durable tier has step 1. This run restored it")
    assert "save(2, ..., force=True)" in text
    assert not (home / "durable" / "2").exists()


def test_remedy_of_the_warning_keeps_the_step(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The advice would not help."""
    with manager_at(home) as manager:
        assert manager.save(2, args=ARGS.StandardSave(manager.restore(None)), force=True)
    assert warned(caplog) == []
    assert [step.state for step in ckptkit.verify(str(home / "durable")).steps] == ["proven", "proven"]


def test_run_without_a_lone_step_is_not_warned(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every evaluation, and every run that goes on, would end with a warning."""
    with manager_at(home, read_only=True) as manager:
        manager.restore(None)
    with manager_at(home) as manager:
        assert manager.save(3, args=ARGS.StandardSave(manager.restore(None)))
    with manager_at(home) as manager:
        manager.restore(None)
    with caplog.at_level(logging.WARNING):
        assert warned(caplog) == []
