"""The trainer as clusters start it: under mpirun, under srun, and by the batch script; a SIGTERM saves and reports
it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ckptkit.launch import ExitCode
from tests.forked import run_forked
from tests.multiprocess.starters import environment, run, running_slurm, skip_without, started

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sbatch"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


def flags(root: Path, corpus: Path, steps: int) -> list[str]:
    words = ["--preset", "tiny", "--steps", str(steps), "--mesh", "fsdp=2", "--log-every", "1"]
    words += ["--data", str(Path(asyncio.__file__).parent), "--run-dir", str(root / "run")]
    words += ["--corpus-dir", str(corpus), "--schedule-steps", "60"]  # one program for all jobs
    return [*words, "--checkpoint", str(root / "durable"), "--ram", str(root / "ram"), "--events", str(root / "events")]


def assert_is_one_job(said: str, root: Path) -> None:
    """Two tasks would train two models, each for itself, or each would take itself for process 0."""
    assert "on 2 processes" in said
    logs = sorted(path.name for path in (root / "events").iterdir())
    assert logs == ["attempt-0-process-0.jsonl", "attempt-0-process-1.jsonl"]


@pytest.mark.long
def test_trainer_finds_its_peers_under_mpirun(tmp_path: Path, corpus: Path) -> None:
    """Breaks when two tasks train two models, each for itself, or each takes itself for process 0."""
    skip_without("mpirun")
    command = [sys.executable, "-m", "trainer", "--cluster", "detect", *flags(tmp_path, corpus, 3)]
    code, said = run("mpirun", command, processes=2, devices=1, root=tmp_path)
    assert code == 0, said
    assert_is_one_job(said, tmp_path)


@pytest.mark.long
def test_job_preempted_by_slurm_saves_and_exits_75(tmp_path: Path, corpus: Path) -> None:
    """Breaks when tasks under srun do not find each other, or SIGTERM costs the steps since the last save."""
    skip_without("srun")
    command = [sys.executable, "-m", "trainer", "--cluster", "detect", *flags(tmp_path, corpus, 5000)]
    with started("srun", command, processes=2, devices=1, root=tmp_path) as job:
        assert job.stdout is not None
        seen = []
        for line in job.stdout:
            seen.append(line)
            if line.startswith("step      3/"):
                # As before a time limit; a signal to srun itself ends the tasks at once.
                conf = str(tmp_path / "slurm" / "slurm.conf")
                subprocess.run(
                    ["scancel", "--signal=TERM", "--partition=all"], env=environment(1, SLURM_CONF=conf), check=True
                )
        code = job.wait(60)
    said = "".join(seen[-40:])
    assert code == ExitCode.PREEMPTED, said
    assert "is saved in ram, durable" in said
    assert_is_one_job("".join(seen), tmp_path)


@pytest.mark.long
def test_batch_script_restarts_a_lost_process_and_ends_well(tmp_path: Path, corpus: Path) -> None:
    """Breaks when the script that people copy does not run, or a lost process ends the job."""
    skip_without("srun")
    log, status, steps = tmp_path / "job.log", tmp_path / "status.json", 60
    with running_slurm(tmp_path / "slurm") as conf:
        env = environment(
            1, SLURM_CONF=str(conf), PYTHON=sys.executable, PROCESSES="2", STATUS=str(status), RESTARTS="1"
        )
        words = ["sbatch", "--parsable", "--nodes=1", f"--output={log}", f"--chdir={ROOT}"]
        job = output_of([*words, str(SCRIPT), *flags(tmp_path, corpus, steps)], env).strip()

        def shown() -> str:
            """The job as Slurm shows it; `sbatch --wait` looks every half minute."""
            return output_of(["scontrol", "show", "job", job], env)

        killed = kill_a_worker_that_steps(status, shown)
        while any(f"JobState={state}" in shown() for state in ("RUNNING", "COMPLETING")):
            time.sleep(0.2)
        assert "JobState=COMPLETED" in shown(), log.read_text()
        assert "ExitCode=0:0" in shown()
    said = log.read_text()
    assert "on 2 processes" in said
    assert f"attempt 0: process {killed} was lost (SIGKILL)" in said
    assert f"{steps}/{steps}" in said
    assert json.loads(status.read_text())["code"] == 0


def kill_a_worker_that_steps(status: Path, shown: Callable[[], str]) -> int:
    """Waits for the first step, and kills the last worker of the job."""
    while "JobState=PENDING" in shown() or "JobState=RUNNING" in shown():
        found = json.loads(status.read_text()) if status.exists() else {}
        if found.get("newest_attempt_with_steps") == 0:
            worker = found["workers"][-1]
            os.kill(worker["pid"], signal.SIGKILL)
            return worker["process"]
        time.sleep(0.1)
    raise AssertionError(f"the job ended before its first step: {shown()}")


def output_of(words: Sequence[str], env: Mapping[str, str]) -> str:
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("words", [["--cluster", "detect"], ["--cluster", "detect", "--coordinator", "127.0.0.1:1"]])
def test_detect_outside_a_cluster_is_refused(words: list[str]) -> None:
    """Breaks when a job that was to find its peers trains alone."""
    command = [sys.executable, "-m", "trainer", *words]
    done = run_forked(command, timeout=120, cwd=ROOT)
    assert done.returncode == 2
    assert "Error: --cluster detect" in done.stderr
