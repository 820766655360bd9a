"""`verify` and `scrub --repair` while a job saves all the time: nothing of it is called damaged, or touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ckptkit
from ckptkit.store.quarantine import QUARANTINE_DIR
from tests.verification.conftest import HOST, Job

ROUNDS = 6


@pytest.mark.long
def test_scrub_of_a_running_job_finds_nothing(tmp_path: Path) -> None:
    """A scrub from cron would destroy the step that the job is writing, or raise an alarm with every save."""
    job = Job(tmp_path)
    command = [sys.executable, "-m", "tests.verification.saving_job", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "saving\n"
            for _ in range(ROUNDS):
                assert process.poll() is None
                found = ckptkit.scrub(str(job.root), job.tiers, repair=True, host_id=HOST)
                assert not found.findings, found.findings
                for path in (*job.tiers, str(job.root)):
                    assert not ckptkit.verify(path).corrupt
            out, error = process.communicate("stop\n", timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, error[-3000:]
    assert int(out) > 5
    assert not list(tmp_path.rglob(QUARANTINE_DIR))
