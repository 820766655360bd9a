"""The saves that a fast tier takes and keeps, with real managers: each policy set and unset, and over restarts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.lifecycle.epochs import Ancestry
from ckptkit.manager import build
from ckptkit.model.manifest import SaveId
from ckptkit.save.book.ledger import Ledger
from ckptkit.save.book.retention import Retention
from ckptkit.store import LocalStore
from ckptkit.util import clock
from ckptkit.util.words import size_text

args: Any = ocp.args
SLOT_BYTES = 4096  # of the state here: one page


class Job:
    """A job over one root whose fast tiers are declared anew for each run."""

    def __init__(self, root: Path):
        self.root = root

    def manager(self, *, ram: Any = None, ssd: Any = None, every: int = 1000, **more: Any) -> Any:
        tiers = [
            *([ckptkit.Tier.ram(str(self.root / "ram"), **ram)] if ram is not None else []),
            *([ckptkit.Tier.ssd(str(self.root / "ssd"), **ssd)] if ssd is not None else []),
        ]
        options = ocp.CheckpointManagerOptions(save_interval_steps=every)
        return ckptkit.CheckpointManager(
            self.root / "run",
            options=options,
            tiers=tiers,
            host_id="h",
            processes=ckptkit.ProcessOptions(timeout_s=60),
            **more,
        )

    def run(self, steps: Any, **tiers: Any) -> dict[str, list[int]]:
        """Saves steps one by one, then returns the content of each tier."""
        with self.manager(**tiers) as manager:
            save(manager, steps)
            return held(manager)

    def slot_files(self, tier: str) -> int:
        return len(list((self.root / tier).rglob("slot-*.bin")))


def save(manager: Any, steps: Any) -> None:
    for step in steps:
        assert manager.save(step, args=args.StandardSave({"w": np.arange(3) + step}))
        manager.wait_until_finished()


def held(manager: Any) -> dict[str, list[int]]:
    tiers: dict[str, list[int]] = {"ram": [], "ssd": [], "durable": []}
    for record in manager.steps():
        for tier in record.tiers:
            tiers[tier].append(record.step)
    return tiers


def same(manager: Any, step: int) -> bool:
    return manager.restore(step, args=args.StandardRestore())["w"].tolist() == [step, step + 1, step + 2]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock forward by some seconds."""
    passed = [0.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: time.monotonic() + passed[0])

    def move(seconds: float) -> None:
        passed[0] += seconds

    return move


def test_save_by_seconds_saves_after_the_interval(job: Job, later: Callable[[float], None]) -> None:
    """A tier that is to be filled every ten minutes would be filled at every step, or never."""
    with job.manager(ram={"save": ckptkit.EverySeconds(600)}) as manager:
        save(manager, [0])
        assert not manager.should_save(1)
        assert not manager.save(1, args=args.StandardSave({"w": np.arange(3)}))
        later(599)
        assert not manager.should_save(2)
        later(2)
        assert manager.should_save(2)
        save(manager, [2])
        assert not manager.should_save(3)
        assert held(manager)["ram"] == [0, 2]
    with job.manager(ram={}) as manager:
        assert manager.should_save(3), "unset: every step"


def test_save_by_seconds_resumes_from_a_restore(job: Job, later: Callable[[float], None]) -> None:
    """A job that is restarted again and again would save right after each restart."""
    job.run([0], ram={"save": ckptkit.EverySeconds(600)})
    with job.manager(ram={"save": ckptkit.EverySeconds(600)}) as manager:
        assert same(manager, 0)
        assert not manager.should_save(1)
        later(601)
        save(manager, [1])
    with job.manager(ram={"save": ckptkit.EverySeconds(600)}) as manager:
        assert manager.should_save(2), "nothing was restored: the first step is taken"


def test_each_tier_has_its_own_clock(job: Job, later: Callable[[float], None]) -> None:
    """One tier's save would delay the other's without an end."""
    seconds: Any = {"ram": {"save": ckptkit.EverySeconds(10)}, "ssd": {"save": ckptkit.EverySeconds(25)}}
    with job.manager(**seconds) as manager:
        for step in range(1, 7):
            save(manager, [step])
            later(11)
        taken = [record.step for record in manager.steps() if "ssd" in record.tiers]
        assert taken == [1, 4]


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_keep_by_count_is_exact_across_a_restart(job: Job, tier: str) -> None:
    """A job that wants its last four steps at hand would find as many as the slots happened to hold."""

    def tiers(keep: Any) -> Any:
        return {tier: {"save": ckptkit.EverySteps(1), "keep": keep}}

    assert job.run(range(1, 9), **tiers(ckptkit.KeepNewest(4)))[tier] == [5, 6, 7, 8]
    with job.manager(**tiers(ckptkit.KeepNewest(4))) as manager:
        assert held(manager)[tier] == [5, 6, 7, 8]
        save(manager, [9])
        assert held(manager)[tier] == [6, 7, 8, 9]
        assert all(same(manager, step) for step in (6, 7, 8, 9))
    assert job.run([10], **tiers(ckptkit.KeepNewest(1)))[tier] == [10], "fewer: the rest goes"
    found = job.run(range(11, 20), **tiers(None))[tier]
    assert found == ([17, 18, 19] if tier == "ram" else [18, 19]), "unset: as many as the slots hold"


def test_lower_keep_count_after_a_restart_keeps_the_newest(job: Job) -> None:
    """A restart with a smaller ramdisk would drop steps that it is to keep: their slots are beyond its count."""
    job.run(range(1, 9), ram={"keep": ckptkit.KeepNewest(6)})
    assert job.slot_files("ram") == 8
    with job.manager(ram={"keep": ckptkit.KeepNewest(2)}) as manager:
        assert held(manager)["ram"][-2:] == [7, 8]
        assert same(manager, 7)
        assert same(manager, 8)
        save(manager, range(9, 15))
        assert held(manager)["ram"] == [13, 14]
    assert job.slot_files("ram") == 4, "two kept, one being written, one being read"


def test_keep_by_bytes_sets_the_slot_count(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """A limit in bytes would be exceeded, or only the newest step."""
    caplog.set_level(logging.INFO, logger="ckptkit")
    keep = ckptkit.KeepBytes(3 * SLOT_BYTES + 1)
    assert job.run(range(1, 9), ram={"keep": keep})["ram"] == [6, 7, 8]
    assert job.slot_files("ram") == 5
    lines = [line for line in caplog.text.splitlines() if "slots of" in line]
    assert [line.partition("slots of ")[2] for line in lines] == [f"{size_text(SLOT_BYTES)} in this process: 5 in ram"]
    with job.manager(ram={"keep": keep}) as manager:
        assert same(manager, 6), "nothing is released before the state's size is known"
        assert same(manager, 8)
        save(manager, [9])
        assert held(manager)["ram"] == [7, 8, 9]
    assert job.run([10], ram={"keep": ckptkit.KeepBytes(1)})["ram"] == [10], "the newest is always kept"
    assert job.run([11, 12, 13, 14], ram={})["ram"] == [12, 13, 14], "unset: what the slots hold"


def test_slots_from_keep_by_bytes_must_fit_the_ramdisk(job: Job) -> None:
    """A job would find out at its tenth save that the ramdisk is too small for what it is to keep."""
    with (
        job.manager(
            ram={"keep": ckptkit.KeepBytes(50 * SLOT_BYTES)}, saving=ckptkit.SaveOptions(host_bytes_max=20 * SLOT_BYTES)
        ) as manager,
        pytest.raises(ckptkit.StoreFullError, match=r"52 slots of .*, .* are free under host_bytes_max"),
    ):
        manager.prepare(args.StandardSave({"w": np.arange(3)}))


def test_keep_until_flushed_keeps_steps_the_slower_tier_lacks(job: Job) -> None:
    """A step that the durable tier does not have yet would be overwritten in the ramdisk while there is room for it."""
    unflushed = {"keep": ckptkit.KeepUnflushed(3)}
    found = job.run(range(1, 10), ram=unflushed, every=4)
    assert found == {"ram": [5, 6, 7, 9], "ssd": [], "durable": [1, 4, 8]}, "three and the newest"
    with job.manager(ram=unflushed, every=4) as manager:
        assert same(manager, 7)
    with job.manager(ram=unflushed, every=4) as manager:
        assert same(manager, 9)
        save(manager, [10])
        assert held(manager)["ram"] == [6, 7, 9, 10], "the oldest is pushed out"
    # Which older one is left of fewer slots depends on where each stood.
    with job.manager(ram={}, every=4) as manager:
        for step in (11, 12):
            save(manager, [step])
            manager._pipeline.slots._worker.drain()  # a slot that is made ready just then is not the next to be written
        third, *newest = held(manager)["ram"]
    assert newest == [11, 12], "unset: the newest ones, flushed or not"
    assert third in (7, 9, 10)


def test_slower_tier_of_the_ramdisk_is_the_disk(job: Job) -> None:
    """Steps would be kept in memory for the bucket although the disk has them."""
    every_second = {"save": ckptkit.EverySteps(2), "keep": ckptkit.KeepUnflushed(2)}
    found = job.run(range(1, 9), ram={"keep": ckptkit.KeepUnflushed(3)}, ssd=every_second)
    assert found == {"ram": [3, 5, 7, 8], "ssd": [4, 6, 8], "durable": [1]}


def test_step_that_failed_durably_is_kept_in_the_fast_tier(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only copy of a step whose upload failed would be overwritten two saves later."""
    from ckptkit.durable.steps import DurableSteps

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for keep, expected in ((ckptkit.KeepUnflushed(6), [2, 3, 4, 5, 6]), (None, [4, 5, 6])):
        fresh = Job(job.root / str(keep is None))
        with fresh.manager(ram={"keep": keep}, every=2) as manager:
            save(manager, [1])
            with monkeypatch.context() as broken:
                broken.setattr(DurableSteps, "save", refused)
                for step in range(2, 7):
                    manager.save(step, args=args.StandardSave({"w": np.arange(3) + step}))
                    with pytest.raises(ckptkit.SaveFailedError) if step % 2 == 0 else nullcontext():
                        manager.wait_until_finished()
            assert held(manager)["ram"] == expected


def test_failed_disk_deletion_does_not_affect_other_tiers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that an SSD's error has made read-only would end the durable saves too, without a message."""
    delete = LocalStore.delete

    def refused(self: LocalStore, key: str) -> None:
        if self.url.startswith(str(job.root / "ssd")):
            raise ckptkit.StoreError(f"{self.url}/{key}: Input/output error")
        delete(self, key)

    log, events = ckptkit.EventLog(), list[ckptkit.Event]()
    log.observe(events.append)
    ssd = {"save": ckptkit.EverySteps(1), "keep": ckptkit.KeepNewest(1)}
    with job.manager(ram={}, ssd=ssd, every=1, events=log) as manager:
        save(manager, [1])
        with monkeypatch.context() as broken:
            broken.setattr(LocalStore, "delete", refused)
            for step in (2, 3, 4):
                assert manager.save(step, args=args.StandardSave({"w": np.arange(3) + step}))
                with nullcontext() if step == 2 else pytest.raises(ckptkit.SaveFailedError, match="tier ssd"):
                    manager.wait_until_finished()
        assert held(manager)["durable"] == [1, 2, 3, 4]
        assert held(manager)["ram"][-1] == 4
        said = [event.step for event in events if (event.kind, event.tier) == (ckptkit.Kind.DEGRADED, "ssd")]
        assert said[0] == 2
        save(manager, [5])
        assert held(manager)["ssd"] == [5]


def test_read_only_manager_does_not_change_the_tiers(job: Job) -> None:
    """An evaluator would delete the steps that it has no slots for, and a job that starts meanwhile find its slots
    taken: it would need as much memory again."""
    assert job.run(range(1, 5), ram={"slots": 4})["ram"] == [1, 2, 3, 4]
    options = ocp.CheckpointManagerOptions(read_only=True)
    ram = ckptkit.Tier.ram(str(job.root / "ram"), slots=2)
    with ckptkit.CheckpointManager(job.root / "run", options=options, tiers=[ram], host_id="h") as reader:
        assert held(reader)["ram"] == [1, 2, 3, 4]
        with job.manager(ram={"slots": 4}) as manager:
            assert held(manager)["ram"] == [1, 2, 3, 4]
            save(manager, [5])
        assert [same(reader, step) for step in (2, 4)] == [True, True]
        reader.reload()
        assert reader.latest_step() == 5
        assert same(reader, 5)
    assert job.slot_files("ram") == 4


def test_failed_constructor_releases_its_slots(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that tries again until the bucket answers would add slots with each try, and soon have no room."""
    job.run([1], ram={})

    def away(*_: Any, **__: Any) -> None:
        raise ckptkit.StoreError("the bucket is away")

    with monkeypatch.context() as broken:
        broken.setattr(build, "take_stock", away)
        with pytest.raises(ckptkit.StoreError, match="the bucket is away"):
            job.manager(ram={})
    with pytest.raises(ValueError, match="staging 'copy'"):
        job.manager(ram={}, saving=ckptkit.SaveOptions(staging="copy"))  # pyright: ignore[reportArgumentType]
    assert job.run([2], ram={})["ram"] == [1, 2]
    assert [path.name for path in (job.root / "ram").glob("*/h/*")] == ["0"]


def test_closed_manager_refuses_saves(job: Job) -> None:
    """Its slots are another run's by then: a late save would overwrite what that one counts on."""
    closed = job.manager(ram={"slots": 2})
    save(closed, [1, 2])
    closed.close()
    with job.manager(ram={"slots": 2}) as manager:
        with pytest.raises(ckptkit.CheckpointError, match="the manager was closed and saves nothing any more"):
            closed.save(3, args=args.StandardSave({"w": np.arange(3)}))
        manager.reload()
        assert held(manager)["ram"] == [1, 2]


def test_steps_of_an_abandoned_branch_do_not_count_as_kept(job: Job) -> None:
    """After a rollback the abandoned steps, which nobody can restore, would push the good ones out of the tier."""
    with job.manager(ram={"keep": ckptkit.KeepNewest(3)}) as manager:
        save(manager, range(1, 6))
        assert same(manager, 3)
        save(manager, [4])
        assert held(manager)["ram"] == [3, 4]
        assert same(manager, 3)
        assert same(manager, 4)


class Slots:
    """The saves in the slots of one host."""

    def __init__(self, *held: SaveId):
        self.saves = set(held)
        self.protected: frozenset[SaveId] = frozenset()

    def held(self) -> list[SaveId]:
        return sorted(self.saves)

    def protect(self, *save_ids: SaveId, why: str = "") -> None:
        del why
        self.protected = frozenset(save_ids)

    def forget(self, save_ids: frozenset[SaveId]) -> None:
        self.saves -= save_ids


def test_hosts_with_other_slots_list_the_same_steps() -> None:
    """Two processes would list other steps after one host was away for a run: a loop over them would hang."""
    ssd = ckptkit.Tier.ssd("/ssd", keep=ckptkit.KeepNewest(2))
    first, second, third, fourth = (SaveId(1, number, number) for number in range(1, 5))
    listed, kept = [], []
    for arena in (Slots(second, third), Slots(first, second)):  # the other one missed `third`
        ledger = Ledger(Ancestry())
        for save in (first, second, third):
            ledger.commit(save, "ssd")
        slots: Any = arena
        retention = Retention([ssd], {"ssd": slots}, ledger, 1)
        retention.opened()
        assert arena.protected == frozenset(arena.saves), "the newest two that it has"
        ledger.commit(fourth, "ssd")
        arena.saves.add(fourth)
        assert retention.committed(fourth, "ssd") == []
        listed.append(ledger.steps())
        kept.append(arena.held())
    assert listed == [[3, 4], [3, 4]]
    assert kept == [[third, fourth], [second, fourth]]
