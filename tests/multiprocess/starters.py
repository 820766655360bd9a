"""The starters of a test job's processes besides our launcher: mpirun, and a Slurm of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.launch import free_port

STARTERS = ("mpirun", "srun")
LIMIT_S = 200.0
_SLURM_START_S = 60.0
_NEEDS = {"mpirun": ("mpirun",), "srun": ("srun", "sinfo", "slurmctld", "slurmd")}
# Debian's Slurm is built for several slurmd on one machine.
_NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 State=UNKNOWN"
# No authentication and no control groups: everything below is one user's, on loopback.
_SLURM_CONF = """
ClusterName=one
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={root}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
FirstJobId={first_job}
MpiDefault=none
KillWait=30
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def skip_without(starter: str) -> None:
    """Skips if a starter is not installed, and names the command that installs it."""
    found = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in _NEEDS[starter]}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make setup-system")
    if os.geteuid() != 0 and starter == "srun":
        pytest.skip("a Slurm of its own needs root")


def environment(devices: int, **more: str) -> dict[str, str]:
    """The environment of a job's processes."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1", **more}


@contextmanager
def started(
    starter: str, command: Sequence[str], *, processes: int, devices: int, root: Path
) -> Iterator[subprocess.Popen[str]]:
    """`command` as so many processes, stderr with stdout; whatever is left of it at the end is killed."""
    if starter == "mpirun":
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(processes)]
        with _job([*words, *command], environment(devices)) as job:
            yield job
        return
    with running_slurm(root / "slurm") as conf:
        words = ["srun", "--ntasks", str(processes), "--kill-on-bad-exit=1", "--wait=30"]
        with _job([*words, *command], environment(devices, SLURM_CONF=str(conf))) as job:
            yield job


def run(starter: str, command: Sequence[str], *, processes: int, devices: int, root: Path) -> tuple[int, str]:
    """Runs a job to its end: the exit code, and its output."""
    with started(starter, command, processes=processes, devices=devices, root=root) as job:
        output, _ = job.communicate(timeout=LIMIT_S)
        return job.returncode, output


@contextmanager
def _job(words: Sequence[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen(
        words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()  # they pass it on to their processes; after SIGKILL these would live on
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()


@contextmanager
def running_slurm(root: Path, nodes: Sequence[str] = ("localhost",)) -> Iterator[Path]:
    """A Slurm whose nodes are all this machine, for the time of the block; yields its configuration."""
    (root / "state").mkdir(parents=True)
    # Sockets are made there: a path of more than 108 bytes would end every batch script without a message.
    spool = tempfile.mkdtemp(prefix="slurm-", dir="/tmp")
    conf = root / "slurm.conf"
    port = free_port()
    lines = "\n".join(_NODE.format(name=name, port=free_port()) for name in nodes)
    # JAX makes its coordinator's port of the number of the job: those of two such Slurms at a time have to differ.
    first_job = 1000 + 16 * (port % 1000)
    conf.write_text(_SLURM_CONF.format(root=root, spool=spool, first_job=first_job, port=port, nodes=lines))
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    daemons = []
    try:
        # One after the other: a node that finds no controller waits long before it asks again.
        for name, words, ready in (
            (nodes[0], ["slurmctld", "-D"], ("unknown", "idle")),
            *((name, ["slurmd", "-D", "-N", name], ("idle",)) for name in nodes),
        ):
            path = root / f"{words[0]}-{name}.out"
            (Path(spool) / name).mkdir(exist_ok=True)
            with path.open("w") as out:
                daemons.append(subprocess.Popen(words, env=env, stdout=out, stderr=out))
            end_s = time.monotonic() + _SLURM_START_S
            while (said := _state(name, env).rstrip("*")) not in ready:
                is_up = daemons[-1].poll() is None and time.monotonic() < end_s
                assert is_up, f"{words[0]} did not come up: {said}\n{path.read_text()}"
                time.sleep(0.2)
        yield conf
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(spool, ignore_errors=True)


def _state(node: str, env: dict[str, str]) -> str:
    asked = subprocess.run(["sinfo", "-h", "-n", node, "-o", "%T"], env=env, capture_output=True, text=True, timeout=60)
    return (asked.stdout or asked.stderr).strip()
