"""The batch script after the end of a job, with a `srun` that ends as told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sbatch"


def ended(tmp_path: Path, codes: list[int], **environ: str) -> tuple[int, list[str], str]:
    """The script's exit code if its tries end with `codes`, its other calls besides `srun`, and its output."""
    commands = {
        "srun": 'read -r code < codes; sed -i 1d codes; exit "$code"',
        "sleep": 'echo "sleep $1" >> called',
        "scontrol": 'echo "scontrol $*" >> called',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    (tmp_path / "called").write_text("")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **environ}
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "codes").read_text() == "", "every try was made"
    return done.returncode, (tmp_path / "called").read_text().splitlines(), done.stderr


def test_retry_delay_doubles_to_a_minute_then_the_job_ends(tmp_path: Path) -> None:
    """A thousand hosts would be idle for hours before a late try, and after the last one for nothing."""
    code, called, said = ended(tmp_path, [1] * 7, RESTARTS="6")
    assert code == 1
    assert called == [f"sleep {seconds}" for seconds in (5, 10, 20, 40, 60, 60)]
    assert said.splitlines()[-1] == "slurm.sbatch: attempt 6 ended with 1; all 6 restarts are spent"


@pytest.mark.parametrize(
    ("codes", "code", "called"),
    [
        ([0], 0, []),
        ([1, 0], 0, ["sleep 5"]),
        ([2], 2, []),
        ([75], 75, ["scontrol requeue 7"]),
    ],
)
def test_exit_code_decides_requeue_retry_or_stop(
    tmp_path: Path, codes: list[int], code: int, called: list[str]
) -> None:
    """A preempted job would not be queued again, or one with bad input be started without an end."""
    assert ended(tmp_path, codes)[:2] == (code, called)
