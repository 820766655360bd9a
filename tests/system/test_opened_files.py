"""A job's system calls, recorded by strace. Needs `make setup-system`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.strace import needs_strace

JOB = """
import sys
import jax.numpy as jnp
import orbax.checkpoint as ocp
import ckptkit
root, host = sys.argv[1:]
tiers = [ckptkit.Tier.ram(f"{root}/ram"), ckptkit.Tier.ssd(f"{root}/ssd", save=ckptkit.EverySteps(1))]
with ckptkit.CheckpointManager(f"{root}/durable", tiers=tiers, host_id=host) as manager:
    step = manager.latest_step() or 0
    if step:
        manager.restore(None)
    for step in (step + 1, step + 2):
        manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(4096)}))
        manager.wait_until_finished()
"""


@pytest.mark.long
@needs_strace
def test_no_system_call_opens_another_hosts_directory(tmp_path: Path) -> None:
    """On hosts that share a mount, one would take another's slots for its own; Python's audit sees not every open."""
    for host in ("host-a", "host-b"):
        subprocess.run([sys.executable, "-c", JOB, str(tmp_path), host], check=True, timeout=120)
    trace = tmp_path / "trace"
    calls = "openat,unlink,rename,link,mkdir,readlink,truncate"
    command = ["strace", "-f", "-qq", "-e", f"trace={calls}", "-o", str(trace), sys.executable, "-c", JOB]
    subprocess.run([*command, str(tmp_path), "host-a"], check=True, timeout=240)
    paths = {path for path in re.findall(r'"([^"]+)"', trace.read_text(errors="replace")) if str(tmp_path) in path}
    assert any("/ram/" in path and "/host-a/" in path and "slot-" in path for path in paths)
    assert any("/ssd/" in path and "/host-a/" in path and "slot-" in path for path in paths)
    assert {path for path in paths if "host-b" in path} == set()


DURABLE_JOB = JOB.replace("tiers=tiers, host_id=host", "host_id=host")


@needs_strace
def test_no_lock_is_taken_in_a_durable_root(tmp_path: Path) -> None:
    """Lustre without `flock`, and some NFS mounts, refuse locks: every durable save would fail there."""
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-qq", "-y", "-e", "trace=fcntl,flock", "-o", str(trace), sys.executable, "-c"]
    subprocess.run([*command, DURABLE_JOB, str(tmp_path), "host-a"], check=True, timeout=240)
    calls = trace.read_text(errors="replace").splitlines()
    locks = [line for line in calls if "SETLK" in line or "flock(" in line]
    assert calls
    assert [line for line in locks if str(tmp_path) in line] == []
