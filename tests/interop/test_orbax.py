"""Durable steps are Orbax's: stock Orbax reads ours, and we read what stock Orbax wrote."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ckptkit
from ckptkit.model.boxes import cell_shape
from tests.states import abstract, assert_same, make_state, restore_args, save_args


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A root with steps 0 to 2, written by ckptkit with a ramdisk tier."""
    root = tmp_path / "ours"
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))]
    with ckptkit.CheckpointManager(root, options=options, tiers=tiers) as manager:
        for step in range(3):
            manager.save(step, args=save_args(make_state(step), step), metrics={"loss": 3.0 - step})
            manager.wait_until_finished()
    return root


def test_stock_orbax_restores_our_steps(ours: Path) -> None:
    """A person could not leave ckptkit and keep the checkpoints."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(ours, options=options) as stock:
        assert list(stock.all_steps()) == [0, 1, 2]
        restored = stock.restore(2, args=restore_args(abstract(make_state())))
        assert_same(restored["state"], make_state(2))
        assert restored["data"] == {"step": 2}
        assert stock.metrics(1) == {"loss": 2.0}
        assert stock.best_step() == 2


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_stock_orbax_restores_our_steps_without_a_template(ours: Path) -> None:
    """The tree, dtypes, typed keys and shardings would have to be known by heart."""
    with ocp.CheckpointManager(ours) as stock:
        restored = stock.restore(2)
    assert_same(restored["state"], make_state(2))
    assert restored["state"]["x"].sharding == make_state(2)["x"].sharding


def test_stock_orbax_restores_our_steps_on_another_mesh(ours: Path) -> None:
    """The cells that we wrote would fit one mesh only."""
    mesh = jax.make_mesh((4,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0 or leaf.shape[0] % 4:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec("all")))

    target = jax.tree.map(moved, make_state())
    with ocp.CheckpointManager(ours) as stock:
        assert_same(stock.restore(2, args=restore_args(target))["state"], make_state(2))
    with ckptkit.CheckpointManager(ours) as manager:
        restored = manager.restore(2, args=restore_args(target))["state"]
    assert_same(restored, make_state(2))
    assert restored["w"].sharding.spec == PartitionSpec("all")


def test_orbax_v1_loads_our_steps(ours: Path) -> None:
    """The newer API would refuse them."""
    from orbax.checkpoint import v1

    tree = v1.load(str(ours / "2"), abstract(make_state()), checkpointable_name="state")
    assert_same(tree, make_state(2))


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_restores_steps_of_stock_orbax(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    """A job could not begin from the checkpoints that it has."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.CheckpointManager(tmp_path, item_names=("state", "data"), item_handlers={"state": handler}) as stock:
        args: Any = ocp.args.Composite(state=ocp.args.PyTreeSave(make_state(7)), data=ocp.args.JsonSave({"step": 7}))  # pyright: ignore[reportCallIssue]
        stock.save(7, args=args)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 7
        restored = manager.restore(None, args=restore_args(abstract(make_state())))
        assert_same(restored["state"], make_state(7))
        assert restored["data"] == {"step": 7}
        assert_same(manager.restore(7)["state"], make_state(7))


def test_job_switches_to_stock_orbax_and_back(tmp_path: Path) -> None:
    """Changing the import in the middle of a run would lose it."""
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(1, args=save_args(make_state(1), 1))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.restore(None, args=restore_args(abstract(make_state())))
        assert manager.save(2, args=save_args(make_state(2), 2))
    with ocp.CheckpointManager(tmp_path) as stock:
        assert stock.latest_step() == 2
        assert_same(stock.restore(2, args=restore_args(abstract(make_state())))["state"], make_state(2))
        stock.save(3, args=save_args(make_state(3), 3))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 3
        assert_same(manager.restore(None, args=restore_args(abstract(make_state())))["state"], make_state(3))


def test_grain_iterator_resumes_where_it_was_at_the_save(tmp_path: Path) -> None:
    """The iterator moves on while the step is written: the data would skip ahead at a resume."""

    def iterator() -> Any:
        return iter(grain.MapDataset.range(100).seed(3).shuffle().to_iter_dataset())

    def args(each: Any, kind: Any) -> Any:
        return ocp.args.Composite(data=kind(each))

    ram = [ckptkit.Tier.ram(str(tmp_path / "ram"))]
    walked = iterator()
    with ckptkit.CheckpointManager(tmp_path / "run", tiers=ram) as manager:
        for _ in range(5):
            next(walked)
        manager.save(5, args=args(walked, grain.checkpoint.CheckpointSave))
        expected = [next(walked) for _ in range(5)]
    for tiers in (ram, []):
        resumed = iterator()
        with ckptkit.CheckpointManager(tmp_path / "run", tiers=tiers) as manager:
            manager.restore(5, args=args(resumed, grain.checkpoint.CheckpointRestore))
        assert [next(resumed) for _ in range(5)] == expected
    resumed = iterator()
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        stock.restore(5, args=args(resumed, grain.checkpoint.CheckpointRestore))
    assert [next(resumed) for _ in range(5)] == expected


def test_abandoned_steps_of_stock_orbax_stay_abandoned(tmp_path: Path) -> None:
    """They have no identity of ours: the abandoned branch would win at the next restart."""
    with ocp.CheckpointManager(tmp_path) as stock:
        for step in (10, 20, 30):
            stock.save(step, args=save_args(make_state(step), step))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.restore(10, args=restore_args(abstract(make_state())))
        assert manager.save(12, args=save_args(make_state(12), 12))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 12
        assert manager.all_steps() == [10, 12]
        assert manager.restore(None, args=restore_args(abstract(make_state())))["data"] == {"step": 12}
        assert manager.save(14, args=save_args(make_state(14), 14))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [10, 12, 14]


def test_max_to_keep_applies_to_the_durable_tier(tmp_path: Path) -> None:
    """The bucket would fill up, or the only durable step would go."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
    with ckptkit.CheckpointManager(tmp_path, options=options) as manager:
        for step in range(9):
            assert manager.save(step, args=save_args(make_state(step), step)) == (step % 2 == 0)
        manager.wait_until_finished()
        assert manager.all_steps() == [6, 8]
    with ocp.CheckpointManager(tmp_path) as stock:
        assert list(stock.all_steps()) == [6, 8]


def test_large_leaves_are_cut_into_cells_that_orbax_reads(tmp_path: Path, monkeypatch: Any) -> None:
    """Cells smaller than a box would be written in the wrong place or order."""
    monkeypatch.setattr(
        "ckptkit.snapshot.describe.cell_shape", lambda shape, box, itemsize: cell_shape(shape, box, itemsize, 256)
    )
    state = make_state(3)
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=save_args(state, 3))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert_same(manager.restore(3, args=restore_args(abstract(state)))["state"], state)
    with ocp.CheckpointManager(tmp_path) as stock:
        restored = stock.restore(3, args=restore_args(abstract(state)))["state"]
    assert_same(restored, state)
    assert np.asarray(restored["w"]).shape == (8, 8)


def test_empty_step_directory_is_skipped(tmp_path: Path) -> None:
    """An interrupted copy or deletion would be restored as a step of nothing."""
    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=save_args(make_state(step), step))
    (tmp_path / "16").mkdir()
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.restore(None, args=restore_args(abstract(make_state())))["data"] == {"step": 2}
        assert manager.restore(None)["data"] == {"step": 2}


@pytest.mark.filterwarnings("ignore:coroutine 'Store._get_array_metadatas' was never awaited")  # Orbax's
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("orbax_may_fail")
@pytest.mark.parametrize("lost", ["state/manifest.ocdbt", "state"])
def test_half_deleted_step_of_stock_orbax_is_skipped(tmp_path: Path, lost: str) -> None:
    """A deletion that was cut off would stop every restart."""
    with ocp.CheckpointManager(tmp_path) as stock:
        for step in (1, 2):
            stock.save(step, args=save_args(make_state(step), step))
    path = tmp_path / "2" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.restore(None, args=restore_args(abstract(make_state())))["data"] == {"step": 1}


def test_step_of_only_small_items_keeps_its_identity(tmp_path: Path) -> None:
    """It would count as stock Orbax's, and be abandoned for good by the rollback that it belongs to."""

    def args(step: int) -> Any:
        return ocp.args.Composite(data=ocp.args.JsonSave({"step": step}))  # pyright: ignore[reportCallIssue]

    with ckptkit.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=args(step))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        manager.restore(1)
        assert manager.save(2, args=args(20))
    with ckptkit.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2]
        assert manager.restore(None)["data"] == {"step": 20}
