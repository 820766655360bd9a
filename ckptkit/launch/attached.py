"""A job that another `ckptkit run` has started, as its status file shows it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from ckptkit.launch.status import FORMAT


@final
class AttachedJob:
    """Sends signals to the workers of a running `ckptkit run --status FILE`, and to nothing else: each process is
    checked to be a child of that agent."""

    def __init__(self, path: Path):
        self._path = path
        self.status = self._read()
        if self.status["state"] == "ended":
            raise ValueError(f"{path}: the job has ended")

    @property
    def processes(self) -> int:
        """The workers on this host."""
        return len(self.status["workers"])

    def look(self) -> Mapping[str, Any]:
        """The newest status. `state` is also `ended` if the agent has died."""
        self.status = self._read()
        if not Path(f"/proc/{self.status['agent']}").exists():
            self.status = {**self.status, "state": "ended", "workers": []}
        return self.status

    def kill(self, victims: Sequence[int], harm: Callable[[], None] | None) -> bool:
        """SIGKILLs processes; False if one of them does not run. With `harm` all workers of this host are stopped, harm
        is done, and all are killed: none of them sees the damage while it lives."""
        workers = self.look()["workers"]
        known = {each["process"]: each["pid"] for each in workers}
        if not set(victims) <= set(known):
            return False
        hit = list(known.values()) if harm is not None else [known[victim] for victim in victims]
        if harm is not None:
            if not all(self._signal(pid, signal.SIGSTOP) for pid in hit):
                return False
            harm()
        killed = [self._signal(pid, signal.SIGKILL) for pid in hit]
        return all(killed)

    def signal(self, process: int, signum: int) -> bool:
        """Sends a signal to a worker; False when it is not running."""
        pids = [each["pid"] for each in self.look()["workers"] if each["process"] == process]
        return bool(pids) and self._signal(pids[0], signum)

    def _signal(self, pid: int, signum: int) -> bool:
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if _parent(pid) == self.status["agent"]:
                    signal.pidfd_send_signal(pidfd, signum)
                    return True
            finally:
                os.close(pidfd)
        return False

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._path}: no status of a job: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{self._path}: not written by `ckptkit run --status`")
        return {"attempt": 0, "workers": [], **found}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
