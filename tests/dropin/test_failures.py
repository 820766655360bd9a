"""After a failed save the manager tells the truth, and training goes on: where stock Orbax forgets and is silent."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.path import deleter

import ckptkit
from ckptkit.durable.commit import DiskAttempt
from ckptkit.snapshot.staging import Stager

args: Any = ocp.args


class Break:
    """The failures of a step's commit, by step; `count` times, then no more."""

    errors: dict[int, list[BaseException]] = {}  # noqa: RUF012  set by each test


class BreakingPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Orbax's own way to commit, which runs into what the test put in its way."""

    async def finalize(self) -> None:
        """Renames the finished directory."""
        name = self.get_final().name
        if name.isdigit() and Break.errors.get(int(name)):
            raise Break.errors[int(name)].pop()
        await super().finalize()


@pytest.fixture(autouse=True)
def breaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of a step runs into what the test put in its way."""
    Break.errors = {}
    commit = DiskAttempt.commit

    def broken(self: DiskAttempt) -> None:
        name = self._where.rpartition("/")[2]
        if name.isdigit() and Break.errors.get(int(name)):
            raise Break.errors[int(name)].pop()
        commit(self)

    monkeypatch.setattr(DiskAttempt, "commit", broken)


def state(step: int) -> Any:
    return args.StandardSave({"w": np.arange(3) + step})


def manager_of(tmp_path: Path, events: list[ckptkit.Event], tiers: bool = False, **more: Any) -> Any:
    log = ckptkit.EventLog()
    log.observe(events.append)
    return ckptkit.CheckpointManager(
        tmp_path / "durable",
        options=ocp.CheckpointManagerOptions(
            temporary_path_class=more.pop("path", None), max_to_keep=more.pop("keep", None)
        ),
        tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))] if tiers else [],
        host_id="host",
        events=log,
        **more,
    )


def full() -> OSError:
    return OSError(28, "No space left on device")


def test_failed_save_keeps_older_steps_and_raises_once(tmp_path: Path) -> None:
    """Stock Orbax forgets step 0, reports step 1 as existing, and `check_for_errors` raises nothing."""
    events: list[ckptkit.Event] = []
    Break.errors = {1: [full()]}
    with manager_of(tmp_path, events, keep=1) as manager:
        assert manager.save(0, args=state(0))
        manager.wait_until_finished()
        assert manager.save(1, args=state(1))
        while manager.is_saving_in_progress():
            time.sleep(0.01)
        assert manager.latest_step() == 0
        assert list(manager.all_steps()) == [0]
        assert manager.best_step() == 0
        assert [(record.step, record.state) for record in manager.steps()] == [(0, "committed"), (1, "failed")]
        with pytest.raises(ckptkit.SaveFailedError, match=r"step 1 was not committed to tier durable: OSError"):
            manager.check_for_errors()
        manager.check_for_errors()
        assert manager.save(2, args=state(2))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [2]
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(3) + 2)


@pytest.mark.parametrize("end", ["wait_until_finished", "close"])
def test_failure_is_raised_by_the_first_waiting_call(tmp_path: Path, end: str) -> None:
    """A job would end well whose last checkpoint is missing."""
    Break.errors = {0: [full()]}
    manager = manager_of(tmp_path, [])
    assert manager.save(0, args=state(0))
    with pytest.raises(ckptkit.SaveFailedError) as raised:
        getattr(manager, end)()
    assert isinstance(raised.value.__cause__, OSError)
    manager.close()


def test_fast_tier_keeps_a_step_that_the_durable_tier_lost(tmp_path: Path) -> None:
    """The newest step would be called lost while the ramdisk has it."""
    Break.errors = {1: [full()]}
    with manager_of(tmp_path, [], tiers=True) as manager:
        for step in range(2):
            assert manager.save(step, args=state(step))
        with pytest.raises(ckptkit.SaveFailedError, match="tier durable"):
            manager.wait_until_finished()
        (_, newest) = manager.steps()
        assert (newest.step, newest.state, newest.tiers) == (1, "committed", ("ram",))
        assert newest.held_bytes == 24
        assert abs(newest.verified_s - time.time()) < 60
        np.testing.assert_array_equal(manager.restore(None)["w"], np.arange(3) + 1)


def test_transient_failure_is_retried(tmp_path: Path) -> None:
    """One throttled request would cost a checkpoint."""
    events: list[ckptkit.Event] = []
    Break.errors = {0: [ConnectionResetError("reset"), ConnectionResetError("reset")]}
    policy = ckptkit.FailurePolicy(retries=2, retry_delay_s=0.01)
    with manager_of(tmp_path, events, saving=ckptkit.SaveOptions(on_failure=policy)) as manager:
        assert manager.save(0, args=state(0))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [0]
    delays = [event.fields["delay_s"] for event in events if event.kind == ckptkit.Kind.RETRIED]
    assert len(delays) == 2
    assert 0.005 <= delays[0] <= 0.01 <= delays[1] <= 0.02
    with ocp.CheckpointManager(tmp_path / "durable") as stock:
        np.testing.assert_array_equal(stock.restore(0)["w"], np.arange(3))


def test_permanent_failure_is_not_retried(tmp_path: Path) -> None:
    """A full bucket would hold the next save up for nothing."""
    events: list[ckptkit.Event] = []
    Break.errors = {0: [full(), full()]}
    with manager_of(tmp_path, events) as manager:
        assert manager.save(0, args=state(0))
        with pytest.raises(ckptkit.SaveFailedError):
            manager.wait_until_finished()
    kinds = [event.kind for event in events if event.tier == "durable"]
    assert ckptkit.Kind.RETRIED not in kinds
    assert kinds.count(ckptkit.Kind.DEGRADED) == 1


def test_durable_tier_failing_too_long_raises_at_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job would train for days with nothing but its ramdisk."""
    Break.errors = {step: [full()] for step in range(3)}
    policy = ckptkit.FailurePolicy(max_age_s={"durable": 600})
    manager = manager_of(tmp_path, [], tiers=True, saving=ckptkit.SaveOptions(on_failure=policy))
    assert manager.save(0, args=state(0))
    manager._pipeline.threads.wait()
    assert manager.save(1, args=state(1))  # not for long enough yet
    manager._pipeline.threads.wait()
    monkeypatch.setattr("ckptkit.util.clock.monotonic_s", lambda: time.monotonic() + 700)
    assert manager.save(2, args=state(2))  # its loss shows how long it has been
    manager._pipeline.threads.wait()
    with pytest.raises(ckptkit.SaveFailedError, match=r"step 3 is not saved: durable has committed no save for 70\d s"):
        manager.save(3, args=state(3))
    with suppress(ckptkit.SaveFailedError):
        manager.close()


def test_successful_durable_save_resets_the_failure_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures a day apart would stop the job."""
    Break.errors = {0: [full()]}
    with manager_of(
        tmp_path, [], saving=ckptkit.SaveOptions(on_failure=ckptkit.FailurePolicy(max_age_s={"durable": 600}))
    ) as manager:
        manager.save(0, args=state(0))
        with pytest.raises(ckptkit.SaveFailedError):
            manager.wait_until_finished()
        assert manager.save(1, args=state(1))
        manager.wait_until_finished()
        monkeypatch.setattr("ckptkit.util.clock.monotonic_s", lambda: time.monotonic() + 700)
        assert manager.save(2, args=state(2))


def test_skipped_save_reports_its_reason(tmp_path: Path) -> None:
    """A run that goes back would save nothing, without a message."""
    events: list[ckptkit.Event] = []
    with manager_of(tmp_path, events) as manager:
        assert manager.save(5, args=state(5))
        assert not manager.save(5, args=state(5))
        assert not manager.save(3, args=state(3))
    reasons = [(event.step, event.fields["reason"]) for event in events if event.kind == ckptkit.Kind.SKIPPED]
    why = "step 5 is saved already, and a save at or below it needs force=True"
    assert reasons == [(5, why), (3, why)]


def test_failure_of_a_save_by_orbax_is_reported(tmp_path: Path) -> None:
    """A step that only Orbax writes (text under a name with a slash) would be missing without a message."""
    Break.errors = {1: [full()]}
    with manager_of(tmp_path, [], path=BreakingPath) as manager:
        for step in range(3):
            assert manager.save(step, args=args.PyTreeSave({"a/b": "text", "w": np.arange(3) + step}))
            if step == 1:
                with pytest.raises(ckptkit.SaveFailedError, match="step 1 was not committed to tier durable"):
                    manager.wait_until_finished()
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [0, 2]
        assert manager.restore(2)["a/b"] == "text"


def test_steps_that_orbax_writes_are_deleted_by_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax would delete the bytes of a step before its name, also of one that is leased."""

    def refused(*_: Any) -> None:
        raise AssertionError("Orbax deletes")

    monkeypatch.setattr(deleter.StandardCheckpointDeleter, "delete", refused)
    with manager_of(tmp_path, [], tiers=True, path=BreakingPath, keep=1) as manager:
        for step in range(3):
            assert manager.save(step, args=state(step))
            manager.wait_until_finished()
            assert manager._durable.steps() == [step]
            assert list(manager._durable.stock.known()) == [step]
        assert manager._durable.save_id(2) is not None
        assert "ram" in next(record.tiers for record in manager.steps() if record.step == 2)
    with ocp.CheckpointManager(tmp_path / "durable") as stock:
        np.testing.assert_array_equal(stock.restore(2)["w"], np.arange(3) + 2)


def test_step_that_orbax_commits_before_it_is_staged_is_in_both_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record would begin anew when the copy is made, and the step in the root would not be listed."""
    events: list[ckptkit.Event] = []
    begin = Stager.begin

    def late(self: Stager, *words: Any) -> Any:
        end_s = time.monotonic() + 30
        while not any(each.kind == ckptkit.Kind.COMMITTED for each in events) and time.monotonic() < end_s:
            time.sleep(0.01)
        return begin(self, *words)

    monkeypatch.setattr(Stager, "begin", late)
    with manager_of(tmp_path, events, tiers=True, path=BreakingPath) as manager:
        assert manager.save(0, args=state(0))
        manager.wait_until_finished()
        assert [record.tiers for record in manager.steps()] == [("durable", "ram")]


@pytest.mark.parametrize(("path", "error"), [(None, ckptkit.SaveFailedError), (BreakingPath, OSError)])
def test_a_synchronous_save_raises_what_failed(path: Any, error: type[Exception], tmp_path: Path) -> None:
    """With `enable_async_checkpointing=False` a script counts on the step when `save` returns. A step that Orbax writes
    raises Orbax's own error."""
    Break.errors = {0: [full()]}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, temporary_path_class=path)
    with ckptkit.CheckpointManager(tmp_path, options=options) as manager:
        with pytest.raises(error):
            manager.save(0, args=state(0))
        assert manager.save(1, args=state(1))
        assert manager.all_steps() == [1]


@pytest.mark.parametrize("tiers", [False, True])
def test_busy_durable_tier_does_not_block_age_check_or_our_step(tmp_path: Path, tiers: bool) -> None:
    """With `durable_busy="skip"` the loop would stop until a stuck bucket answers. Orbax's own steps would be lost,
    since they cannot be voted on in the background."""
    events: list[ckptkit.Event] = []
    log = ckptkit.EventLog()
    log.observe(events.append)
    go = threading.Event()

    def hold(event: ckptkit.Event) -> None:
        if event.kind == ckptkit.Kind.PHASE and event.tier == "durable" and event.step == 0:
            assert go.wait(30)

    log.observe(hold)
    with ckptkit.CheckpointManager(
        tmp_path / "durable",
        tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))] if tiers else [],
        events=log,
        saving=ckptkit.SaveOptions(
            durable_busy="skip", in_flight_max=1, on_failure=ckptkit.FailurePolicy(max_age_s=60.0)
        ),
    ) as manager:
        assert manager.save(0, args=args.PyTreeSave({"w": np.arange(3)}))
        manager._pipeline.threads.writer.drain()
        assert manager.save(1, args=args.PyTreeSave({"w": np.arange(3)})), (
            "decided before anybody knows that it comes too early"
        )
        manager._pipeline.threads.writer.drain()
        assert not go.is_set()
        threading.Timer(0.1, go.set).start()
        assert manager.save(2, args=args.PyTreeSave({"a/b": "text", "w": np.arange(3)}))
        manager.wait_until_finished()
        assert manager.all_steps() == ([0, 1, 2] if tiers else [0, 2])
        assert [record.state for record in manager.steps()] == ["committed"] * (3 if tiers else 2)
        assert manager.restore(2)["a/b"] == "text"
    skipped = [(event.step, event.fields["policy"]) for event in events if event.kind == ckptkit.Kind.SKIPPED]
    assert skipped == [(1, "skip")]
