"""A public trainer over ckptkit. It has heavy dependencies: `make stranger` installs it apart and runs this."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_tunix_runs_with_the_import_replaced(tmp_path: Path) -> None:
    """A drop-in would be one for our own scripts alone."""
    pytest.importorskip("tunix", reason="google-tunix is not installed: make stranger")
    script = Path(__file__).with_name("tunix_trainer.py")
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "TUNIX: resumed at 5, weights equal" in done.stdout
