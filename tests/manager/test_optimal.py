"""`GoodputOptimal` in a real job: both tiers save by it, and the events say so."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp

import ckptkit


def test_a_job_saves_by_the_learned_intervals(tmp_path: Path) -> None:
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
