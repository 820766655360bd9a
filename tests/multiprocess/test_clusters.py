"""The trainer as clusters start it: under mpirun, under srun, and by the batch script; a SIGTERM saves and reports
it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.launch import ExitCode
from tests.multiprocess.starters import environment, run, running_slurm, skip_without, started

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm.sbatch"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters-cache")


def flags(root: Path, cache: Path, steps: int) -> list[str]:
    words = ["--preset", "tiny", "--steps", str(steps), "--mesh", "fsdp=2", "--log-every", "1"]
    words += ["--data", str(Path(asyncio.__file__).parent), "--run-dir", str(root / "run")]
    words += ["--corpus-dir", str(cache / "corpus"), "--compile-cache", str(cache / "compiled")]
    return [*words, "--checkpoint", str(root / "durable"), "--ram", str(root / "ram"), "--events", str(root / "events")]


def assert_is_one_job(said: str, root: Path) -> None:
    """Two tasks would train two models, each for itself, or each would take itself for process 0."""
    assert "on 2 processes" in said
    logs = sorted(path.name for path in (root / "events").iterdir())
    assert logs == ["attempt-0-process-0.jsonl", "attempt-0-process-1.jsonl"]


def test_trainer_finds_its_peers_under_mpirun(tmp_path: Path, cache: Path) -> None:
    """Breaks when two tasks train two models, each for itself, or each takes itself for process 0."""
    skip_without("mpirun")
    command = [sys.executable, "-m", "trainer", "--cluster", "detect", *flags(tmp_path, cache, 3)]
    code, said = run("mpirun", command, processes=2, devices=1, root=tmp_path)
    assert code == 0, said
    assert_is_one_job(said, tmp_path)


def test_job_preempted_by_slurm_saves_and_exits_75(tmp_path: Path, cache: Path) -> None:
    """Breaks when tasks under srun do not find each other, or SIGTERM costs the steps since the last save."""
    skip_without("srun")
    command = [sys.executable, "-m", "trainer", "--cluster", "detect", *flags(tmp_path, cache, 5000)]
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


def test_batch_script_runs_a_job_to_completion(tmp_path: Path, cache: Path) -> None:
    """Breaks when the script that people copy does not run."""
    skip_without("srun")
    log = tmp_path / "job.log"
    with running_slurm(tmp_path / "slurm") as conf:
        words = ["sbatch", "--wait", "--nodes=1", "--ntasks-per-node=2", f"--output={log}", f"--chdir={ROOT}"]
        done = subprocess.run(
            [*words, str(SCRIPT), *flags(tmp_path, cache, 3)],
            env=environment(1, SLURM_CONF=str(conf), PYTHON=sys.executable),
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    assert "on 2 processes" in log.read_text()


@pytest.mark.parametrize("words", [["--cluster", "detect"], ["--cluster", "detect", "--coordinator", "127.0.0.1:1"]])
def test_detect_outside_a_cluster_is_refused(words: list[str]) -> None:
    """Breaks when a job that was to find its peers trains alone."""
    command = [sys.executable, "-m", "trainer", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 2
    assert "Error: --cluster detect" in done.stderr
