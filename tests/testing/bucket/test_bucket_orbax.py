"""If this fails, stock Orbax cannot live on `gs://` here, and nothing that is measured against it counts."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bucket_http import BUCKET, Http

from ckptkit.testing.bucket import BucketServer, Fault, FaultPlan, Kind, Reset, Status, Truncate

JOB = Path(__file__).with_name("orbax_job.py")

# 10 % of all requests, by five kinds of fault that every client has to bear. The seed was not chosen.
TEN_PERCENT = FaultPlan(
    seed=1,
    faults=tuple(
        Fault(effect=effect, probability=0.02)
        for effect in (
            Status(code=503),
            Status(code=429),
            Status(code=500),
            Reset(),
            Truncate(after_bytes=10),
        )
    ),
)


def run_job(server: BucketServer, *, processes: int, steps: int, waits: str = "stock", timeout_s: float = 170) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, **server.env(), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(JOB), f"gs://{BUCKET}/run", str(steps), waits]
    job = [
        subprocess.Popen(
            command + ([str(processes), str(index), str(port)] if processes > 1 else []),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]
    end_s = time.monotonic() + timeout_s
    try:
        for process in job:
            output, _ = process.communicate(timeout=max(1.0, end_s - time.monotonic()))
            assert process.returncode == 0, output[-4000:]
            assert output.splitlines()[-1] == "restored", output[-4000:]
    finally:
        for process in job:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_orbax_saves_and_restores(server: BucketServer, processes: int) -> None:
    run_job(server, processes=processes, steps=3)
    names = Http(server.url).names()
    steps = sorted({name.split("/")[1] for name in names if name.endswith("commit_success.txt")})
    assert steps == ["1", "2"]
    assert server.log.totals(Kind.WRITE).count > 0


@pytest.mark.long
def test_orbax_survives_ten_percent_faults(server: BucketServer) -> None:
    server.faults = TEN_PERCENT
    run_job(server, processes=2, steps=1, waits="short")
    check_share(server)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_orbax_survives_ten_percent_faults_with_its_own_delays(server: BucketServer, processes: int) -> None:
    server.faults = TEN_PERCENT
    run_job(server, processes=processes, steps=3)
    check_share(server)


def check_share(server: BucketServer) -> None:
    entries = server.log.entries()
    share = sum(entry.fault is not None for entry in entries) / len(entries)
    print(f"{len(entries)} requests, {share:.1%} faults")
    assert 0.05 < share < 0.15
    assert all(server.fired())
