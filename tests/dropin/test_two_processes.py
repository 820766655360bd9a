"""Two real JAX processes: policies that each would answer differently, casts, NNX, the newer style, other items."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_two_processes_decide_save_delete_and_restore_together(tmp_path: Path) -> None:
    """One process would wait for ever for a step, a barrier or a deletion that the other does not know of."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "tests.dropin.two_processes"]
    processes = [
        subprocess.Popen(
            [*command, str(process), port, str(tmp_path)],
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for text in said:
        assert "done [0, 3, 4, 5, 6, 7]" in text, text[-3000:]
