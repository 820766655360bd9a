"""Workers that form one job, and workers that do not: the loop of README under `ckptkit run --processes 2`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ckptkit
from ckptkit import direct
from ckptkit.launch import ExitCode, WarmStart
from tests.cases import long_except
from tests.launch.test_launcher import wait_until
from tests.launch.test_warm import PYTHON, Job, write
from tests.states import assert_same

README = Path(__file__).parents[2] / "README.md"
WARM = WarmStart(preload=("jax", "ckptkit.direct", "ckptkit.manager"))


def test_loop_of_the_readme_survives_a_kill_under_run(tmp_path: Path) -> None:
    """A new user's first try of `ckptkit run` would end with its restarts spent, or with other bits."""
    block = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)[0]
    script = write(
        tmp_path / "loop.py",
        re.sub("/tmp/|/dev/shm/", lambda found: f"{tmp_path}/{'ram-' * ('shm' in found[0])}", block),
    )
    status = tmp_path / "status"

    def now() -> dict[str, Any]:
        with suppress(OSError):
            return json.loads(status.read_text())
        return {}

    words = ["run", "--processes", "2", "--status", str(status), "--", PYTHON, script]
    with (tmp_path / "shown").open("w") as screen:
        agent = subprocess.Popen([PYTHON, "-m", "ckptkit.cli", *words], stdout=screen, stderr=screen)
    try:
        assert wait_until(lambda: (now().get("step") or 0) >= 25, 90), (tmp_path / "shown").read_text()
        os.kill(now()["workers"][1]["pid"], signal.SIGKILL)
        code = agent.wait(timeout=60)
    finally:
        agent.kill()
        agent.wait()
        shown = (tmp_path / "shown").read_text()
        print(shown)
    assert code == 0
    assert "ckptkit run: attempt 0: process 1 was lost (SIGKILL)\n" in shown
    cost = r"attempt 1: step \d+ is done [\d.]+ m?s after the loss; (steps? [\d to]+ again|no step was lost)\n"
    assert re.search(cost, shown), shown
    assert len(now()["losses"]) == 1
    like = {"w": jnp.zeros((256, 256))}
    assert ckptkit.latest_step(str(tmp_path / "ckptkit-run")) == 100
    assert_same(direct.load(tmp_path / "ckptkit-run" / "100" / "default", like), {"w": like["w"] + 100})


SAVES = {
    "manager": "ckptkit.CheckpointManager(sys.argv[1])",
    "save": "ckptkit.direct.save(sys.argv[1] + '/tree', {'a': 1})",
    "checkpointer": "ckptkit.direct.StandardCheckpointer().save(sys.argv[1] + '/tree', {'a': 1})",
}


@pytest.mark.parametrize("how", long_except(["manager"], SAVES))
def test_worker_that_has_not_joined_is_refused_and_not_restarted(how: str, tmp_path: Path) -> None:
    """Each process would take itself for the job: one overwrites the other's saves, and all restarts are spent."""
    job = Job(
        [PYTHON, write(tmp_path / "s.py", f"import sys, ckptkit.direct\n{SAVES[how]}"), str(tmp_path / "root")],
        processes=2,
        warm=WARM,
    )
    assert job.run() == ExitCode.USAGE, job.lines
    assert any("Call jax.distributed.initialize() before any other use of JAX" in line for line in job.texts)
    (said,) = job.said
    assert re.fullmatch(r"process \d refused its input \(exit code 2\): not restarted", said)
    assert not (tmp_path / "root" / "tree").exists()


def test_process_that_a_worker_starts_is_a_job_of_its_own(tmp_path: Path) -> None:
    """A worker that evaluates or converts in a process of its own would end with an error."""
    inner = write(tmp_path / "inner.py", "import sys, ckptkit.direct\nckptkit.direct.save(sys.argv[1], {'a': 1})")
    code = (
        "import os, subprocess, sys\n"
        f"words = [sys.executable, {inner!r}, {str(tmp_path / 'tree')!r}]\n"
        "if os.environ['CKPTKIT_PROCESS'] == '1':\n"
        "    subprocess.run(words, check=True, start_new_session=True)\n"
    )
    job = Job([PYTHON, write(tmp_path / "s.py", code)], processes=2)
    assert job.run() == ExitCode.OK, job.lines
    assert (tmp_path / "tree").is_dir()


@pytest.mark.long
def test_manager_that_only_reads_needs_no_job(tmp_path: Path) -> None:
    """Workers that look at another run's steps would have to form a job for that."""
    code = (
        "import sys, ckptkit.direct\nfrom orbax.checkpoint import CheckpointManagerOptions as Options\n"
        "ckptkit.CheckpointManager(sys.argv[1], options=Options(read_only=True)).close()"
    )
    root = tmp_path / "root"
    root.mkdir()
    job = Job([PYTHON, write(tmp_path / "s.py", code), str(root)], processes=2, warm=WARM)
    assert job.run() == ExitCode.OK, job.lines
