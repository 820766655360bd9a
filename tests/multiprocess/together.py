"""Runs a module as the processes of one JAX job on this machine."""

from __future__ import annotations

import os
import socket
import sys

from tests.forked import Forked

_TIMEOUT_S = 300


def run_together(module: str, count: int, *words: str, devices: int = 2) -> list[str]:
    """The output of `python -m MODULE PROCESS PORT WORDS...`, for each of `count` processes; all end with this call."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", module]
    env = {**os.environ, **flags}
    processes = [Forked([*command, str(process), port, *words], env=env, is_joined=True) for process in range(count)]
    try:
        return [process.communicate(_TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
