"""`.ci/run` with a `make` that only notes what it is asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"


@pytest.mark.parametrize("fails", ["setup-system", "setup-cluster", "nothing"])
@pytest.mark.parametrize(("user", "variables", "is_needed"), [(0, {}, True), (7, {"CI": "1"}, True), (7, {}, False)])
def test_system_packages_that_cannot_be_installed_end_the_run(
    tmp_path: Path, user: int, variables: dict[str, str], is_needed: bool, fails: str
) -> None:
    """A registry that does not answer would cost CI the tests under Slurm and mpirun, and nobody would read that."""
    commands = {
        "id": f"echo {user}",
        "apt-get": "exit 0",
        "make": f'echo "$1 ${{CKPTKIT_TOOLS_ARE_THERE:-}}" >> {tmp_path}/made; [ "$1" != {fails} ]',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60, check=False)
    made = (tmp_path / "made").read_text().splitlines()
    assert (done.returncode != 0) == (is_needed and fails != "nothing")
    if not is_needed:
        assert "setup-cluster " not in made
        assert "test-long " in made
    elif fails == "nothing":
        assert "test-long 1" in made
    else:
        assert made[-1] == f"{fails} "
