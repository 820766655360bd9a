"""Names of roots, tiers and items that a library below reads in a way of its own: what is saved is found again."""

from __future__ import annotations

import os
import pathlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit import direct
from ckptkit.errors import StoreError
from ckptkit.store import open_store
from ckptkit.testing.bucket import BucketServer

Save: Any = ocp.args.StandardSave


def save(root: str | os.PathLike[str], *steps: int, **words: Any) -> None:
    with ckptkit.CheckpointManager(root, **words) as manager:
        for step in steps:
            assert manager.save(step, args=Save({"w": jnp.full(4, step)}))
            manager.wait_until_finished()


def newest(root: str | os.PathLike[str], **words: Any) -> tuple[list[int], float]:
    with ckptkit.CheckpointManager(root, **words) as manager:
        return manager.all_steps(), float(np.asarray(manager.restore(None)["w"])[0])


@pytest.mark.parametrize(
    "root", ["p//q", "/run2", "./run2", "run#2", "run?generation=5", "run::2", "a b", "run*", "r[12]", "run%20x"]
)
def test_bucket_root_with_an_odd_name_is_one_root_of_its_own(server: BucketServer, root: str) -> None:
    """A restart would train from scratch, or add steps to another run, and prune them there."""
    save("gs://runs/run", 7)
    before = open_store("gs://runs/run").stat_all("")
    url = f"gs://runs/{root}"
    save(url, 1, 2)
    assert newest(url) == ([1, 2], 2.0)
    assert newest("gs://runs/run") == ([7], 7.0)
    after = open_store("gs://runs/run").stat_all("")
    assert {key: stat for key, stat in after.items() if "_ckptkit" not in key} == {
        key: stat for key, stat in before.items() if "_ckptkit" not in key
    }


def test_deletions_below_a_root_with_a_pattern_stay_in_it(server: BucketServer) -> None:
    """`rm` would take the name of the root for a pattern, and delete the same keys of other runs."""
    for root in ("exp*", "expA", "exp[A]"):
        open_store(f"gs://runs/{root}").put("_ckptkit/doomed.json", b"x")
    for root in ("exp*", "exp[A]"):
        open_store(f"gs://runs/{root}").delete_many(["_ckptkit/doomed.json"])
    assert open_store("gs://runs/expA").list_all("") == ["_ckptkit/doomed.json"]
    assert open_store("gs://runs/exp*").list_all("") == open_store("gs://runs/exp[A]").list_all("") == []


def test_path_with_a_backslash_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """TensorStore would write the arrays to another directory, and a restart would find none."""
    root = tmp_path / "a\\b"
    with pytest.raises(StoreError, match="backslash"):
        save(root, 1)
    with pytest.raises(StoreError, match="backslash"):
        direct.save(tmp_path / "c\\d", {"w": jnp.ones(4)})
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("root", ["gs:/runs/run", pathlib.Path("gs://runs/run"), "s3:/runs/run"])
def test_bucket_that_lost_a_slash_is_refused(root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a bucket would save to the disk of its host, and lose all with it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="://runs/run"):
        save(root, 1)
    assert list(tmp_path.iterdir()) == []


def test_directory_with_the_name_of_a_bucket_in_it_is_restored(tmp_path: Path) -> None:
    """Every restore would fail, after saves that were committed."""
    save(tmp_path / "logs:" / "run", 1, 2)
    save(tmp_path / "gs:" / "run", 1, 2)
    assert newest(tmp_path / "logs:" / "run") == newest(tmp_path / "gs:" / "run") == ([1, 2], 2.0)


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "a\\b"])
def test_item_that_no_directory_can_have_is_refused(tmp_path: Path, name: str) -> None:
    """The step would be committed, and found damaged by every restore."""
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(ValueError, match="cannot be saved"):
            manager.save(1, args=ocp.args.Composite(**{name: Save({"w": jnp.ones(4)})}))
        assert manager.all_steps() == []


def test_tier_stays_where_it_was_when_the_job_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest saves would be in two directories, and a restart would find the older ones."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    options = ocp.CheckpointManagerOptions(save_interval_steps=100)
    words = {"tiers": [ckptkit.Tier.ram("ram")], "options": options, "host_id": "h"}
    with ckptkit.CheckpointManager(tmp_path / "run", **words) as manager:
        manager.save(0, args=Save({"w": jnp.zeros(4)}))
        monkeypatch.chdir(tmp_path / "b")
        for step in (1, 2):
            manager.save(step, args=Save({"w": jnp.full(4, step)}))
            manager.wait_until_finished()
        held = [record.tiers for record in manager.steps()]
    assert list((tmp_path / "b").iterdir()) == []
    assert held
    monkeypatch.chdir(tmp_path / "a")
    assert newest(tmp_path / "run", **{**words, "tiers": [ckptkit.Tier.ram("ram")]})[1] == 2.0
