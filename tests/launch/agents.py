"""`ckptkit run` on several hosts that are only ports of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ckptkit.launch import free_port
from ckptkit.util.whole_file import write_whole
from tests.launch.test_launcher import wait_until

SECRET = "0123456789abcdef-secret"
TOLD = (
    "import os, sys, time\n"
    "from ckptkit.util import heartbeat\n"
    "e = os.environ\n"
    "assert 'CKPTKIT_SECRET' not in e\n"
    "words = [e['CKPTKIT_' + name] for name in ('ATTEMPT', 'PROCESS', 'PROCESSES', 'LOCAL_PROCESS')]\n"
    "print('up', *words, os.getpid(), flush=True)\n"
    "step = 0\n"
    "while not os.path.exists(sys.argv[1]):\n"
    "    time.sleep(0.01)\n"
    "    step += 1\n"
    "    heartbeat.beat(step)\n"
    "sys.exit(int(open(sys.argv[1]).read()))\n"
)


class Agents:
    """`ckptkit run` on several hosts that are only ports of this machine."""

    def __init__(self, home: Path):
        self.home = home
        self.port = free_port()
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        (home / "told.py").write_text(TOLD)

    def start(self, rank: int, *words: str, nnodes: str = "3", secret: str = SECRET, command: str = "told.py") -> None:
        log = (self.home / f"log-{rank}").open("ab")
        flags = ["--processes", "2", "--nnodes", nnodes, "--node-rank", str(rank), "--preload", "json"]
        flags += ["--rendezvous", f"127.0.0.1:{self.port}", "--grace", "0.1", "--join-timeout", "120", *words]
        if rank == 0:
            flags += ["--status", str(self.home / "status")]
        target = [sys.executable, str(self.home / command), str(self.home / "go")]
        self.agents[rank] = subprocess.Popen(
            [sys.executable, "-m", "ckptkit.cli", "run", *flags, "--", *target],
            env={**os.environ, "CKPTKIT_SECRET": secret},
            stdout=log,
            stderr=log,
        )

    def log(self, rank: int) -> str:
        return (self.home / f"log-{rank}").read_text()

    def up(self, attempt: int) -> dict[int, int]:
        """Process ids of the workers of an attempt, by process."""
        found = {}
        for rank in self.agents:
            for line in self.log(rank).splitlines():
                words = line.split()
                if words[1:3] == ["up", str(attempt)]:
                    found[int(words[3])] = int(words[6])
        return found

    def wait_up(self, attempt: int, count: int) -> dict[int, int]:
        assert wait_until(lambda: len(self.up(attempt)) == count, 120), {rank: self.log(rank) for rank in self.agents}
        return self.up(attempt)

    def status(self) -> dict[str, Any]:
        return json.loads((self.home / "status").read_text())

    def finish(self, code: int = 0) -> None:
        write_whole(self.home / "go", str(code))  # else a worker may read an empty file
        for rank, agent in self.agents.items():
            if agent.returncode is None:
                assert agent.wait(timeout=120) == code, self.log(rank)

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
