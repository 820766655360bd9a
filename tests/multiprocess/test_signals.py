"""Real signals at random moments of real calls: nothing hangs, nothing stays leased, the next run goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest


def check(root: Path, *, processes: int, moments: int, kills: int, timeout_s: float) -> None:
    """Runs one campaign; a failure is repeated with the command that is printed."""
    seed = int(os.environ.get("CKPTKIT_TEST_SEED") or random.SystemRandom().randrange(10**6))
    words = ["--seed", seed, "--moments", moments, "--kills", kills, "--processes", processes]
    command = [sys.executable, "-m", "tests.multiprocess.signalled", str(root), *map(str, words)]
    print(" ".join(command))
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
    )
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-6000:]}"


@pytest.mark.long
def test_signals_at_random_moments_of_one_process(tmp_path: Path) -> None:
    """Ctrl-C, a preemption or the kernel would leave a process that hangs, or one that never saves again."""
    check(tmp_path, processes=1, moments=12, kills=2, timeout_s=150)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "moments", "kills"), [(1, 300, 50), (2, 125, 25)])
def test_many_signals_at_random_moments(tmp_path: Path, processes: int, moments: int, kills: int) -> None:
    """See `test_signals_at_random_moments_of_one_process`; of two processes, one is interrupted."""
    check(tmp_path, processes=processes, moments=moments, kills=kills, timeout_s=3600)
