"""One durable step by several processes: it is committed by all, or by none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.durable.orbax.host_shards import HostTreeSave
from ckptkit.durable.write_part import PartWriter
from ckptkit.durable.write_step import StepWriter
from ckptkit.errors import TransientStoreError
from ckptkit.model.durable_profile import DurableProfile
from ckptkit.model.manifest import SaveId


class Meeting:
    """Coordinators that exchange values in memory, as threads."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60)
        self._said: list[Any] = [None] * count
        self._verdict: Any = None

    def of(self, process: int) -> Any:
        meeting = self

        class Member:
            count = meeting.count

            def __init__(self) -> None:
                self.process = process

            def agree(
                self,
                channel: str,
                value: Any,
                decide: Callable[[list[Any]], Any],
                *,
                timeout_s: float | None = None,
                about: str = "",
            ) -> Any:
                del channel, timeout_s, about
                return meeting.meet(process, value, decide)

        return Member()

    def meet(self, process: int, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        self._said[process] = value
        self._barrier.wait()
        if process == 0:
            try:
                self._verdict = (decide(list(self._said)), None)
            except Exception as error:  # noqa: BLE001  all receive it
                self._verdict = (None, error)
        self._barrier.wait()
        answer, error = self._verdict
        self._barrier.wait()
        if error is not None:
            raise error
        return answer


@pytest.mark.parametrize("broken", [0, 1])
def test_failed_part_fails_the_step_on_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """A reader that took the step for committed would prune the older one, and lose both."""
    meeting, raised = Meeting(), dict[int, BaseException | None]()
    items = {"state": HostTreeSave({"w": np.arange(8.0)})}
    write_part = PartWriter.write

    def part(self: PartWriter, *args: Any) -> None:
        if self._process == broken:
            raise PermissionError("no room at the inn")
        write_part(self, *args)

    monkeypatch.setattr(PartWriter, "write", part)

    def run(process: int) -> None:
        writer = StepWriter(str(tmp_path), meeting.of(process), DurableProfile())
        try:
            writer.write("7", SaveId(1, 7, 0), items, {})
            raised[process] = None
        except BaseException as error:  # noqa: BLE001  looked at below
            raised[process] = error

    threads = [threading.Thread(target=run, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(raised[broken], PermissionError)
    other = raised[1 - broken]
    assert isinstance(other, TransientStoreError)
    assert f"process {broken} has not written its part" in str(other)
    assert not (tmp_path / "7").exists()


@pytest.mark.parametrize(("writes", "expected"), [(2, 2), (1, 1), (None, 5)])
def test_job_of_many_processes_has_few_writers_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int | None, expected: int
) -> None:
    """A thousand hosts that write at the same time get 429 from the bucket, and their saves fail."""
    meeting, lock, at_once, seen = Meeting(5), threading.Lock(), 0, list[int]()
    items = {"state": HostTreeSave({"w": np.arange(8.0)})}
    together = threading.Barrier(expected, timeout=60)
    write_part = PartWriter.write

    def part(self: PartWriter, *args: Any) -> None:
        nonlocal at_once
        with lock:
            at_once += 1
            seen.append(at_once)
        if self._process < 5 - 5 % expected:
            together.wait()  # as many as may write do write at the same time
        write_part(self, *args)
        with lock:
            at_once -= 1

    monkeypatch.setattr(PartWriter, "write", part)
    profile = DurableProfile(job_write_concurrency=writes).for_one_of(5)

    def run(process: int) -> None:
        writer = StepWriter(str(tmp_path), meeting.of(process), profile)
        writer.write("7", SaveId(1, 7, 0), items, {})

    threads = [threading.Thread(target=run, args=(process,)) for process in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max(seen), len(seen)) == (expected, 5)
    assert (tmp_path / "7" / "state" / "manifest.ocdbt").exists()
