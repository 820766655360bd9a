"""`python -m ckptkit` is the command."""

from __future__ import annotations

import subprocess
import sys


def test_package_runs_as_a_module() -> None:
    """Where the directory of scripts is not on the PATH, `python -m` is what everybody tries next."""
    command = [sys.executable, "-m", "ckptkit", "steps", "/nonexistent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert (done.returncode, "ckptkit: /nonexistent: there is no such root" in done.stderr) == (10, True), done.stderr
