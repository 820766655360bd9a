"""`python -m ckptkit` is the command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ckptkit


def test_module_of_the_command_is_the_command() -> None:
    """It has no layer in the import contract: it could import anything."""
    code = (Path(ckptkit.__file__).parent / "__main__.py").read_text()
    assert re.findall(r"^ *(?:from|import) .*", code, re.MULTILINE) == ["import sys", "from ckptkit.cli import main"]


def test_package_runs_as_a_module() -> None:
    """Where the directory of scripts is not on the PATH, `python -m` is what everybody tries next."""
    command = [sys.executable, "-m", "ckptkit", "steps", "/nonexistent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "ckptkit: /nonexistent: there is no such root" in done.stderr) == (10, True), done.stderr
