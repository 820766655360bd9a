"""The values that JAX gets about the other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from click.testing import CliRunner

from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers
from tests.forked import WARM, launch_forked
from trainer.__main__ import main as command
from trainer.__main__ import read_flags
from trainer.checkpoint import Preempted
from trainer.cluster import detect_rank, join

ROOT = Path(__file__).parents[2]


def test_timeout_flags_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks when a lost host is noticed after JAX's own 100 s, whatever the flag is."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", told.update)
    flags = ["--coordinator", "127.0.0.1:1", "--processes", "2", "--process", "1"]
    flags += ["--heartbeat-s", "7", "--start-timeout-s", "11"]
    join(read_flags(command.make_context("trainer", flags).params).cluster, None)
    assert told == {
        "coordinator_address": "127.0.0.1:1",
        "num_processes": 2,
        "process_id": 1,
        "initialization_timeout": 11,
        "heartbeat_timeout_seconds": 7,
        "shutdown_timeout_seconds": 21,
    }


def test_rank_of_mpirun_overrides_the_slurm_rank() -> None:
    """Breaks when all processes of a node take themselves for process 0 and write one event log."""
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    mpi = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
    run = {"CKPTKIT_PROCESS": "1", "CKPTKIT_PROCESSES": "2"}
    assert detect_rank({**slurm, **mpi, **run}) == {"process": 1, "processes": 2}
    assert detect_rank({**slurm, **mpi}) == {"process": 5, "processes": 8}
    assert detect_rank(slurm) == {"process": 0, "processes": 4}


LEAVES = """
import atexit, os, signal, sys
import jax
from trainer.cluster import leave
from trainer.config import ClusterConfig

# As JAX does: its notifier gives SIGTERM back, and with that the process ends by it.
jax.distributed.shutdown = lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
leave(ClusterConfig(processes=2, process=1, coordinator="127.0.0.1:1"), int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, ExitCode.PREEMPTED])
def test_sigterm_during_exit_keeps_the_exit_code(code: int) -> None:
    """Breaks when srun, which ends all tasks once one has ended with 75, turns a preemption into a loss. The batch
    script would start the job again on machines that are being preempted, and not queue it."""
    done = subprocess.run([sys.executable, "-c", LEAVES, str(int(code))], timeout=120, cwd=ROOT)
    assert done.returncode == code


def test_preemption_without_a_saved_step_is_queued_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Breaks when a grace that was too short for a last save ends the run for good: older saves are there."""

    def train(*_: object) -> None:
        raise Preempted(5, None)

    monkeypatch.setattr("trainer.__main__.train", train)
    (tmp_path / "text").write_text("the quick brown fox\n")
    done = CliRunner().invoke(command, ["--data", str(tmp_path / "text")])
    assert (done.exit_code, done.output) == (ExitCode.PREEMPTED, "preempted at step 5: nothing was saved of it\n")


def test_hosts_with_different_text_are_refused(tmp_path: Path) -> None:
    """Breaks when each host trains on its own text and its own order of it, and nobody notices."""
    for process in (0, 1):
        (tmp_path / f"text-{process}").write_text("the quick brown fox\n" * (200 + process))
    words = ["--data", str(tmp_path / "text-{process}"), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    words += ["--coordinator", "{coordinator}", "--processes", "{processes}", "--process", "{process}"]
    lines: list[str] = []
    launcher = Launcher(
        Workers([sys.executable, "-m", "trainer", *words], processes=2, devices_per_process=1, warm=WARM),
        policy=RestartPolicy(restarts=0, grace_s=30.0),
        hooks=Hooks(on_output=lambda process, line: lines.append(f"{process}: {line}")),
    )
    assert launch_forked(launcher) == ExitCode.USAGE, lines
    for process in (0, 1):
        assert any(
            line.startswith(f"{process}: Error: process 1 has other data than process 0: source_digest ")
            for line in lines
        ), lines


def test_learning_rate_of_zero_is_kept() -> None:
    """Breaks when a run that is to change nothing trains at the preset's rate."""
    assert read_flags(command.make_context("trainer", ["--learning-rate", "0"]).params).optimizer.learning_rate == 0.0
    assert read_flags(command.make_context("trainer", []).params).optimizer.learning_rate == 3e-3
