"""Both commands on a bucket: the same answers as on a disk, and what is unreachable is not called absent."""

from __future__ import annotations

import inspect
import json
import socket
from pathlib import Path

import gcsfs
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, PermissionWithdrawn, client_env
from tests.cli.conftest import HOST, Run
from tests.states import make_state, save_args

BUCKET = "runs"
ROOT = f"gs://{BUCKET}/run"


def test_bucket_is_accepted_as_root(ckpt: Run, server: BucketServer, tmp_path: Path) -> None:
    """Where people keep their checkpoints, nothing could be looked at."""
    ram = str(tmp_path / "ram")
    options = ocp.CheckpointManagerOptions(save_interval_steps=2)
    tiers = [ckptkit.Tier.ram(ram)]
    with ckptkit.CheckpointManager(ROOT, options=options, tiers=tiers, host_id=HOST) as manager:
        for step in range(4):
            manager.save(step, args=save_args(make_state(step), step))
            manager.wait_until_finished()
    found = json.loads(ckpt("steps", ROOT, "--tier", ram, "--host-id", HOST, "--json").out)
    by_url = json.loads(ckpt("steps", ROOT, "--tier", f"file://{ram}", "--host-id", HOST, "--json").out)
    for each in (found, by_url):
        held = {entry["step"]: [tier["tier"] for tier in entry["tiers"]] for entry in each["steps"]}
        assert held == {0: ["durable"], 1: [ram], 2: [ram, "durable"], 3: [ram]}
    assert {entry["state"] for entry in found["steps"]} == {"committed"}
    durable = {entry["step"]: tier for entry in found["steps"] for tier in entry["tiers"] if tier["tier"] == "durable"}
    assert durable[2]["bytes"] == gcsfs.GCSFileSystem().du(f"{BUCKET}/run/2")
    newest = json.loads(ckpt("inspect", ROOT, "--json").out)
    assert (newest["path"], newest["step"], newest["origin"]["proven"]) == (f"{ROOT}/2", 2, True)

    gcsfs.GCSFileSystem().rm(f"{BUCKET}/run/2/commit_success.txt")
    gcsfs.GCSFileSystem().rm(f"{BUCKET}/run/0/state/_ckptkit", recursive=True)
    states = {e["step"]: e["state"] for e in json.loads(ckpt("steps", ROOT, "--json").out)["steps"]}
    assert states == {0: "damaged", 2: "unfinished"}  # an item shows that it had sidecars
    lost = json.loads(ckpt("inspect", f"{ROOT}/0/state", "--json").out)
    assert (lost["origin"]["writer"], lost["origin"]["proven"]) == ("ckptkit", False)
    shapes = {leaf["name"]: (leaf["shape"], leaf["cell"]) for leaf in lost["items"][0]["leaves"]}
    assert shapes["w"] == ([8, 8], [4, 8])


def test_absent_bucket_or_prefix_exits_10(ckpt: Run, server: BucketServer) -> None:
    """A mistyped prefix would look like an empty job, or like a failure of the network."""
    for path in (ROOT, "gs://no-such-bucket/run"):
        said = ckpt("inspect", path)
        assert (said.code, said.out) == (10, "")
        assert "there is nothing; check bucket and prefix" in said.err
        assert ckpt("steps", path).code == 10


def test_missing_bucket_permission_is_reported(ckpt: Run, server: BucketServer) -> None:
    """A withdrawn permission would be called an absent checkpoint."""
    server.faults = FaultPlan(seed=1, faults=(Fault(effect=PermissionWithdrawn()),))
    for command in ("inspect", "steps"):
        said = ckpt(command, ROOT, "--timeout", "1")
        assert (said.code, said.out) == (1, "")
        assert "does not have permission" in said.err


def test_unreachable_bucket_is_reported(ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that does not answer would be called absent, or end in a page of tracebacks."""
    # gcsfs itself tries for half a minute, whatever our deadline is: without that, and so without its waits.
    monkeypatch.setattr(gcsfs.GCSFileSystem, "_request", inspect.unwrap(gcsfs.GCSFileSystem._request))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for name, value in client_env(f"http://127.0.0.1:{closed.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        for command in ("inspect", "steps"):
            said = ckpt(command, ROOT, "--timeout", "0.5")
            assert (said.code, said.out) == (1, "")
            assert "Cannot connect to host" in said.err
            assert len(said.err.splitlines()) == 1
