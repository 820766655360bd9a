"""A step restores without a template on any devices: of one process or several, more or fewer than it was saved on.

So do parts of it by surgery, what a follower is given, and positions in the data.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.multiprocess.anywhere import digests, state

JOBS = {"one": (1, 1), "eight": (1, 8), "two": (2, 2)}  # processes, devices of each


def run(job: str, what: str, *paths: Path) -> list[str]:
    """Runs `anywhere.py` as a job; the output of each process."""
    count, devices = JOBS[job]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "tests.multiprocess.anywhere", what, address, str(count)]
    processes = [Forked([*command, str(process), *map(str, paths)], env=environment) for process in range(count)]
    outputs = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-4000:]
            outputs.append(output)
    finally:
        for process in processes:
            process.kill()
    return outputs


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The saves of every kind of job, with ckptkit and with stock Orbax."""
    base = tmp_path_factory.mktemp("anywhere")
    for job in JOBS:
        run(job, "save", base / job)
    return [base / job / writer for job in JOBS for writer in ("ours", "stock")]


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_a_step_restores_on_other_devices(roots: list[Path], job: str) -> None:
    """Nobody could look at a large run's state on a laptop, or go on from a laptop's state in a job."""
    readable = roots if job != "two" else [root for root in roots if root.parent.name != "two"]
    expected = digests({**state(), "moved": state()["w"]})
    for output in run(job, "restore", *readable):
        found = json.loads(output.splitlines()[-1])
        assert found == {str(root): expected for root in readable}
