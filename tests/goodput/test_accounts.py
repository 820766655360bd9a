"""The account of a loop that nobody prepared, against one that was made by hand."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.goodput import Part, goodput_report, load_run
from tests.goodput.loop_that_is_killed import STEP_S

LOOP = Path(__file__).with_name("loop_that_is_killed.py")


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ckptkit-account-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def run_killed_at(root: Path, *words: str) -> int:
    """Runs the loop to its end, killed twice; the number of steps that it took in all."""
    taken = 0
    for last in (41, 73, None):
        command = [sys.executable, "-m", "tests.goodput.loop_that_is_killed", str(root), *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=LOOP.parents[2]) as process:
            assert process.stdout is not None
            for line in process.stdout:
                taken += 1
                if last is not None and int(line) >= last:
                    process.kill()
            code = process.wait(timeout=120)
        assert code == (0 if last is None else -9)
    return taken


@pytest.mark.long
def test_account_agrees_with_one_made_by_hand(root: Path) -> None:
    """Breaks when a loop that writes no line for its account has one that is more than 2 points off."""
    run_killed_at(root, "hand")
    ours, hand = goodput_report(load_run(root / "run")), goodput_report(load_run(root / "hand"))
    assert (ours.steps_from, hand.steps_from) == ("calls", "spans")
    assert hand.goodput.ml_goodput is not None
    assert ours.goodput.ml_goodput == pytest.approx(hand.goodput.ml_goodput, abs=0.02)
    assert ours.goodput.ml_goodput == pytest.approx(hand.goodput.ml_goodput, rel=0.1)  # also where starts take long
    assert ours.goodput.effective_training_time == pytest.approx(hand.goodput.effective_training_time, abs=0.02)
    assert ours.goodput.distinct_steps == hand.goodput.distinct_steps == 100
    assert len(ours.disruptions) == len(hand.disruptions) == 2
    for part in (Part.PRODUCTIVE, Part.CHECKPOINT_SAVE, Part.CHECKPOINT_RESTORE, Part.RECOVERY, Part.WASTED):
        assert ours.parts_s[part] == pytest.approx(hand.parts_s[part], abs=0.02 * hand.wall_s), part


@pytest.mark.long
def test_loop_that_runs_ahead_of_its_steps_is_accounted_for(root: Path) -> None:
    """Breaks when the time in which a save waits for a dispatched step is called the save's."""
    taken = run_killed_at(root)
    report = goodput_report(load_run(root / "run"))
    computed_s = report.parts_s[Part.PRODUCTIVE] + report.parts_s[Part.WASTED]
    assert computed_s >= STEP_S * taken - 0.02 * report.wall_s
    assert report.parts_s[Part.CHECKPOINT_SAVE] < 0.5 * computed_s
