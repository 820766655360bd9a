"""Saves that come too early, and saves without memory for them: skipped or waited for, and always reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import Kind
from ckptkit.errors import CoordinationError
from tests.mounts import Mounts, fill

STATE = {"w": np.arange(5000.0), "b": np.ones(7, np.int8)}


class Gate:
    """Holds a background thread at a phase of a step until it is opened."""

    def __init__(self, tier: str, phase: str, step: int):
        self._at = (tier, phase, step)
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, event: ckptkit.Event) -> None:
        if (event.tier, event.fields.get("phase"), event.step) == self._at:
            self.reached.set()
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


class Job:
    """A manager over a ramdisk and a durable tier whose events are kept."""

    def __init__(
        self,
        root: Path,
        *,
        gate: Callable[[ckptkit.Event], None] | None = None,
        ram: Path | None = None,
        **options: Any,
    ):
        self.events: list[ckptkit.Event] = []
        log = ckptkit.EventLog()
        log.observe(self.events.append)
        if gate is not None:
            log.observe(gate)
        tiers = options.pop("tiers", None)
        self.manager = ckptkit.CheckpointManager(
            root / "durable",
            options=ocp.CheckpointManagerOptions(save_interval_steps=options.pop("save_every", 10)),
            tiers=[ckptkit.Tier.ram(str(ram or root / "ram"), slots=4)] if tiers is None else tiers,
            events=log,
            processes=ckptkit.ProcessOptions(timeout_s=options.pop("timeout_s", 30)),
            **options,
        )

    def save(self, step: int, **kwargs: Any) -> bool:
        return self.manager.save(step, args=ocp.args.StandardSave({**STATE, "step": step}), **kwargs)  # pyright: ignore[reportCallIssue]

    def hold_step_1(self, gate: Gate) -> None:
        """Step 0 is saved, and step 1 is in flight until `gate` opens."""
        self.save(0)
        self.manager.wait_until_finished()
        self.save(1)
        assert gate.reached.wait(10)

    def said(self, kind: Kind, *fields: str) -> list[Any]:
        return [
            (event.step, event.tier, *(event.fields.get(name) for name in fields))
            for event in self.events
            if event.kind == kind
        ]

    def steps(self, tier: str) -> list[int]:
        return [record.step for record in self.manager.steps() if tier in record.tiers]


def test_early_save_is_skipped_and_reported(tmp_path: Path) -> None:
    """Snapshots would pile up in host memory, or the step loop would wait for the writer."""
    gate = Gate("ram", "staged", 1)
    job = Job(tmp_path, gate=gate)
    with job.manager:
        job.hold_step_1(gate)
        started = time.monotonic()
        assert job.save(2), "whether a step is taken is never a local matter of timing"
        assert time.monotonic() - started < 5, "the step loop waited"
        gate.open()
        job.manager.wait_until_finished()
        job.save(3)
        job.manager.wait_until_finished()
        assert job.steps("ram")[-2:] == [1, 3]
    too_early = "process 0: too early: snapshots in flight: 1, in_flight_max=1"
    assert job.said(Kind.SKIPPED, "policy", "reason") == [(2, "ram", "skip", too_early)]


def test_forced_repeat_of_an_early_save_is_saved(tmp_path: Path) -> None:
    """The end of a run, saved again to be sure, would be refused for a save that then comes to nothing; of several
    processes some would refuse it, and some take it."""
    gate = Gate("ram", "staged", 1)
    job = Job(tmp_path, gate=gate)
    with job.manager:
        job.hold_step_1(gate)
        assert job.save(2)
        threading.Timer(0.4, gate.open).start()
        assert job.save(2, force=True)
        job.manager.wait_until_finished()
        assert job.said(Kind.SKIPPED, "policy") == [(2, "ram", "skip")]
        assert [job.steps("ram")[-1], job.steps("durable")[-1]] == [2, 2]
        with pytest.raises(ValueError, match="step 2 exists already"):
            job.save(2, force=True)


def test_in_flight_max_allows_more_snapshots(tmp_path: Path) -> None:
    """The setting would have no effect."""
    gate = Gate("ram", "staged", 1)
    job = Job(tmp_path, gate=gate, saving=ckptkit.SaveOptions(in_flight_max=2))
    with job.manager:
        job.save(0)
        job.manager.wait_until_finished()
        for step in (1, 2, 3):
            job.save(step)
        gate.open()
        job.manager.wait_until_finished()
        assert job.manager.latest_step() == 2
    assert [step for step, *_ in job.said(Kind.SKIPPED)] == [3]


def test_early_saves_never_block_the_step_loop(tmp_path: Path) -> None:
    """A writer that hangs in an exchange would stop training once its queue is full."""
    gate = Gate("ram", "staged", 1)
    job = Job(tmp_path, gate=gate, save_every=10**6)
    with job.manager:
        job.save(0)
        job.manager.wait_until_finished()
        for step in range(1, 200):
            assert job.save(step)
        gate.open()
        job.manager.wait_until_finished()
    assert len(job.said(Kind.SKIPPED)) == 198


def test_durable_save_waits_for_the_last_and_reports_the_time(tmp_path: Path) -> None:
    """A step that the durable tier was due would be lost, or a stall would have no cause."""
    gate = Gate("durable", "begun", 10)
    job = Job(tmp_path, gate=gate)
    with job.manager:
        job.save(10)
        assert gate.reached.wait(10)
        threading.Timer(1.0, gate.open).start()
        job.save(20)
        job.manager.wait_until_finished()
        assert job.steps("durable") == [10, 20]
    (first, second) = job.said(Kind.STAGED, "policy", "waited_s")
    assert first[2] is None
    assert second[2] == "wait"
    assert second[3] > 0.2


def test_durable_save_that_times_out_is_dropped_and_reported(tmp_path: Path) -> None:
    """A bucket that hangs would hang training with it."""
    gate = Gate("durable", "begun", 10)
    job = Job(tmp_path, gate=gate, timeout_s=0.3)
    with job.manager:
        job.save(10)
        assert gate.reached.wait(10)
        assert job.save(20)
        job.manager._pipeline.threads.writer.drain()
        assert job.said(Kind.SKIPPED, "policy", "reason") == [
            (20, "ram", "wait", "process 0: earlier saves were not done within 0.3 s")
        ]
        gate.open()
        job.manager.wait_until_finished()


def test_durable_tier_may_skip_instead_of_waiting(tmp_path: Path) -> None:
    """A slow bucket would stop a loop although its owner forbids that."""
    gate = Gate("durable", "begun", 10)
    job = Job(tmp_path, gate=gate, saving=ckptkit.SaveOptions(durable_busy="skip"))
    with job.manager:
        job.save(10)
        assert gate.reached.wait(10)
        job.manager._pipeline.threads.writer.drain()
        job.save(20)
        job.manager._pipeline.threads.writer.drain()
        assert job.steps("ram") == [10, 20]
        assert job.said(Kind.SKIPPED, "policy", "reason") == [
            (20, "durable", "skip", "process 0: still writing an older step")
        ]
        threading.Timer(0.3, gate.open).start()
        assert job.save(21, force=True), "a forced save waits all the same"
        job.manager.wait_until_finished()
        assert job.steps("durable") == [10, 21]


def test_step_skipped_by_every_tier_is_not_listed(tmp_path: Path) -> None:
    """It would be listed as in flight, and never exist."""
    gate = Gate("durable", "begun", 10)
    job = Job(tmp_path, gate=gate, saving=ckptkit.SaveOptions(durable_busy="skip", in_flight_max=2), tiers=[])
    with job.manager:
        job.save(10)
        assert gate.reached.wait(10)
        job.save(20)
        job.manager._pipeline.threads.writer.drain()
        assert job.manager.all_steps() == [10]
        gate.open()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_flight_max": 0}, "in_flight_max=0: at least one snapshot"),
        ({"in_flight_max": 4}, r"slots=4, at least 5 are needed: 1 kept .* and 4 being written \(in_flight_max=4\)"),
        ({"host_bytes_max": 0}, "host_bytes_max=0: give a number of bytes, or None"),
        ({"durable_busy": "block"}, "durable_busy 'block': give one of wait, skip"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    """A typing error would be found in the middle of a run."""
    with pytest.raises(ValueError, match=said):
        Job(tmp_path, saving=ckptkit.SaveOptions(**options))


def test_one_snapshot_in_memory_without_a_ramdisk(tmp_path: Path) -> None:
    """Host memory would hold a snapshot per tier, and the kernel would end the job."""
    job = Job(tmp_path, tiers=[ckptkit.Tier.ssd(str(tmp_path / "ssd"), save=ckptkit.EverySteps(1))])
    with job.manager:
        for step in range(0, 40, 5):
            job.save(step)
            job.manager._pipeline.threads.writer.drain()
        job.manager.wait_until_finished()
        slots = job.manager._pipeline._targets.staging._slots
        assert len(slots) == 1
        slot_bytes = job.manager._pipeline.describe(_items().trees).slot_bytes
        assert slots[0].memory.nbytes == slot_bytes
    assert set(job.steps("durable")) >= {0, 10, 20, 30}


def test_save_beyond_host_bytes_max_fails_the_durable_tier(tmp_path: Path) -> None:
    """The limit would be exceeded, or a run would find out at its end that it has no checkpoint."""
    job = Job(tmp_path, saving=ckptkit.SaveOptions(host_bytes_max=20_000), save_every=10)
    with job.manager:
        with pytest.raises(ckptkit.StoreFullError, match=r"4 slots of .* 19.5 KiB are free under host_bytes_max=20000"):
            job.manager.prepare(ocp.args.StandardSave({**STATE, "step": 0}))  # pyright: ignore[reportCallIssue]
        assert job.save(10)
        with pytest.raises(
            ckptkit.SaveFailedError, match=r"step 10 was not committed to tier durable: .*host_bytes_max"
        ):
            job.manager.wait_until_finished()
        assert job.save(11)
        job.manager.wait_until_finished()
        assert job.manager.all_steps() == []
    assert job.said(Kind.SKIPPED, "policy") == [(10, "ram", "veto"), (11, "ram", "veto")]
    assert len(job.said(Kind.DEGRADED)) >= 2


def test_save_whose_vote_fails_on_process_0_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot would be held for a decision that nobody makes: process 0 makes all of them."""
    job = Job(tmp_path, save_every=10**6)
    coordinator = job.manager._pipeline._coordinator
    with job.manager:
        job.save(0)
        job.manager.wait_until_finished()

        def nobody_comes(*_: Any, **__: Any) -> None:
            raise CoordinationError("commit: process 1 did not join in time")

        with monkeypatch.context() as broken:
            broken.setattr(coordinator, "agree", nobody_comes)
            for step in range(1, 6):  # more than there are slots
                job.save(step)
                with pytest.raises(ckptkit.SaveFailedError, match="process 1 did not join"):
                    job.manager.wait_until_finished()
        arena = job.manager._pipeline._targets.staging
        assert not any(slot.leases for slot in arena._slots)
        assert [save.step for save in arena.held()] == [0]
        job.save(6)
        job.manager.wait_until_finished()
        assert job.steps("ram")[-1] == 6


def test_failed_vote_of_one_tier_does_not_affect_other_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step would be missing there without an event, and `check_for_errors` raise nothing; the other tiers' votes
    would not take place, and the others would wait for this process."""
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram")), ckptkit.Tier.ssd(str(tmp_path / "ssd"))]
    job = Job(tmp_path, save_every=1, tiers=tiers)
    coordinator = job.manager._pipeline._coordinator
    agree = coordinator.agree

    def nobody_comes(channel: str, *rest: Any, **words: Any) -> Any:
        if channel == "disk-commit":
            raise CoordinationError("disk-commit: process 1 did not join in time")
        return agree(channel, *rest, **words)

    with job.manager:
        monkeypatch.setattr(coordinator, "agree", nobody_comes)
        job.save(10)
        with pytest.raises(ckptkit.SaveFailedError, match=r"step 10 was not committed to tier ssd: .* did not join"):
            job.manager.wait_until_finished()
        assert [(step, tier) for step, tier, *_ in job.said(Kind.FAILED)] == [(10, "ssd")]
        assert [job.steps(tier) for tier in ("ram", "ssd", "durable")] == [[10], [], [10]]
        monkeypatch.undo()
        job.save(20)
        job.manager.wait_until_finished()
        assert [job.steps(tier)[-1:] for tier in ("ram", "ssd", "durable")] == [[20], [20], [20]]


def test_dropped_save_releases_its_slot_if_discard_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ramdisk that fails for a moment would lose a slot for good: soon none is left, and no save succeeds."""
    job = Job(tmp_path, save_every=10**6)
    coordinator = job.manager._pipeline._coordinator
    arena = job.manager._pipeline._targets.staging

    def no_room(_: str, ballot: Any, decide: Callable[[list[Any]], Any], **__: Any) -> Any:
        ballot["value"]["refusal"] = ["veto", "no room"]
        return decide([ballot])

    def refused(*_: Any) -> None:
        raise ckptkit.StoreError("Read-only file system")

    with job.manager:
        job.save(0)
        job.manager.wait_until_finished()
        with monkeypatch.context() as broken:
            broken.setattr(coordinator, "agree", no_room)
            broken.setattr(arena, "discard", refused)
            job.save(1)
            job.manager.wait_until_finished()
        assert not any(slot.leases for slot in arena._slots)
        assert [(step, tier) for step, tier, *_ in job.said(Kind.SKIPPED)] == [(1, "ram")]
        assert (1, "ram", "ckptkit.errors.StoreError: Read-only file system") in job.said(Kind.DEGRADED, "reason")


def test_failing_observer_does_not_fail_a_save(tmp_path: Path) -> None:
    """An error of a user's dashboard in a thread of ours would keep every step from the durable tier."""

    def away(event: ckptkit.Event) -> None:
        if event.kind == Kind.COMMITTED:
            raise ConnectionError("the dashboard is away")

    job = Job(tmp_path, save_every=1, gate=away)
    with job.manager:
        job.save(1)
        job.manager.wait_until_finished()
        assert [job.steps("ram"), job.steps("durable")] == [[1], [1]]


def test_full_ramdisk_degrades_the_tier_not_the_job(
    tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    """Another job's file in /dev/shm would end the training."""
    small_tmpfs = mounts.small(tmp_path / "shm", "1m")
    job = Job(tmp_path, ram=small_tmpfs, save_every=10**6)
    with job.manager:
        job.manager.prepare(ocp.args.StandardSave({**STATE, "step": 0}))  # pyright: ignore[reportCallIssue]
        job.save(0)
        job.manager.wait_until_finished()
        fill(small_tmpfs / "filler")
        for step in (1, 2):
            job.save(step)
            job.manager.wait_until_finished()  # raises nothing: the tier is degraded, the job goes on
        assert job.manager.latest_step() == 0
        (small_tmpfs / "filler").unlink()
        job.save(3)
        job.manager.wait_until_finished()
        assert job.manager.latest_step() == 3
    assert [(step, tier) for step, tier, *_ in job.said(Kind.DEGRADED)] == [(1, "ram"), (2, "ram")]
    assert job.said(Kind.SKIPPED, "policy") == [(1, "ram", "veto"), (2, "ram", "veto")]
    assert "tier ram is degraded" in caplog.text


def _items() -> Any:
    from ckptkit.snapshot.items import save_items

    items = save_items(
        {"default": ocp.args.StandardSave({**STATE, "step": 0})},  # pyright: ignore[reportCallIssue]
    )
    assert not isinstance(items, str)
    return items
