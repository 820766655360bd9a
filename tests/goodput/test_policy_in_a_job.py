"""`GoodputOptimal` in a real job: both tiers save by it, as the events show."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit


def test_job_saves_at_the_learned_intervals(tmp_path: Path) -> None:
    """The policy must be asked by the real manager for both tiers, learn from its events, and save."""
    said: list[ckptkit.Event] = []
    events = ckptkit.EventLog()
    events.observe(said.append)
    best = ckptkit.GoodputOptimal(
        events, tiers=("ram", "durable"), bounds=ckptkit.IntervalBounds(min_s=0.001, max_s=3600.0), prior_mtbf_s=3600.0
    )
    ram = ckptkit.Tier.ram(str(tmp_path / "ram"), save=best.every("ram"))
    options = ocp.CheckpointManagerOptions(save_decision_policy=best.every("durable"))
    with ckptkit.CheckpointManager(tmp_path / "run", options=options, tiers=[ram], events=events) as manager:
        taken = []
        for step in range(60):
            taken.append(manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(4) + step})))
            manager.wait_until_finished()
        assert taken[0], "the first step is due everywhere"
        assert not all(taken), "an interval of seconds has gone by in the time of sixty tiny steps"
        assert best.interval_s("ram") <= best.interval_s("durable")
    committed = {event.tier for event in said if event.kind == ckptkit.Kind.COMMITTED}
    assert committed == {"ram", "durable"}


def test_both_tiers_change_intervals_and_report_reasons(tmp_path: Path) -> None:
    """If it failed, the slower tier would keep the interval of a guess, or nobody would know why it moved."""
    said: list[ckptkit.Event] = []
    events = ckptkit.EventLog()
    events.observe(said.append)
    best = ckptkit.GoodputOptimal(
        events,
        tiers=("ram", "durable"),
        bounds=ckptkit.IntervalBounds(min_s=0.001, max_s=3600.0),
        prior_mtbf_s=0.02,  # so short that what a durable save takes to be committed is the bound
    )
    ram = ckptkit.Tier.ram(str(tmp_path / "ram"), save=best.every("ram"))
    options = ocp.CheckpointManagerOptions(save_decision_policy=best.every("durable"))
    with ckptkit.CheckpointManager(tmp_path / "run", options=options, tiers=[ram], events=events) as manager:
        for step in range(10_000):  # a slow first commit makes a long interval: go on until it is over
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(4) + step}))
            manager.wait_until_finished()
            if [event.tier for event in said if event.kind == ckptkit.Kind.COMMITTED].count("durable") == 3:
                break
    changes = [event for event in said if event.kind == ckptkit.Kind.INTERVAL]
    assert {event.tier for event in changes} == {"ram", "durable"}
    for change in changes:
        assert f"failures that need {change.tier} in" in change.fields["reason"]
        # Both are rounded to milliseconds.
        assert abs(change.fields["seconds"] - change.fields["before"]) >= 0.1 * change.fields["before"] - 0.0011
    last = next(event for event in reversed(changes) if event.tier == "durable")
    assert last.fields["seconds"] == pytest.approx(best.interval_s("durable"), abs=1e-3)
    committed = [event.tier for event in said if event.kind == ckptkit.Kind.COMMITTED]
    assert committed.count("ram") >= committed.count("durable") == 3
