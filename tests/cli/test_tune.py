"""`ckptkit tune` and `ckptkit explain`: what a storage gives, and a file that a manager takes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.testing.bucket import BucketServer
from ckptkit.tuner.probing import Trial
from ckptkit.tuner.proposing import propose
from ckptkit.tuning import DurableProfile


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with weights that look trained, and one leaf of zeros."""
    key = jax.random.key(0)
    state = {
        "w": jax.random.normal(key, (256, 512)),
        "half": jax.random.normal(key, (256, 512)).astype(jnp.bfloat16),
        "zeros": jnp.zeros((256, 512), jnp.int32),
        **{f"bias{index}": jnp.full(16, float(index)) for index in range(20)},
    }
    root = tmp_path_factory.mktemp("like")
    with ckptkit.CheckpointManager(root) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
    return root / "1"


def test_a_disk_is_tuned_and_left_as_it_was(tmp_path: Path, like: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile that no manager takes, a table that says nothing, or a root full of probes."""
    root, out = tmp_path / "root", tmp_path / "profile.json"
    root.mkdir()
    command = ["tune", str(root), "--like", str(like), "--probe", "2MB", "--rounds", "1", "--output", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    for word in ("data file", "concurrency", "copied below", "MB/s", "zstd, bytes shuffled", "bfloat16", "int32"):
        assert word in said
    assert list(root.iterdir()) == []
    profile = DurableProfile.load(out)
    with ckptkit.CheckpointManager(root, durable=profile) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        assert manager.latest_step() == 1


def test_a_bucket_is_tuned(
    tmp_path: Path, like: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tier that has the most to gain could not be measured."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        assert main(["tune", "gs://runs/run", "--probe", "1MB", "--rounds", "1", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["latency"]["put_s"] > 0
        assert {trial["profile"]["write_concurrency"] for trial in found["trials"]} == {32, 64}
        assert ckptkit.latest_step("gs://runs/run") is None
        names = [entry.name for entry in server.log.entries() if entry.method == "DELETE"]
        assert any("/tune-" in name for name in names)


def test_zeros_compress_and_noise_does_not(like: Path) -> None:
    """The table would be made up."""
    from ckptkit.formats import open_checkpoint
    from ckptkit.tuner.sampling import compressibility

    with open_checkpoint(str(like)) as opened:
        found = {(each.dtype, each.codec): each.ratio for each in compressibility(opened.tensors)}
    assert found["int32", "zstd"] < 0.05
    assert found["float32", "none"] == 1.0
    # The exponents of weights are alike: side by side they compress, between mantissas they do not.
    assert found["bfloat16", "zstd, bytes shuffled"] < 0.9
    assert found["float32", "zstd, bytes shuffled"] < found["float32", "none"]


def trial(write: float, read: float = 100.0, **knobs: int) -> Trial:
    return Trial(profile=dataclasses.replace(DurableProfile(), **knobs), write_bytes_per_s=write, read_bytes_per_s=read)


def test_only_what_is_worth_it_is_proposed() -> None:
    """Noise would move every knob, or a fast write be bought with a slow restart."""
    base = trial(100.0)
    noise = [base, trial(105.0, data_file_bytes=1 << 24), trial(90.0, write_concurrency=64)]
    assert propose(noise)[0] == DurableProfile()
    slow_to_read = [base, trial(200.0, read=50.0, data_file_bytes=1 << 24)]
    assert propose(slow_to_read)[0] == DurableProfile()
    faster = [
        base,
        trial(150.0, data_file_bytes=1 << 24),
        trial(180.0, data_file_bytes=1 << 26),
        trial(130.0, write_concurrency=64),
    ]
    profile, reasons = propose(faster)
    assert (profile.data_file_bytes, profile.write_concurrency, profile.read_concurrency) == (1 << 26, 64, 64)
    assert reasons[0] == f"data_file_bytes {1 << 26}: writes 1.80 times as fast as {256 << 20}"


def test_a_save_is_explained(like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The price of a save would be known from its bill."""
    DurableProfile(data_file_bytes=1 << 18, in_flight_bytes=1 << 18).save(tmp_path / "profile.json")
    assert main(["explain", "gs://runs/run", "--like", str(like), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["leaves"], plain["pieces"], plain["files"], plain["requests"]) == (23, 1, 9, 18)
    assert main(["explain", str(tmp_path), "--like", str(like), "--profile", str(tmp_path / "profile.json")]) == 0
    said = capsys.readouterr().out
    assert "none: no bucket" in said
    assert "memory beside the snapshot" in said
    (tmp_path / "profile.json").write_text("[]")
    assert main(["explain", "gs://b/r", "--like", str(like), "--profile", str(tmp_path / "profile.json")]) == 2
    assert "is no durable profile" in capsys.readouterr().err
