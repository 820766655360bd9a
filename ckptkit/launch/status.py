"""The state of a running job, in a JSON file that other programs read, and a job that is known by its file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from ckptkit.launch.watch import Recovery
from ckptkit.util.clock import monotonic_s, wall_s
from ckptkit.util.whole_file import write_whole

FORMAT = "ckptkit/run/1"
_STEPS_EVERY_S = 1.0


@final
class Status:
    """Follows a job and shows each change: state, attempt, workers by process id, losses, recoveries, exit code."""

    KEPT = 1000  # losses and recoveries

    def __init__(self, show: Callable[[dict[str, Any]], None]):
        self._show = show
        self._next_s, self._shown_step = 0.0, None
        self._now: dict[str, Any] = {"state": "starting", "agent": os.getpid(), "losses": [], "recoveries": []}

    def running(self, attempt: int, pids: Mapping[int, int], processes: int) -> None:
        """The workers of an attempt have been started: `pids` on this host, `processes` in all."""
        workers = [{"process": process, "pid": pid} for process, pid in pids.items()]
        self._change(state="running", attempt=attempt, processes=processes, workers=workers)

    def lost(self, attempt: int, process: int, cause: str) -> None:
        """A process was lost, and with it the attempt."""
        loss = {"attempt": attempt, "process": process, "cause": cause, "at_s": round(wall_s(), 3)}
        self._change(state="restarting", workers=[], losses=[*self._now["losses"], loss][-self.KEPT :])

    def all_ended(self, seconds: float) -> None:
        """So many seconds after the loss was noticed no worker of any host ran."""
        *before, last = self._now["losses"]
        self._change(losses=[*before, {**last, "ended_s": round(seconds, 3)}])

    def stepped(self, attempt: int, step: int | None) -> None:
        """The attempt has made a step, and process 0 has reached `step`. Shown once a second at most."""
        changed = {"newest_attempt_with_steps": attempt, "step": step}
        is_first = self._now.get("newest_attempt_with_steps") != attempt
        self._now |= changed
        if is_first or (self._shown_step != step and monotonic_s() >= self._next_s):
            self._next_s, self._shown_step = monotonic_s() + _STEPS_EVERY_S, step
            self._change(**changed)

    def recovered(self, back: Recovery) -> None:
        """The job makes steps again."""
        found = {**asdict(back), "repeated": back.repeated}
        self._change(recoveries=[*self._now["recoveries"], found][-self.KEPT :])

    def ended(self, code: int) -> None:
        """The job is over."""
        self._change(state="ended", workers=[], code=code)

    def _change(self, **changed: Any) -> None:
        self._now = {**self._now, **changed}
        self._show(dict(self._now))


def write_status(path: Path | None, status: Mapping[str, Any]) -> None:
    """Replaces the file: a reader sees one status or the next. A full disk loses the status, never the job."""
    if path is None:
        return
    with suppress(OSError):
        write_whole(path, json.dumps({"format": FORMAT, **status}, indent=1) + "\n")


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
