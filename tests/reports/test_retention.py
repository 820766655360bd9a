"""Which steps are taken, and which are kept."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest
from orbax.checkpoint import checkpoint_managers as policies

import ckptkit
from tests.reports.managers import args, over, saved
from tests.reports.reported import reported

STATE = {"w": jnp.ones(2)}


@reported("google/orbax/issues/527", "A run that begins again at step 0 in a root with later steps saves its steps.")
def test_steps_before_those_of_an_earlier_run_are_saved_by_force(tmp_path: Path) -> None:
    saved(tmp_path, STATE, 100, 200)
    with over(tmp_path, max_to_keep=10) as manager:
        assert not manager.save(0, args=args.StandardSave(STATE))
        assert manager.save(0, args=args.StandardSave(STATE), force=True)
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [0, 100, 200]


@reported("google/orbax/issues/2657", "A save of a step that exists is an error, and a deletion makes room for it.")
def test_step_that_exists_is_refused_and_saved_after_its_deletion(tmp_path: Path) -> None:
    saved(tmp_path, STATE, 2000)
    with over(tmp_path) as manager:
        with pytest.raises(ckptkit.StepAlreadyExistsError, match="2000"):
            manager.save(2000, args=args.StandardSave(STATE), force=True)
        manager.delete(2000)
        assert manager.save(2000, args=args.StandardSave({"w": jnp.zeros(2)}))
    with over(tmp_path) as manager:
        assert manager.restore(2000)["w"].tolist() == [0.0, 0.0]


@reported("google/orbax/issues/806", "The newest steps are kept, and every step of a longer interval.")
def test_policies_of_several_intervals_are_joined(tmp_path: Path) -> None:
    policy = policies.AnyPreservationPolicy([policies.EveryNSteps(40), policies.LatestN(2)])
    with over(tmp_path, save_interval_steps=10, preservation_policy=policy) as manager:
        for step in range(0, 130, 10):
            assert manager.save(step, args=args.StandardSave(STATE))
    with over(tmp_path, preservation_policy=policy) as manager:
        assert sorted(manager.all_steps()) == [0, 40, 80, 110, 120]


@reported("facebookresearch/fvcore/pull/25", "Steps of the run before count for `max_to_keep`, and the newest stays.")
def test_newest_steps_are_kept_over_a_restart(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (4, 5)):
        saved(tmp_path, STATE, *steps, max_to_keep=3)
    with over(tmp_path) as manager:
        assert sorted(manager.all_steps()) == [3, 4, 5]
