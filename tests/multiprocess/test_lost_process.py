"""A process that dies or stops: the others end by JAX's heartbeats, and the launcher names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit import Event, EventLog, Kind
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers, free_port
from tests.multiprocess.starters import environment

PROCESSES = 3
HEARTBEAT_S = 5
LIMIT_S = 90.0
COMMAND = (sys.executable, "-m", "tests.multiprocess.beating")


def ready_pid(line: str) -> int | None:
    words = line.split()
    return int(words[1]) if words[:1] == ["ready"] else None


def test_survivors_of_a_killed_process_exit(tmp_path: Path) -> None:
    """Breaks when a job without our launcher hangs in a collective until its time limit, all machines paid for."""
    coordinator, error = f"127.0.0.1:{free_port()}", tmp_path / "error.txt"
    with error.open("w") as out:
        job = [
            subprocess.Popen(
                [*COMMAND, coordinator, str(PROCESSES), str(process), "0", str(HEARTBEAT_S)],
                env=environment(1),
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
            for process in range(PROCESSES)
        ]
    try:
        for process in job:
            assert process.stdout is not None
            assert any(ready_pid(line) for line in process.stdout), error.read_text()[-3000:]
        job[1].kill()
        codes = [process.wait(LIMIT_S) for process in job]
    finally:
        for process in job:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert codes == [-signal.SIGABRT, -signal.SIGKILL, -signal.SIGABRT], error.read_text()[-3000:]


@pytest.mark.long
def test_frozen_process_is_named_and_the_job_restarts() -> None:
    """Breaks when a machine that froze is not noticed, or the survivor that gave up first is taken for the lost one:
    the next launch would leave out the wrong host."""
    events: list[Event] = []
    log = EventLog(process=-1)
    log.observe(events.append)
    said: list[str] = []
    ready: dict[int, int] = {}
    stopped = False

    def hear(process: int, line: str) -> None:
        nonlocal stopped
        said.append(f"{process}: {line}")
        if (pid := ready_pid(line)) is not None:
            ready[process] = pid
        if len(ready) == PROCESSES and not stopped:
            stopped = True
            os.kill(ready[1], signal.SIGSTOP)

    launcher = Launcher(
        Workers(
            [*COMMAND, "{coordinator}", "{processes}", "{process}", "{attempt}", str(HEARTBEAT_S)],
            processes=PROCESSES,
            devices_per_process=1,
        ),
        policy=RestartPolicy(restarts=1, backoff_s=0.1, grace_s=0.5),
        events=log,
        hooks=Hooks(on_output=hear, say=said.append),
    )
    assert launcher.run() == ExitCode.OK, "\n".join(said[-60:])
    (lost,) = [event.fields for event in events if event.kind == Kind.DISRUPTED]
    assert (lost["lost"], lost["cause"]) == (1, "SIGSTOP"), said[-60:]
    assert "attempt 0: process 1 was lost (SIGSTOP)" in said
