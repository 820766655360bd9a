"""The batch script after the end of a job, with a `srun` that ends as told."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sbatch"


def ended(tmp_path: Path, tasks: int, job: int | None) -> tuple[int, list[str]]:
    """The script's exit code, and its other calls, if srun returns `tasks` and the first agent wrote `job` last."""
    written = "" if job is None else "cp status train-7.json;"
    (tmp_path / "status").write_text(json.dumps({"state": "ended", "code": job}, indent=1))
    commands = {
        "srun": f'echo "$CKPTKIT_SECRET" >> secrets; {written} exit {tasks}',
        "scontrol": 'echo "scontrol $*" >> called',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "called").write_text("")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_JOB_NUM_NODES": "2"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, (tmp_path / "called").read_text().splitlines()


@pytest.mark.parametrize(
    ("tasks", "job", "code", "called"),
    [
        (0, 0, 0, []),
        (137, 0, 0, []),  # a node was lost, a spare took its place, and the job ended well
        (2, 2, 2, []),
        (1, None, 1, []),  # the first agent never came up
        (75, 75, 75, ["scontrol requeue 7"]),
        (137, 75, 75, ["scontrol requeue 7"]),
    ],
)
def test_end_of_the_job_and_not_of_the_worst_task_decides(
    tmp_path: Path, tasks: int, job: int | None, code: int, called: list[str]
) -> None:
    """A preempted job would not be queued again, or one with bad input be started without an end."""
    assert ended(tmp_path, tasks, job) == (code, called)


def test_each_job_has_a_secret_of_its_own(tmp_path: Path) -> None:
    """Breaks when an agent of another job can join."""
    ended(tmp_path, 0, 0)
    ended(tmp_path, 0, 0)
    first, second = (tmp_path / "secrets").read_text().split()
    assert first != second
    assert len(first) == 64
