"""How a manager ends: closed, interrupted within a save, with a thread that hangs, or not closed at all."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import Kind
from ckptkit.save import flow
from ckptkit.save.book.under_way import ExitDrain, SavesUnderWay
from tests.manager.ending import COMMITTED, WAYS

STATE = {"w": np.arange(5000.0)}


def save_args(step: int) -> Any:
    return ocp.args.StandardSave({**STATE, "step": step})  # pyright: ignore[reportCallIssue]


def manager_of(root: Path, *observers: Any, **processes: Any) -> ckptkit.CheckpointManager:
    """Over a ramdisk, a disk and a durable tier, all of which take every step."""
    log = ckptkit.EventLog()
    for observer in observers:
        log.observe(observer)
    return ckptkit.CheckpointManager(
        root / "durable",
        options=ocp.CheckpointManagerOptions(save_interval_steps=1),
        tiers=[ckptkit.Tier.ram(str(root / "ram")), ckptkit.Tier.ssd(str(root / "ssd"), save=ckptkit.EverySteps(1))],
        host_id="host",
        events=log,
        processes=ckptkit.ProcessOptions(**{"timeout_s": 30, **processes}),
    )


def leased(manager: Any) -> list[Any]:
    """The slots that somebody still reads or fills."""
    arenas = manager._components.storage.arenas.values()
    return [slot for arena in arenas for slot in arena._slots if slot.leases]


@pytest.fixture
def exiting() -> Iterator[None]:
    """SIGTERM ends the program with an exit code, as common handlers do; Ctrl-C raises, also in a background job."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    before_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGINT, before_interrupt)


@pytest.mark.parametrize("phase", ["begun", "staged"])
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.usefixtures("exiting")
def test_signal_within_save_leaves_close_bounded(
    tmp_path: Path, phase: str, number: signal.Signals, raised: type[BaseException]
) -> None:
    """The disk thread would wait without an end for the verdict on a save, and `close` with it, at every preemption."""
    reached = threading.Event()

    def interrupt(event: ckptkit.Event) -> None:
        if event.step == 1 and event.fields.get("phase") == phase and event.tier in (None, "ram"):
            os.kill(os.getpid(), number)
            reached.set()
            time.sleep(0.05)  # the main thread raises meanwhile

    manager = manager_of(tmp_path, interrupt)
    manager.save(0, args=save_args(0))
    manager.wait_until_finished()

    def interrupted() -> None:
        manager.save(1, args=save_args(1))
        assert reached.wait(10)
        time.sleep(1)  # where the signal comes right after the save

    with pytest.raises(raised):
        interrupted()
    manager.wait_until_finished()
    assert leased(manager) == []
    manager.save(2, args=save_args(2))
    closing = threading.Thread(target=manager.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "close hangs"
    with manager_of(tmp_path) as again:
        assert again.restore(None)["step"] == 2


def test_close_with_a_hanging_tier_raises_and_names_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount that hangs would never release a job and its accelerators."""
    hangs = threading.Event()
    manager: Any = manager_of(tmp_path, timeout_s=0.2)
    monkeypatch.setattr("ckptkit.manager.checkpoint_manager._STALL_SPARE_S", 0.1)
    monkeypatch.setattr("ckptkit.manager.checkpoint_manager._JOIN_S", 0.1)
    manager.save(0, args=save_args(0))
    manager.wait_until_finished()
    monkeypatch.setattr(manager._durable, "save", lambda *_, **__: hangs.wait(60))
    manager.save(1, args=save_args(1))
    try:
        with pytest.raises(ckptkit.SaveFailedError, match=r"did not advance for .* lost: step 1 in durable; look at"):
            manager.close()
        assert "slots stay locked until this process ends" in caplog.text
    finally:
        hangs.set()


def test_close_waits_as_long_as_a_save_advances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last save of a large job would be cut off because it takes longer than a vote may."""
    manager: Any = manager_of(tmp_path, timeout_s=0.2)
    monkeypatch.setattr("ckptkit.manager.checkpoint_manager._STALL_SPARE_S", 0.2)
    save = manager._durable.save

    def slow(*args: Any, **words: Any) -> Any:
        for _ in range(10):
            time.sleep(0.1)
            manager._durable.pace.take(1)
        return save(*args, **words)

    monkeypatch.setattr(manager._durable, "save", slow)
    manager.save(0, args=save_args(0))
    manager.close()
    assert [record.tiers for record in manager.steps()] == [("durable", "ram", "ssd")]


def test_waiting_save_logs_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A blocked step loop would give no reason, and dashboards have no curve of it."""
    monkeypatch.setattr(flow, "_SAID_AFTER_S", 0.05)
    entries: list[dict[str, Any]] = []
    with manager_of(tmp_path) as manager:
        manager._logger = type("Entries", (), {"log_entry": staticmethod(entries.append)})()  # pyright: ignore[reportAttributeAccessIssue]
        gate = threading.Event()
        save = manager._durable.save
        monkeypatch.setattr(manager._durable, "save", lambda *args, **words: gate.wait(30) and save(*args, **words))
        manager.save(0, args=save_args(0))
        threading.Timer(0.5, gate.set).start()
        with caplog.at_level(logging.WARNING, "ckptkit"):
            manager.save(1, args=save_args(1))
    lines = [record.getMessage() for record in caplog.records if "previous save" in record.getMessage()]
    assert any("save waits for the previous save, 30 s at most: step 0 in durable" in line for line in lines), lines
    assert any(line.startswith("save waited 0.") and "step 0 in durable" in line for line in lines), lines
    first, second = entries
    assert first["wait_for_prev_duration_secs"] < 0.2 < second["wait_for_prev_duration_secs"]
    assert second["wait_for_prev_start_time"] > first["checkpointer_blocking_start_time"] > 1e9
    assert 0 < second["checkpointer_blocking_duration_secs"] < second["checkpoint_manager_blocking_duration_secs"]


@pytest.fixture(scope="module")
def ended() -> Iterator[dict[str, tuple[int, str, Path]]]:
    """How a program ended that did not close its manager, what it wrote, and its directory, by the way it ended."""
    with tempfile.TemporaryDirectory() as name:  # on a disk: a durable root in memory is warned of
        root = Path(name)
        command = [sys.executable, "-m", "tests.manager.ending", str(root)]
        subprocess.run(command, check=True, timeout=120)
        yield {
            way: (int((root / way / "code").read_text()), (root / way / "err").read_text(), root / way) for way in WAYS
        }


@pytest.mark.parametrize("way", COMMITTED)
def test_process_that_ends_without_close_keeps_its_last_save(ended: dict[str, tuple[int, str, Path]], way: str) -> None:
    """The last checkpoint of a run would be lost, in every tier, without a line."""
    code, err, root = ended[way]
    assert code == COMMITTED[way], err
    assert "ends without CheckpointManager.close(): it waits up to 60 s for step 3 in durable" in err
    assert "lost" not in err
    with ckptkit.CheckpointManager(root / "durable") as manager:
        assert manager.restore(None)["step"] == 3


def test_save_lost_at_the_end_of_a_process_is_logged(ended: dict[str, tuple[int, str, Path]]) -> None:
    """The person who restarts the job would expect a missing checkpoint."""
    code, err, _ = ended["hanging"]
    assert code == 0, err
    assert "lost at the end of the process: step 3 in durable; not written within close_timeout_s=0.3" in err


def test_closed_manager_is_not_waited_for_at_the_end(ended: dict[str, tuple[int, str, Path]]) -> None:
    """Each well written program would end with a warning."""
    assert ended["closed"][:2] == (0, "")


def test_fork_does_not_wait_for_saves_of_its_parent() -> None:
    """Each worker of a data loader would wait for a minute at its end, or deadlock on a lock that was copied."""
    drain, under_way = ExitDrain(), SavesUnderWay()
    drain._registered = True
    drain.add(under_way, 60)
    under_way.begin(1, frozenset({"ram"}))
    started = time.monotonic()
    drain._limits_s[under_way] = (os.getpid() + 1, 60.0)
    drain.run()
    assert time.monotonic() - started < 5


def test_failed_and_skipped_saves_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end of a job with a tier that is away would take a minute, and name saves as lost that are reported."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    events: list[ckptkit.Event] = []
    manager: Any = manager_of(tmp_path, events.append)
    monkeypatch.setattr(manager._durable, "save", refused)
    for step in range(3):  # of these some come too early
        manager.save(step, args=save_args(step))
    with pytest.raises(ckptkit.SaveFailedError):
        manager.wait_until_finished()
    assert manager._pipeline.under_way.left() == {}
    assert {event.tier for event in events if event.kind == Kind.FAILED} == {"durable"}
    manager.close()  # this thread was told
