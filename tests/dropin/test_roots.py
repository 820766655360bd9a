"""Roots that several managers use, or that are relative: the differences from Orbax in `docs/departures.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit

args: Any = ocp.args


def state(step: int) -> Any:
    return args.StandardSave({"w": jnp.full(4, float(step))})


def test_second_writer_of_a_root_fails_and_loses_no_step_of_the_first(tmp_path: Path) -> None:
    """Two managers that do not know each other's steps would write one history."""
    first, second = ckptkit.CheckpointManager(tmp_path), ckptkit.CheckpointManager(tmp_path)
    first.save(0, args=state(0))
    first.wait_until_finished()
    for step in (1, 3):
        second.save(step, args=state(step))
        with pytest.raises(ckptkit.SaveFailedError, match=r"another run has begun epoch 1 .* stop one of the two"):
            second.wait_until_finished()
        first.save(step + 1, args=state(step + 1))
        first.wait_until_finished()
        second.reload()
    first.close()
    second.close()
    with ckptkit.CheckpointManager(tmp_path) as third:
        assert third.all_steps() == [0, 2, 4]
        assert third.save(5, args=state(5))


def test_restore_of_the_newest_step_finds_one_that_was_saved_since(tmp_path: Path) -> None:
    """A reader would go on from an older step than there is."""
    with ckptkit.CheckpointManager(tmp_path) as writer:
        writer.save(0, args=state(0))
        writer.wait_until_finished()
        with ckptkit.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(read_only=True)) as reader:
            writer.save(1, args=state(1))
            writer.wait_until_finished()
            assert float(reader.restore(None)["w"][0]) == 1.0
            assert reader.all_steps() == [0]
            reader.reload()
            assert reader.all_steps() == [0, 1]


def test_relative_root_is_that_of_the_working_directory_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that changes its directory would save into two roots."""
    monkeypatch.chdir(tmp_path)
    with ckptkit.CheckpointManager("run") as manager:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        manager.save(0, args=state(0))
        manager.wait_until_finished()
        assert float(manager.restore(0)["w"][0]) == 0.0
    assert (tmp_path / "run" / "0").is_dir()
    assert not list((tmp_path / "other").iterdir())


def test_named_items_are_restored_without_arguments_and_handlers(tmp_path: Path) -> None:
    """A script would need the kinds of all items to look into a step."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args.Composite(a=state(0), b=args.JsonSave({"x": 1})))
    with ckptkit.CheckpointManager(tmp_path, item_names=("a", "b")) as manager:
        found = manager.restore(0)
        assert found["b"] == {"x": 1}
        assert found["a"]["w"].tolist() == [0.0] * 4
