"""The account of a loop of two processes that Slurm starts, against one that was made by hand."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.goodput import goodput_report, load_run
from tests.goodput.by_hand import goodput_by_hand
from tests.multiprocess.starters import LIMIT_S, environment, running_slurm, skip_without

REPOSITORY = Path(__file__).parents[2]
KILLED_AT, STEPS, EVERY = 13, 20, 2


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ckptkit-slurm-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
def test_account_of_a_loop_under_srun_agrees_with_one_made_by_hand(root: Path) -> None:
    """Breaks when two tasks share a log, or a job that Slurm starts again has an account more than 2 points off."""
    skip_without("srun")
    with running_slurm(root / "slurm") as conf:
        for killed_at in (str(KILLED_AT), ""):
            words = ["srun", "--ntasks=2", "--kill-on-bad-exit=1", sys.executable, "-m"]
            words += ["tests.goodput.loop_under_slurm", str(root), *killed_at.split()]
            env = environment(1, SLURM_CONF=str(conf))
            done = subprocess.run(words, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S)
            assert (done.returncode == 0) is not bool(killed_at), done.stdout + done.stderr
    names = sorted(path.name for path in (root / "run").iterdir())
    assert names == [f"attempt-{attempt}-process-{process}.jsonl" for attempt in (0, 1) for process in (0, 1)]
    report = goodput_report(load_run(root / "run"))
    assert report.steps_from == "calls"
    assert report.goodput.distinct_steps == STEPS
    (loss,) = report.disruptions
    resumed_from = KILLED_AT - loss.lost_steps
    assert KILLED_AT - 2 * EVERY <= resumed_from < KILLED_AT
    by_hand = goodput_by_hand(root / "by_hand-0", [resumed_from, STEPS - resumed_from])
    assert report.goodput.ml_goodput == pytest.approx(by_hand, abs=0.02)
    assert report.goodput.ml_goodput == pytest.approx(by_hand, rel=0.1)
    print(f"goodput {report.goodput.ml_goodput:.4f}, by hand {by_hand:.4f}, of {report.wall_s:.1f} s")
