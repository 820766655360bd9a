"""A save of ours whose sidecars are lost or damaged: every command reports it, and none writes from it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptkit
from tests.cli.conftest import Run
from tests.verification.conftest import Job

CORRUPT = 11


def _lose(item: Path) -> None:
    shutil.rmtree(item / "_ckptkit")


def _cut(item: Path) -> None:
    (sidecar,) = (item / "_ckptkit").iterdir()
    os.truncate(sidecar, sidecar.stat().st_size // 2)


def _empty(item: Path) -> None:
    (sidecar,) = (item / "_ckptkit").iterdir()
    sidecar.unlink()


@pytest.mark.parametrize("damage", [_lose, _cut, _empty])
def test_unprovable_save_is_reported_and_never_copied(
    job: Job, ckpt: Run, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Changed bytes would be converted as good, and a new layout would be called proven."""
    step, good, made = job.root / "1", job.root / "0", tmp_path / "made"
    damage(step / "state")
    for path in (step, step / "state"):
        assert ckptkit.inspect(str(path)).problems, path
        assert not ckptkit.inspect(str(path)).origin.proven
        assert ckptkit.inspect(str(path)).origin.writer == "ckptkit"
        assert ckptkit.verify(str(path)).corrupt
    listed = ckptkit.list_steps(str(job.root), host_id="other").steps[1]
    assert (listed.step, listed.state) == (1, "damaged")
    for command in (
        ("inspect", step),
        ("verify", step),
        ("convert", step, made, "--to", "safetensors"),
        ("convert", step / "state", made, "--to", "npz"),
        ("convert", step, made, "--to", "orbax"),
        ("extract", step, made, "--only", "**", "--to", "npz"),
        ("merge", step, good, made, "--average", "--to", "npz"),
        ("merge", good, step, made, "--average", "--to", "npz"),
        ("diff", step, good),
        ("diff", good, step),
        ("reshard", step, made, "--mesh", "data=1"),
    ):
        found = ckpt(*command)
        assert found.code == CORRUPT, (command, found)
        assert not made.exists(), command
        assert not list(tmp_path.glob("made*")), command


def test_step_that_lost_an_item_is_damaged(job: Job, ckpt: Run) -> None:
    """A step without its arrays would be the newest whole one: `prune` would delete the steps that have theirs."""
    step = job.root / "1"
    shutil.rmtree(step / "state")
    for command in (("verify", step), ("inspect", step), ("steps", job.root), ("diff", step, step)):
        found = ckpt(*command)
        assert found.code == CORRUPT, (command, found)
        assert "item state is missing" in found.err
    ckpt("prune", job.root, "--keep", "newest=1")
    assert (job.root / "0" / "state").exists()
    with ckptkit.CheckpointManager(job.root) as manager:
        assert set(manager.restore(None).keys()) >= {"state"}, "the older step, which has all items"
