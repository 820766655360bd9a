"""Metrics: the best step and the newest one."""

from __future__ import annotations

import math
from pathlib import Path

import jax.numpy as jnp

from tests.reports.managers import args, over
from tests.reports.reported import reported

STATE = {"w": jnp.ones(2)}


def _after(root: Path, losses: list[float]) -> tuple[list[int], int | None, int | None]:
    """All steps, the best and the latest one, after saves with these losses and a restart; two steps are kept."""
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 2}
    with over(root, **options) as manager:
        for step, loss in enumerate(losses):
            assert manager.save(step, args=args.StandardSave(STATE), metrics={"loss": loss})
            manager.wait_until_finished()
    with over(root, **options) as manager:
        return sorted(manager.all_steps()), manager.best_step(), manager.latest_step()


@reported("google/orbax/issues/526", "The best step and the newest one both have to be there after a crash.")
def test_best_and_newest_step_are_both_kept(tmp_path: Path) -> None:
    steps, best, latest = _after(tmp_path, [3.0, 1.0, 2.0, 5.0])
    assert (best, latest) == (1, 3)
    assert {1, 3} <= set(steps)


@reported("antonioterpin/flowgym/pull/51", "A run whose loss gets worse, or is missing, resumes from where it stopped.")
def test_run_with_worse_metrics_resumes_from_its_last_step(tmp_path: Path) -> None:
    steps, best, latest = _after(tmp_path, [1.0, math.nan, 2.0, 4.0, math.nan])
    assert (best, latest) == (0, 4)
    assert {0, 4} <= set(steps)


@reported("Lightning-AI/pytorch-lightning/issues/2636", "A metric that is NaN once does not hide the later ones.")
def test_nan_is_worse_than_every_number(tmp_path: Path) -> None:
    steps, best, _ = _after(tmp_path, [math.nan, 3.0, 1.0, math.nan, 2.0])
    assert best == 2
    assert 2 in steps


@reported("OpenRLHF/OpenRLHF/pull/1333", "After a restart, a worse step does not take the place of the best one.")
def test_best_step_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    _after(tmp_path, [5.0, 1.0])
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 1}
    with over(tmp_path, **options) as manager:
        for step in (2, 3):
            assert manager.save(step, args=args.StandardSave(STATE), metrics={"loss": 9.0})
            manager.wait_until_finished()
        assert manager.best_step() == 1
        assert 1 in manager.all_steps()
