"""A background thread that borrows its caller's: the order of waiting, and that no wait is endless."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ckptkit.errors import CheckpointError
from ckptkit.job.coordination import Decide
from ckptkit.restore import caller_thread as caller_module
from ckptkit.restore.caller_thread import CallerThread, all_come

LIMIT_S = 60.0


class Threads:
    """Coordinators of a job whose processes are threads."""

    def __init__(self, count: int):
        self.count, self.values = count, [None] * count
        self.meeting = threading.Barrier(count, timeout=LIMIT_S)
        self.verdict = ""

    def coordinator(self, process: int, timeout_s: float) -> Any:
        return Member(self, process, timeout_s)


class Member:
    def __init__(self, job: Threads, process: int, timeout_s: float):
        self.job, self.process, self.count, self.timeout_s = job, process, job.count, timeout_s

    def agree(
        self, channel: str, value: Any, decide: Decide, *, timeout_s: float | None = None, about: str = ""
    ) -> Any:
        self.job.values[self.process] = value
        self.job.meeting.wait()
        if self.process == 0:
            self.job.verdict = json.dumps(decide(json.loads(json.dumps(self.job.values))))
        self.job.meeting.wait()
        return json.loads(self.job.verdict)


class Job:
    """Two processes that wait for their callers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float = LIMIT_S):
        monkeypatch.setattr(caller_module, "_LOOK_S", 0.05)
        self.callers = [CallerThread(), CallerThread()]
        job = Threads(2)
        self._threads = ThreadPoolExecutor(4)
        self.over = False
        self.waiting = [
            self._threads.submit(all_come, caller, job.coordinator(process, timeout_s))
            for process, caller in enumerate(self.callers)
        ]

    def serve(self, process: int, timeout_s: float | None = None) -> Future[None]:
        return self._threads.submit(self.callers[process].serve, lambda: self.over, timeout_s)

    def said(self) -> list[str | None]:
        return [future.result(LIMIT_S) for future in self.waiting]

    def end(self, *served: Future[None]) -> None:
        self.over = True
        for caller in self.callers:
            caller.wake()
        for future in served:
            future.result(LIMIT_S)
        self._threads.shutdown()


def test_no_collective_starts_before_all_callers_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process would be in a collective while another one's caller is still compiling, or in its own."""
    job = Job(monkeypatch)
    first = job.serve(0)
    time.sleep(0.5)  # several looks
    assert not any(future.done() for future in job.waiting)
    second = job.serve(1)
    assert job.said() == [None, None]
    on = [job.callers[process].run(lambda: threading.current_thread().name) for process in (0, 1)]
    assert len(set(on)) == 2
    assert threading.current_thread().name not in on
    job.end(first, second)


def test_caller_may_time_out_only_before_all_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose time runs out in the middle would leave the others in a collective to which it never comes."""
    job = Job(monkeypatch)
    job.serve(0, timeout_s=0.2).result(LIMIT_S)
    assert not any(future.done() for future in job.waiting)
    kept = job.serve(0, timeout_s=1.0), job.serve(1, timeout_s=1.0)
    assert job.said() == [None, None]
    time.sleep(1.5)
    assert not any(future.done() for future in kept)
    assert job.callers[0].run(lambda: 7) == 7
    job.callers[0].release()
    kept[0].result(LIMIT_S)
    job.end(kept[1])


def test_late_or_timed_out_caller_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that closes, or waits for something that the others do after the restore, would hold them without an
    end."""
    job = Job(monkeypatch)
    served = job.serve(0)
    job.callers[1].leave()
    assert job.said() == ["process 1 gave the restore up"] * 2
    job.end(served)
    job = Job(monkeypatch, timeout_s=0.5)
    served = job.serve(0)
    assert job.said() == ["process 1 did not call result within 0.5 s"] * 2
    job.end(served)


def test_collective_error_is_raised_in_the_requesting_thread() -> None:
    """A collective that fails would end the caller's wait, and leave the restore behind it waiting."""
    caller, over = CallerThread(), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(caller.serve, over.is_set, None)
        assert caller.come(LIMIT_S) == "here"
        with pytest.raises(ZeroDivisionError):
            caller.run(lambda: 1 // 0)
        assert caller.run(lambda: "more") == "more"
        over.set()
        caller.wake()
        served.result(LIMIT_S)


def test_interrupted_caller_counts_as_absent() -> None:
    """Ctrl-C in the middle of a transfer would leave the background thread waiting, and the process with it."""
    caller = CallerThread()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(caller.serve, lambda: False, None)
        assert caller.come(LIMIT_S) == "here"
        with pytest.raises(CheckpointError, match="was interrupted"):
            caller.run(interrupt)
        assert isinstance(served.exception(LIMIT_S), KeyboardInterrupt)
        assert caller.come(LIMIT_S) == "gone"
