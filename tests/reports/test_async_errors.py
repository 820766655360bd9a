"""Saves in the background: their errors, and a state that changes meanwhile."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckptkit
from ckptkit.durable.write_step import StepWriter
from tests.forked import run_forked
from tests.reports.managers import args, on_devices, over, restored
from tests.reports.reported import reported

STATE = {"w": jnp.ones(2)}


def _fails(*_: object, **__: object) -> None:
    raise OSError("the disk is on fire")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every durable save of this process fails."""
    monkeypatch.setattr(StepWriter, "write", _fails)


@reported("google/orbax/issues/605", "A save that fails in the background is reported, and training can stop at once.")
@pytest.mark.usefixtures("failing")
def test_failed_save_is_raised_by_the_next_save(tmp_path: Path) -> None:
    manager = over(tmp_path)
    assert manager.save(0, args=args.StandardSave(STATE))
    while manager.is_saving_in_progress():
        time.sleep(0.01)
    with pytest.raises(ckptkit.SaveFailedError, match=r"step 0 .*on fire"):
        manager.save(1, args=args.StandardSave(STATE))
    manager.close()


@reported("keras-team/keras/issues/23609", "A run whose last save failed does not end as if it was saved.")
@pytest.mark.usefixtures("failing")
def test_failed_last_save_is_raised_by_close(tmp_path: Path) -> None:
    manager = over(tmp_path)
    assert manager.save(0, args=args.StandardSave(STATE))
    with pytest.raises(ckptkit.SaveFailedError, match="on fire"):
        manager.close()


@reported("AI-Hypercomputer/maxtext/pull/5260", "A save that failed is not the latest step, and later saves are taken.")
def test_failed_save_is_not_the_latest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with over(tmp_path) as manager:
        assert manager.save(1800, args=args.StandardSave(STATE))
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(StepWriter, "write", _fails)
            assert manager.save(1820, args=args.StandardSave(STATE))
            with pytest.raises(ckptkit.SaveFailedError):
                manager.wait_until_finished()
        assert (manager.latest_step(), manager.all_steps()) == (1800, [1800])
        manager.restore(None)
        assert manager.save(1820, args=args.StandardSave(STATE))
        manager.wait_until_finished()
        assert manager.latest_step() == 1820


@reported("marin-community/marin/pull/5022", "The last save is there although the program ends without waiting for it.")
def test_last_save_is_committed_when_the_program_ends(tmp_path: Path) -> None:
    code = f"""
import jax.numpy as jnp, orbax.checkpoint as ocp, ckptkit
manager = ckptkit.CheckpointManager({str(tmp_path)!r})
manager.save(9917, args=ocp.args.StandardSave({{"w": jnp.arange(1 << 20)}}))
"""
    run_forked([sys.executable, "-c", code], timeout=60, check=True)
    with over(tmp_path) as manager:
        assert manager.latest_step() == 9917
        assert manager.restore(9917)["w"][-1] == (1 << 20) - 1


@reported("google/orbax/issues/626", "The next training step may take over the arrays as soon as `save` returns.")
def test_arrays_that_are_deleted_after_the_save_are_saved(tmp_path: Path) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"w": on_devices(np.zeros((8, 4), np.float32), 4)}
    with over(tmp_path) as manager:
        for number in range(3):
            assert manager.save(number, args=args.StandardSave(state))
            state = step(state)
    for number in range(3):
        assert np.all(np.asarray(restored(tmp_path, step=number)["w"]) == number)


@reported("pytorch/pytorch/issues/144657", "An array in host memory that changes after `save` is saved as it was.")
def test_host_array_that_changes_after_the_save_is_saved_as_it_was(tmp_path: Path) -> None:
    weights = np.ones(1 << 20, np.float32)
    with over(tmp_path) as manager:
        assert manager.save(0, args=args.StandardSave({"w": weights}))
        weights += 1
    assert np.all(restored(tmp_path)["w"] == 1)


@reported("pytorch/torchtitan/issues/930", "A restore right after a save waits for it, and does not fail.")
def test_restore_right_after_a_save_waits_for_it(tmp_path: Path) -> None:
    with over(tmp_path) as manager:
        assert manager.save(10, args=args.StandardSave({"w": jnp.arange(1 << 20)}))
        assert manager.restore(10)["w"][-1] == (1 << 20) - 1
