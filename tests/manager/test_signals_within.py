"""Signal handlers that emit or ask in the middle of a save, an emit or a question, and that save in an emit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("act", "lines_min"), [("emit", 10), ("should_save", 30), ("save", 200)])
def test_handler_at_every_line_ends_in_no_deadlock(act: str, lines_min: int, tmp_path: Path) -> None:
    """A job that saves in its handler of SIGTERM would hang until it is killed, and lose its last steps."""
    words = [sys.executable, "-m", "tests.manager.signals_program", act, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= lines_min
