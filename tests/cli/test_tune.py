"""`ckptkit tune` and `ckptkit explain`: what a storage gives, and a file that a manager takes."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.cli import main
from ckptkit.diagnosis import tune
from ckptkit.diagnosis.tuner import proposing
from ckptkit.diagnosis.tuner.probing import Compression, Samples, Trial
from ckptkit.diagnosis.tuner.proposing import propose
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer, FaultPlan


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


def test_tuning_a_disk_removes_its_probes(tmp_path: Path, like: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile that no manager accepts, an empty table, or a root full of probes."""
    root, out = tmp_path / "root", tmp_path / "profile.json"
    root.mkdir()
    command = ["tune", str(root), "--like", str(like), "--probe", "2MB", "--rounds", "1", "--output", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    for word in ("data file", "concurrency", "copied below", "MB/s", "zstd_shuffle", "bfloat16", "int32"):
        assert word in said
    assert list(root.iterdir()) == []
    profile = DurableProfile.load(out)
    with ckptkit.CheckpointManager(root, durable=profile) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.arange(3.0)}))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        assert manager.latest_step() == 1


def test_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, like: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gigabytes would be written to a bucket by somebody who asked what would be."""
    measure, measured = proposing.compressibility, list[Compression]()

    def once(samples: Samples) -> list[Compression]:
        """Which codec is the fastest depends on what else the machine does."""
        measured.extend([] if measured else measure(samples))
        return measured

    monkeypatch.setattr(proposing, "compressibility", once)
    root, out = tmp_path / "root", tmp_path / "profile.json"
    command = ["tune", str(root), "--like", str(like), "--probe", "2MB", "--rounds", "1", "--output", str(out)]
    assert main([*command, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"would be written, read and deleted with {len(plan['profiles'])} profiles, 2 times each" in said
    assert list(tmp_path.iterdir()) == []
    assert plan["written_bytes"] == plan["probe_bytes"] * len(plan["profiles"]) * 2
    assert main([*command, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert [trial["profile"] for trial in done["trials"]] == plan["profiles"]
    assert list(tmp_path.iterdir()) == [out], "a root that was not there is not there again"


def test_tunes_a_bucket(
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
    from ckptkit.diagnosis.tuner.probing import compressibility, take_samples
    from ckptkit.formats import open_checkpoint

    with open_checkpoint(str(like)) as opened:
        found = {(each.dtype, each.codec): each.ratio for each in compressibility(take_samples(opened.tensors))}
    assert found["int32", "zstd"] < 0.05
    assert found["float32", "none"] == 1.0
    # The exponents of weights are alike: side by side they compress, between mantissas they do not.
    assert found["bfloat16", "zstd_shuffle"] < 0.9
    assert found["float32", "zstd_shuffle"] < found["float32", "none"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps with leaves large enough to be encoded: 1 of small whole numbers, 2 of noise, 3 of weights."""
    key, root = jax.random.key(1), tmp_path_factory.mktemp("saved")
    compressible = {f"w{index}": jax.random.randint(key, (512, 512), index, 50 + index) for index in range(2)}
    noise = {f"w{index}": jax.random.bits(jax.random.key(index), (512, 512), jnp.uint32) for index in range(2)}
    with ckptkit.CheckpointManager(root) as manager:
        weights = {f"w{index}": jax.random.normal(jax.random.key(index), (512, 512)) for index in range(2)}
        for step, state in ((1, compressible), (2, noise), (3, weights)):
            manager.save(step, args=ocp.args.StandardSave(state), force=True)  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
    return root


@pytest.mark.parametrize(("step", "encoded"), [(1, True), (2, False)], ids=["whole numbers", "noise"])
def test_slow_bucket_gets_compression_if_it_saves_enough(
    tmp_path: Path, saved: Path, step: int, encoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save would take three times as long as it could, or a core encode what stays as large as it was."""
    with BucketServer(dir=tmp_path / "bucket", buckets=["runs"]) as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        server.faults = FaultPlan(upload_bytes_per_s=4e6, download_bytes_per_s=40e6)
        found = tune("gs://runs/run", like=str(saved / str(step)), probe_bytes=1 << 20, rounds=1)
        server.faults = FaultPlan()
        reason = "; ".join(each for each in found.reasons if each.startswith("compression "))
        assert (found.profile.compression is not None) == encoded, reason
        if not encoded:
            assert reason == "compression stays off: none of the codecs saves a fiftieth of what it would encode"
            return
        assert f"compression {found.profile.compression} is taken: it stores 0." in reason
        assert (found.profile.copied_bytes, len(found.compressions)) == (256 << 10, 4)
        with ckptkit.CheckpointManager("gs://runs/run", durable=found.profile) as manager:
            state = {"w": jnp.arange(1 << 18).reshape(512, 512) % 50}
            manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
            manager.wait_until_finished()
            stored = open_store("gs://runs/run").stat_all("1")
            assert sum(each.size_bytes for each in stored.values()) < state["w"].nbytes / 2


def test_fast_disk_gets_no_compression(saved: Path) -> None:
    """A core would be busy for nothing: a ramdisk takes several times what one encodes of weights."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        found = tune(root, like=str(saved / "3"), probe_bytes=8 << 20, rounds=3)
    reason = "; ".join(each for each in found.reasons if each.startswith("compression "))
    assert found.profile.compression is None, reason
    assert "is left: it stores 0." in reason
    assert {trial.profile.compression for trial in found.trials} > {None}, "it was tried"


def trial(write: float, read: float = 100.0, **knobs: Any) -> Trial:
    return Trial(profile=dataclasses.replace(DurableProfile(), **knobs), write_bytes_per_s=write, read_bytes_per_s=read)


def test_compression_keeps_the_size_above_which_leaves_are_compressed() -> None:
    """A larger one, chosen on its own, would leave uncompressed what the compression was proposed for."""
    larger = trial(200.0, copied_bytes=2 << 20)
    profile, reasons = propose([trial(100.0), larger, trial(150.0, compression="zstd")])
    assert profile == DurableProfile(compression="zstd")
    assert f"copied_bytes stays at {256 << 10}: smaller leaves are not compressed" in reasons
    assert propose([trial(100.0), larger])[0] == DurableProfile(copied_bytes=2 << 20)


def test_small_gains_are_not_proposed() -> None:
    """Noise would move every knob, or a fast write be bought with a slow restart."""
    base = trial(100.0)
    noise = [base, trial(105.0, data_file_bytes=1 << 24), trial(90.0, write_concurrency=64)]
    assert propose(noise)[0] == DurableProfile()
    assert propose(noise)[1][0] == f"data_file_bytes stays at {256 << 20}: nothing was faster by a tenth"
    assert propose(noise)[1][-1] == f"read_ahead_bytes stays at {128 << 20}: so small a probe shows no difference"
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
    assert propose([base, trial(150.0, compression="zstd")])[0] == DurableProfile(compression="zstd")
    assert propose([base, trial(150.0, read=50.0, compression="zstd")])[0] == DurableProfile()
    ahead = dataclasses.replace(DurableProfile(), read_ahead_bytes=1 << 29)
    assert propose([base, trial(100.0, read=150.0, read_ahead_bytes=1 << 29)])[0] == ahead
    assert propose([base, trial(150.0, read=100.0, read_ahead_bytes=1 << 29)])[0] == DurableProfile()
    assert reasons[0] == f"data_file_bytes {1 << 26}: writes 1.80 times as fast as {256 << 20}"


def test_explains_the_cost_of_a_save(like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The price of a save would be known from its bill."""
    DurableProfile(data_file_bytes=1 << 18, in_flight_bytes=1 << 18).save(tmp_path / "profile.json")
    assert main(["explain", "gs://runs/run", "--like", str(like), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["leaves"], plain["pieces"], plain["files"], plain["requests"]) == (23, 1, 9, 16)
    assert main(["explain", str(tmp_path), "--like", str(like), "--profile", str(tmp_path / "profile.json")]) == 0
    said = capsys.readouterr().out
    assert "none: no bucket" in said
    assert "memory besides the snapshot" in said
    (tmp_path / "profile.json").write_text("[]")
    assert main(["explain", "gs://b/r", "--like", str(like), "--profile", str(tmp_path / "profile.json")]) == 2
    assert "is not a durable profile" in capsys.readouterr().err
