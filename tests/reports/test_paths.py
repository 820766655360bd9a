"""Paths of roots and steps."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

import ckptkit
from ckptkit.cli import main
from tests.reports.managers import args, over, restored, saved
from tests.reports.reported import reported

STATE = {"w": jnp.arange(3.0)}


@reported("apax-hub/apax/issues/465", "A relative path is a path.")
def test_relative_path_is_saved_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("models/best"), STATE, 3193)
    assert restored(Path("models/best"))["w"].tolist() == [0, 1, 2]
    assert (tmp_path / "models" / "best" / "3193").is_dir()


@reported("Positronic-Robotics/positronic/pull/680", "A path one level too deep is named as that, not as broken.")
def test_path_one_level_too_deep_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, STATE, 199999)
    assert main(["steps", str(tmp_path / "199999")]) != 0
    assert "is a step" in capsys.readouterr().err


@reported("google/orbax/issues/1601", "A run begins from the newest step of another root.")
def test_newest_step_of_another_root_is_restored(tmp_path: Path) -> None:
    saved(tmp_path / "old", STATE, 5, 6)
    with over(tmp_path / "new") as manager:
        found = manager.restore(None, directory=tmp_path / "old", args=args.StandardRestore(STATE))
        assert found["w"].tolist() == [0, 1, 2]
        assert manager.save(0, args=args.StandardSave(found))


@reported("google/orbax/issues/374", "The newest step of a root is known without a manager.")
def test_newest_step_is_known_without_a_manager(tmp_path: Path) -> None:
    saved(tmp_path, STATE, 5, 60)
    assert ckptkit.latest_step(str(tmp_path)) == 60


@reported("google/orbax/issues/647", "Items saved under a path are found under the same path.")
def test_named_items_are_found_under_the_path_of_the_save(tmp_path: Path) -> None:
    items = {"model": args.StandardSave(STATE), "opt_state": args.StandardSave({"mu": jnp.zeros(3)})}
    with over(tmp_path, max_to_keep=3, save_interval_steps=25) as manager:
        assert manager.save(0, args=args.Composite(**items))
    with over(tmp_path) as manager:
        found = manager.restore(manager.latest_step())
    assert {name: sorted(found[name]) for name in found.keys()} == {"model": ["w"], "opt_state": ["mu"]}  # noqa: SIM118
