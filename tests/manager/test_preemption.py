"""The last save before a preemption, on one process: which tiers, how long, and what of it is there afterwards."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.durable.steps import DurableSteps


@pytest.fixture
def events() -> list[ckptkit.Event]:
    return []


@pytest.fixture
def manager(tmp_path: Path, events: list[ckptkit.Event]) -> Iterator[ckptkit.CheckpointManager]:
    log = ckptkit.EventLog()
    log.observe(events.append)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram")), ckptkit.Tier.ssd(str(tmp_path / "ssd"))]
    made = ckptkit.CheckpointManager(tmp_path / "durable", tiers=tiers, events=log)
    yield made
    made.close()


def args_of(step: int) -> Any:
    return ocp.args.StandardSave({"w": jnp.full((300, 77), step, jnp.float32)})  # pyright: ignore[reportCallIssue]


def test_long_grace_saves_the_last_step_to_every_tier(
    manager: ckptkit.CheckpointManager, events: list[ckptkit.Event]
) -> None:
    """Breaks when a preempted job goes with its state in memory alone, or reports that for a durable step."""
    last = manager.save_last(7, args_of(7), grace_s=600.0)
    assert last.saved
    assert (last.tiers, last.unfinished, last.left_out) == (("ram", "ssd", "durable"), (), {})
    assert manager.steps()[-1].tiers == ("durable", "ram", "ssd")
    (said,) = [event for event in events if event.kind == ckptkit.Kind.PREEMPTED]
    assert (said.step, said.fields["tiers"], said.fields["grace_s"]) == (7, ("ram", "ssd", "durable"), 600.0)


def test_slow_bucket_does_not_delay_the_faster_tiers(
    manager: ckptkit.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when a job that is about to be killed waits for an upload that cannot be done."""
    go_on = threading.Event()
    save = DurableSteps.save

    def slowly(self: DurableSteps, *args: Any, **words: Any) -> Any:
        assert go_on.wait(60)
        return save(self, *args, **words)

    monkeypatch.setattr(DurableSteps, "save", slowly)
    try:
        assert manager.save(1, args=args_of(1), force=True)  # still in flight to the bucket
        last = manager.save_last(2, args_of(2), grace_s=5.0)
        assert (last.tiers, last.unfinished) == (("ram", "ssd"), ("durable",))
    finally:
        go_on.set()
    manager.wait_until_finished()
    assert manager.steps()[-1].tiers == ("durable", "ram", "ssd"), (
        "nothing of it is lost where there was time after all"
    )


def test_tier_too_slow_for_the_grace_is_skipped(manager: ckptkit.CheckpointManager) -> None:
    """Breaks when the rates of earlier saves are not asked."""
    assert manager.save(1, args=args_of(1), force=True)
    manager.wait_until_finished()
    last = manager.save_last(2, args_of(2), grace_s=1e-6)  # gone before it began
    assert last.tiers == ("ram",)
    assert set(last.left_out) == {"ssd", "durable"}
    manager.wait_until_finished()
    assert manager.steps()[-1].tiers == ("ram",)


def test_existing_step_is_only_waited_for(manager: ckptkit.CheckpointManager) -> None:
    """Breaks when a preemption at a step that was just saved ends in an error instead of an exit."""
    assert manager.save(3, args=args_of(3), force=True)
    assert manager.save_last(3, args_of(3), grace_s=600.0).tiers == ("ram", "ssd", "durable")


def test_step_skipped_as_too_early_is_saved_at_preemption(tmp_path: Path) -> None:
    """Breaks when the last step counts as saved because a save of it is in flight, and is then dropped."""
    go_on, held = threading.Event(), threading.Event()

    def hold(event: ckptkit.Event) -> None:
        if event.step == 1 and event.fields.get("phase") == "staged":
            held.set()
            assert go_on.wait(60)

    log = ckptkit.EventLog()
    log.observe(hold)
    options = ocp.CheckpointManagerOptions(save_interval_steps=1000)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))]
    with ckptkit.CheckpointManager(tmp_path / "durable", options=options, tiers=tiers, events=log) as manager:
        assert manager.save(0, args=args_of(0))
        manager.wait_until_finished()
        assert manager.save(1, args=args_of(1))
        assert held.wait(60)
        assert manager.save(2, args=args_of(2)), "decided before anybody knows that it comes too early"
        threading.Timer(0.3, go_on.set).start()
        last = manager.save_last(2, args_of(2), grace_s=600.0)
    assert (last.tiers, last.unfinished, dict(last.left_out)) == (("ram", "durable"), (), {})


def test_step_number_of_an_abandoned_branch_is_saved_again(manager: ckptkit.CheckpointManager) -> None:
    """Breaks when a run that went back is preempted at a step that it had saved before: nothing of it is saved, and the
    restart continues the abandoned branch."""
    for step in (1, 2, 3):
        assert manager.save(step, args=args_of(step), force=True)
    manager.wait_until_finished()
    manager.restore(1)
    last = manager.save_last(2, args_of(22), grace_s=600.0)
    assert (last.tiers, last.unfinished, dict(last.left_out)) == (("ram", "ssd", "durable"), (), {})
    assert manager.latest_step() == 2
    assert float(manager.restore(None)["w"][0, 0]) == 22.0


@pytest.mark.parametrize(("every", "had"), [(1, ("durable", "ram")), (1000, ("ram",))])
def test_existing_step_is_saved_to_the_tiers_that_lack_it(
    tmp_path: Path, every: int, had: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks when `save(step); if reached_preemption(step): save_last(...)` ends with the step in memory alone."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=every)
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram")), ckptkit.Tier.ssd(str(tmp_path / "ssd"))]
    make = functools.partial(ckptkit.CheckpointManager, tmp_path / "durable", options=options, tiers=tiers)
    with make() as manager:
        assert manager.save(1, args=args_of(1), force=True)
        manager.wait_until_finished()
        assert manager.save(3, args=args_of(3))
        manager.wait_until_finished()
        assert manager.steps()[-1].tiers == had
        last = manager.save_last(3, args_of(3), grace_s=600.0, metrics={"loss": 1.5}, custom_metadata={"why": "signal"})
        assert (last.tiers, last.unfinished, dict(last.left_out)) == (("ram", "ssd", "durable"), (), {})
        assert manager.all_steps() == [1, 3]
        if every > 3:
            assert manager.metadata(3).custom_metadata == {"why": "signal"}
    for tier in ("ram", "ssd", "durable"):
        with make() as manager:
            assert manager.all_steps() == [1, 3]
            assert float(manager.restore(None)["w"][0, 0]) == 3.0
        if tier != "durable":
            shutil.rmtree(tmp_path / tier)
    assert not [each for each in caplog.records if "committed" in each.getMessage()], "no save has failed"


def test_newest_step_is_not_pruned_for_worse_metrics(tmp_path: Path) -> None:
    """Breaks when the step of a preemption is deleted as soon as it is committed, and the restart loses the work."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"], best_mode="min", max_to_keep=1)
    with ckptkit.CheckpointManager(tmp_path, options=options) as manager:
        assert manager.save(1, args=args_of(1), metrics={"loss": 1.0}, force=True)
        last = manager.save_last(3, args_of(3), grace_s=600.0, metrics={"loss": 9.0})
        assert last.tiers == ("durable",)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
        assert manager.save_last(4, args_of(4), grace_s=600.0).tiers == ("durable",), "without metrics, too"
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.best_step()) == ([1, 4], 1)
    with ckptkit.CheckpointManager(tmp_path, options=options) as manager:
        assert float(manager.restore(None)["w"][0, 0]) == 4.0


def test_invalid_grace_is_refused(manager: ckptkit.CheckpointManager) -> None:
    """Breaks when a forgotten unit or sign leaves a job without its last save, silently."""
    with pytest.raises(ValueError, match="grace_s is 0: give the seconds between the signal and the end"):
        manager.save_last(1, args_of(1), grace_s=0)
