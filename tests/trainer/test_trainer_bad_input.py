"""Checkpoints and places that cannot be used: one clear message, exit code 2, before training starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, PermissionWithdrawn
from tests.trainer.test_trainer_loop import SMALL
from trainer.__main__ import main
from trainer.config import PRESETS, ModelConfig, Preset


def run(tmp_path: Path, *flags: str) -> Result:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    common = ["--preset", "tiny", "--steps", "1", "--run-dir", str(tmp_path / "run"), "--data", str(text)]
    result = CliRunner().invoke(main, [*common, *flags])
    assert "Traceback" not in result.output
    return result


@pytest.mark.long
def test_a_checkpoint_of_another_model_names_every_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would begin again, or with weights that do not fit."""
    for name, size in {"tiny": SMALL, "25m": replace(SMALL, layers=2, d_model=64)}.items():
        model = ModelConfig(size=size, dropout=0.1)
        monkeypatch.setitem(PRESETS, name, Preset(model=model, global_batch=4, learning_rate=1e-3))
    durable = str(tmp_path / "durable")
    assert run(tmp_path, "--checkpoint", durable, "--save-every", "1").exit_code == 0
    result = run(tmp_path, "--checkpoint", durable, "--preset", "25m")
    assert result.exit_code == 2
    assert "Error: step 1 in" in result.output
    assert "is not the tree that was asked for" in result.output
    assert "in abstract_state" in result.output


def test_refused_and_missing_buckets_have_different_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training would start, and lose everything at its first failure."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        missing = run(tmp_path, "--checkpoint", "gs://no-such-bucket/run")
        server.faults = FaultPlan(faults=(Fault(effect=PermissionWithdrawn()),))
        refused = run(tmp_path, "--checkpoint", "gs://runs/run")
    assert (missing.exit_code, refused.exit_code) == (2, 2)
    assert "gs://no-such-bucket/run cannot be written" in missing.output
    assert "grant storage.objects.get" in refused.output


def test_unwritable_tier_is_named(tmp_path: Path) -> None:
    """The job would run without its fast tier."""
    (tmp_path / "file").write_text("")
    result = run(tmp_path, "--checkpoint", str(tmp_path / "durable"), "--ram", str(tmp_path / "file" / "ram"))
    assert result.exit_code == 2
    assert "--ram" in result.output
    assert "give a directory that can be written" in result.output
