"""Steps that were not written to their end, or were damaged later."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckptkit
from tests.reports.managers import args, over, restored, saved
from tests.reports.reported import reported

STATE = {"w": jnp.arange(1000.0)}


def _tear(step: Path) -> None:
    """Data files are lost, and metadata stays."""
    for directory in step.rglob("d"):
        shutil.rmtree(directory)


@reported("marin-community/marin/pull/8760", "A torn newest step falls back to an older one, and never to a new run.")
def test_torn_step_falls_back_and_no_good_step_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, STATE, 1, 2)
    _tear(tmp_path / "2")
    with over(tmp_path) as manager:
        assert manager.restore(None, args=args.StandardRestore(STATE))["w"][-1] == 999
        assert manager.latest_step() == 1
    _tear(tmp_path / "1")
    with over(tmp_path) as manager, pytest.raises(ckptkit.NoRestorableStepError) as caught:
        manager.restore(None)
    assert {step for _, step, _ in caught.value.candidates} == {1, 2}


@reported("marin-community/levanter/pull/991", "A root that has only unfinished steps is one without steps.")
def test_root_with_unfinished_steps_alone_has_no_latest_step(tmp_path: Path) -> None:
    (tmp_path / "100.orbax-checkpoint-tmp-0" / "default").mkdir(parents=True)
    with over(tmp_path) as manager:
        assert (manager.latest_step(), manager.all_steps()) == (None, [])
        assert manager.save(1, args=args.StandardSave(STATE))


@reported("Physical-Intelligence/openpi/issues/566", "The remains of a killed save do not stop a save of that step.")
@pytest.mark.parametrize("name", ["30000.orbax-checkpoint-tmp-0", "30000.orbax-checkpoint-tmp"])
def test_remains_of_a_killed_save_do_not_stop_the_step(tmp_path: Path, name: str) -> None:
    saved(tmp_path, STATE, 20000)
    (tmp_path / name / "default").mkdir(parents=True)
    (tmp_path / name / "default" / "manifest.ocdbt").write_bytes(b"torn")
    saved(tmp_path, STATE, 30000)
    assert restored(tmp_path, STATE, step=30000)["w"][-1] == 999


@reported("PrimeIntellect-ai/prime-rl/pull/1825", "A step that lacks one of its items is not resumed from.")
def test_step_that_lost_an_item_is_not_resumed_from(tmp_path: Path) -> None:
    items = args.Composite(trainer=args.StandardSave(STATE), orchestrator=args.StandardSave({"seen": 3}))
    with over(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=items)
    shutil.rmtree(tmp_path / "2" / "orchestrator")
    wanted = args.Composite(trainer=args.StandardRestore(), orchestrator=args.StandardRestore())
    with over(tmp_path) as manager:
        found = manager.restore(None, args=wanted)
        assert (manager.latest_step(), found["orchestrator"]) == (1, {"seen": 3})
