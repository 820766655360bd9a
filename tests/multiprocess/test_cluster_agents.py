"""Agents of `ckptkit run` as clusters start them: one on each of two Slurm nodes, and under mpirun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptkit.launch import free_port
from tests.multiprocess.starters import environment, running_slurm, skip_without

# With "localhost" Slurm takes no other node of this machine. It sorts names, and the first one has to resolve.
NODES = (socket.gethostname(), f"{socket.gethostname()}-second")
LIMIT_S = 80.0
STEPS = 60
# Every step has a collective. The state is split over all processes, however many an attempt has.
TRAIN = f"""
import sys, time, jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import ckptkit
jax.distributed.initialize()
split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
state = {{"w": jax.jit(lambda: jnp.zeros(8), out_shardings=split)()}}
step_fn = jax.jit(lambda s: {{"w": s["w"] + 1 + 0 * s["w"].sum()}}, donate_argnums=0)
options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=2)
with ckptkit.CheckpointManager(sys.argv[1], options=options) as manager:
    if manager.latest_step() is not None:
        state = manager.restore(None, args=ocp.args.StandardRestore(state))
    for step in range((manager.latest_step() or 0) + 1, {STEPS} + 1):
        state = step_fn(state)
        jax.block_until_ready(state)
        time.sleep(0.1)
        manager.save(step, args=ocp.args.StandardSave(state))
found = {{float(x) for shard in state["w"].addressable_shards for x in shard.data}}
print(f"process {{jax.process_index()}} of {{jax.process_count()}} ends with {{found}}", flush=True)
"""


class Job:
    """`ckptkit run` agents that a starter has started."""

    def __init__(self, home: Path):
        self.home = home
        (home / "train.py").write_text(TRAIN)
        # Each agent leaves its process id in a file that is named for its rank.
        self.words = ["sh", "-c", f'echo $$ > {home}/agent-$0${{SLURM_PROCID:-$OMPI_COMM_WORLD_RANK}}; exec "$@"', ""]
        self.words += [sys.executable, "-m", "ckptkit.cli", "run", "--processes", "2", "--status", str(home / "status")]

    def command(self, *flags: str) -> list[str]:
        return [*self.words, *flags, "--", sys.executable, str(self.home / "train.py"), str(self.home / "root")]

    @property
    def status(self) -> dict[str, Any]:
        path = self.home / "status"
        return json.loads(path.read_text()) if path.exists() else {}

    def agent(self, rank: int) -> int:
        return int((self.home / f"agent-{rank}").read_text())

    def wait_for_step(self, job: subprocess.Popen[str], step: int) -> None:
        end_s = time.monotonic() + LIMIT_S
        while (self.status.get("step") or 0) < step:
            assert job.poll() is None, (self.home / "log").read_text()
            assert time.monotonic() < end_s, (self.home / "log").read_text()
            time.sleep(0.05)

    @contextmanager
    def started(self, words: Sequence[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
        with (self.home / "log").open("w") as log:
            job = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
        try:
            yield job
        finally:
            job.terminate()
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()

    def said(self) -> str:
        return (self.home / "log").read_text()


@pytest.mark.long
def test_job_on_two_slurm_nodes_outlives_one_of_them(tmp_path: Path) -> None:
    """The agents would not find each other by Slurm's environment, or the job end with a node that Slurm lost."""
    skip_without("srun")
    job = Job(tmp_path)
    with running_slurm(tmp_path / "slurm", NODES) as conf:
        env = environment(1, SLURM_CONF=str(conf), CKPTKIT_SECRET="0123456789abcdef-secret")
        srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        command = job.command("--nnodes", "1:2", "--rejoin-timeout", "1")
        with job.started([*srun, *command], env) as srun_job:
            job.wait_for_step(srun_job, 10)
            assert job.status["processes"] == 4
            os.kill(int((tmp_path / "slurm" / f"slurmd-{NODES[1]}.pid").read_text()), signal.SIGKILL)
            os.kill(job.agent(1), signal.SIGKILL)
            down = ["scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=lost"]
            subprocess.run(down, env=env, check=True, timeout=60)
            srun_job.wait(LIMIT_S)
    said, status = job.said(), job.status
    assert status["code"] == 0, said
    assert status["processes"] == 2
    assert [each["process"] for each in status["losses"]] == [2], said
    assert status["recoveries"][0]["repeated"] <= 10
    for process in range(2):
        assert f"process {process} of 2 ends with {{{float(STEPS)}}}" in said


@pytest.mark.long
def test_agents_under_mpirun_restart_a_lost_worker(tmp_path: Path) -> None:
    """The agents would take mpirun's ranks for those of the workers, or each train a model of its own."""
    skip_without("mpirun")
    job = Job(tmp_path)
    env = environment(1, CKPTKIT_SECRET="0123456789abcdef-secret")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    command = job.command("--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}")
    with job.started([*mpirun, *command], env) as mpi_job:
        job.wait_for_step(mpi_job, 10)
        assert job.status["processes"] == 4
        os.kill(job.status["workers"][1]["pid"], signal.SIGKILL)
        code = mpi_job.wait(LIMIT_S)
    said, status = job.said(), job.status
    assert (code, status["code"]) == (0, 0), said
    assert [(each["process"], each["cause"]) for each in status["losses"]] == [(1, "SIGKILL")]
    for process in range(4):
        assert f"process {process} of 4 ends with {{{float(STEPS)}}}" in said
