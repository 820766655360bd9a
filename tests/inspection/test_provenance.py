"""Provenance: what made a save, in its records, in `inspect` and in `diff`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from jaxlib import version as jaxlib_version

import ckptkit
from ckptkit import direct
from ckptkit.cli import main
from ckptkit.errors import CorruptCheckpointError
from ckptkit.inspection.look import provenance_of
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import Manifest, SaveId, Writer

ARGS: Any = ocp.args


def sharded() -> dict[str, Any]:
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return {"w": jax.device_put(jnp.zeros((8, 4)), sharding), "n": 1}


def save(root: Path, step: int = 1, **saving: Any) -> None:
    tiers = [ckptkit.Tier.ram(str(root / "ram"), slots=2)]
    with ckptkit.CheckpointManager(root / "run", tiers=tiers, saving=ckptkit.SaveOptions(**saving)) as manager:
        manager.save(step, args=ARGS.StandardSave(sharded()))
        manager.wait_until_finished()


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["inspect", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["origin"]["provenance"]


def test_inspect_shows_what_made_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell which versions, flags and source a checkpoint is from."""
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_latency_hiding_scheduler=true")
    save(tmp_path, revision="1a2b3c")
    found = told(tmp_path / "run" / "1", capsys)
    assert (found["ckptkit"], found["jax"], found["orbax"]) == (ckptkit.__version__, jax.__version__, ocp.__version__)
    assert (found["revision"], found["mesh"], found["devices"]) == ("1a2b3c", "data=2,fsdp=2", "4 x cpu")
    assert "--xla_force_host_platform_device_count=4" in found["xla_flags"]
    assert found["jaxlib"] == jaxlib_version.__version__
    assert found["libtpu_flags"] == "--xla_tpu_enable_latency_hiding_scheduler=true"
    assert sys.orig_argv[-1] in found["command"]
    assert main(["inspect", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  revision: 1a2b3c" in lines
    assert "  mesh: data=2,fsdp=2" in lines
    assert max(map(len, lines)) < 400, "a command may be a whole program"
    (manifest,) = (tmp_path / "ram").rglob("step-*.json")
    assert told(manifest, capsys) == found


def test_revision_is_taken_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script whose source stays as it is could not give it; and a secret in a command could not be left out."""
    monkeypatch.setenv("CKPTKIT_REVISION", "from the launcher")
    save(tmp_path, record_command=False)
    found = told(tmp_path / "run", capsys)
    assert found["revision"] == "from the launcher"
    assert "command" not in found
    direct.save(tmp_path / "tree", sharded())
    assert told(tmp_path / "tree", capsys)["revision"] == "from the launcher"


def test_diff_shows_what_was_made_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs that differ would be compared without the reason in sight."""
    save(tmp_path / "a", revision="old")
    save(tmp_path / "b")
    both = ["diff", str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]
    assert main(both) == 0, "the bits are the same"
    assert "made with another revision: old in A, none in B" in capsys.readouterr().out
    assert main([*both, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"] == [["revision", "old", None]]
    assert main(["diff", both[1], both[1]]) == 0
    assert "made with" not in capsys.readouterr().out


def test_processes_with_other_versions_are_counted() -> None:
    """One host with an old image would hide behind process 0."""
    writers = [
        Writer(process=n, count=3, host="h", provenance={"jax": "0.10.2" if n else "0.10.1", "command": f"train {n}"})
        for n in range(3)
    ]
    manifest = Manifest(save_id=SaveId(1, 1, 0), writer=writers[0], slot="", arrays={}, inline={})
    assert provenance_of(writers, manifest) == {
        "jax": "0.10.2 (2 of 3 processes), 0.10.1 (1 of 3 processes)",
        "command": "train 0",
    }
    assert provenance_of([replace(writers[0], provenance={})], manifest) == {}


def test_records_keep_provenance_and_older_ones_have_none() -> None:
    """A manifest of an earlier version would be refused, or one of a hostile writer be believed."""
    writer = Writer(process=0, count=1, host="h", provenance={"jax": "1"})
    manifest = Manifest(save_id=SaveId(1, 1, 0), writer=writer, slot="", arrays={}, inline={})
    assert Manifest.from_bytes(manifest.to_bytes(), path="x").writer.provenance == {"jax": "1"}
    older = replace(manifest, writer=replace(writer, provenance={}))
    assert b"provenance" not in older.to_bytes()
    assert Manifest.from_bytes(older.to_bytes(), path="x").writer.provenance == {}
    for hostile in ({"jax": 1}, [], "text", {"jax": {}}):
        record = replace(manifest, writer=replace(writer, provenance={"jax": "1"})).to_bytes()
        body = json.loads(record)["manifest"] | {"provenance": hostile}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        data = f'{{"digest":"{digest_of(text.encode())}","manifest":{text}}}'.encode()
        with pytest.raises(CorruptCheckpointError, match="provenance"):
            Manifest.from_bytes(data, path="x")
