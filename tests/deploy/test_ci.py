"""`.ci/run` with a `make` that only notes what it is asked for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
_TESTS = "test MARKS=not slow 1"


@pytest.mark.parametrize("fails", ["setup-system", "nothing"])
@pytest.mark.parametrize("without", ["", "1"])
def test_system_packages_that_cannot_be_installed_end_the_run(tmp_path: Path, without: str, fails: str) -> None:
    """A registry that does not answer would cost CI the tests under Slurm and mpirun, and nobody would read that."""
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$* ${{CKPTKIT_CI:-}}" >> {tmp_path}/made; [ "$1" != {fails} ]\n')
    make.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CKPTKIT_CI_WITHOUT_SYSTEM": without}
    done = subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60, check=False)
    made = (tmp_path / "made").read_text().splitlines()
    system = "setup-system 1"
    if without:
        assert (done.returncode, system in made, _TESTS in made) == (0, False, True)
    elif fails == "nothing":
        assert (done.returncode, made.count(system), _TESTS in made) == (0, 1, True)
    else:
        # They are installed next to the lint and the demo; no test begins without them.
        assert (done.returncode != 0, made.count(system)) == (True, 2)
        assert not {"campaign NAME=s3 1", _TESTS} & set(made)


def test_workflows_run_ci_and_release_and_nothing_else() -> None:
    """A check would exist in the public CI alone, and nobody could repeat it in a clone."""
    files = sorted((SCRIPT.parents[1] / ".github" / "workflows").iterdir())
    runs = {path.stem: re.findall(r"\brun: (.*)", path.read_text()) for path in files}
    assert runs == {"ci": ['sudo env "PATH=$PATH" .ci/run'], "release": ["make release"]}
