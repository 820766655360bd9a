"""`ckptkit.emergency.CheckpointManager` in one process: the calls of trainers, both layouts, options, datasets."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath
from grain import checkpoint as grain_checkpoint
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbax_emergency

import ckptkit
from ckptkit import emergency
from tests.states import abstract, assert_same

ARGS: Any = ocp.args
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def mesh_of(slices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((slices, 4 // slices), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def state_of(step: int, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Replicated over slices, sharded within one."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    return {
        "params": {"w": jax.device_put(jnp.arange(16.0) + step, sharding)},
        "step": jax.device_put(jnp.int32(step), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())),
    }


def options_of(local: int = 2, persistent: int = 10, **more: Any) -> emergency.CheckpointManagerOptions:
    return emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=local, **more),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=persistent),
    )


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """A local and a persistent directory."""
    (tmp_path / "local").mkdir()
    return tmp_path / "local", tmp_path / "persistent"


def make(roots: tuple[Path, Path], slices: int = 2, options: Any = None, **more: Any) -> emergency.CheckpointManager:
    mesh = mesh_of(slices)
    options = options or options_of()
    return emergency.CheckpointManager(*roots, mesh, abstract(state_of(0, mesh)), options=options, **more)


def state_args(step: int, slices: int = 2, **items: Any) -> Any:
    return ARGS.Composite(state=ARGS.PyTreeSave(state_of(step, mesh_of(slices))), **items)


@pytest.mark.parametrize("slices", [1, 2])
def test_training_loop_of_maxtext(roots: tuple[Path, Path], slices: int) -> None:
    """MaxText's calls (`create_orbax_emergency_checkpoint_manager`, `maybe_save_checkpoint`) would not run."""
    mesh = mesh_of(slices)
    with make(roots, slices, logger=ocp.logging.StandardLogger()) as manager:
        assert isinstance(manager, orbax_emergency.CheckpointManager)
        assert manager.latest_step() is None
        for step in range(15):
            state = state_of(step, mesh)
            wishes = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1 << 20), state)
            args = ARGS.PyTreeSave(item=state, save_args=wishes, ocdbt_target_data_file_size=1 << 20)
            saved = manager.save(step, args=ARGS.Composite(state=args), force=False)
            assert saved == (step % 2 == 0)
            assert not manager.reached_preemption(step)
            manager.wait_until_finished()  # steps of a test take no time
        manager.wait_until_finished()
    with make(roots, slices) as manager:
        assert manager.latest_step() == 14, "a durable step is 10"
        restore = ARGS.PyTreeRestore(item=abstract(state_of(0, mesh)))
        assert_same(manager.restore(14, args=ARGS.Composite(state=restore)).state, state_of(14, mesh))
        assert_same(manager.restore(None).state, state_of(14, mesh))
        assert (manager.in_primary_slice, manager.global_mesh) == (True, mesh)
    shutil.rmtree(roots[0])
    roots[0].mkdir()
    with make(roots, slices) as manager:
        assert manager.latest_step() == 10
        assert_same(manager.restore(manager.latest_step()).state, state_of(10, mesh))


def stock_root(root: Path, *, named: bool) -> None:
    """A persistent root as Orbax's emergency manager leaves it in a job of one slice, or (unnamed) of several."""
    state = state_of(7, mesh_of(2))
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True)
    with ocp.CheckpointManager(root, item_handlers=None if named else handler) as stock:
        stock.save(7, args=state_args(7) if named else ARGS.PyTreeSave(state))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("slices", [1, 2])
def test_roots_of_both_layouts_are_restored_and_continued(roots: tuple[Path, Path], slices: int, named: bool) -> None:
    """A job that changes its number of slices could not read its own root."""
    stock_root(roots[1], named=named)
    with make(roots, slices) as manager:
        assert_same(manager.restore(None).state, state_of(7, mesh_of(slices)))
        manager.save(10, args=state_args(10, slices), force=True)
    assert (roots[1] / "10" / ("state" if named else "default")).is_dir(), "a root has one layout"
    shutil.rmtree(roots[0])
    roots[0].mkdir()
    with make(roots, slices) as manager:
        assert_same(manager.restore(None).state, state_of(10, mesh_of(slices)))


def test_stock_orbax_reads_the_root(roots: tuple[Path, Path]) -> None:
    """A job could not go back to Orbax's emergency manager, which reads `STEP/default`."""
    for slices, item in ((2, "default"), (1, "state")):
        with make((roots[0], roots[1] / str(slices)), slices) as manager:
            manager.save(0, args=state_args(0, slices))
        found = ocp.PyTreeCheckpointHandler().restore(epath.Path(roots[1]) / str(slices) / "0" / item)
        assert_same(found["params"]["w"], state_of(0, mesh_of(slices))["params"]["w"])


def test_fields_that_a_tier_cannot_obey_are_refused_by_name(roots: tuple[Path, Path]) -> None:
    """A policy would be ignored."""
    policy = ocp.checkpoint_managers.FixedIntervalPolicy(5)
    for name, value in {
        "save_decision_policy": policy,
        "preservation_policy": ocp.checkpoint_managers.LatestN(2),
        "debug_use_full_global_mesh": True,
    }.items():
        with pytest.raises(ValueError, match=f"LocalCheckpointOptions.{name}"):
            make(roots, options=options_of(**{name: value}))
    with pytest.raises(ValueError, match="replica_axis_index is 2"):
        make(roots, options=emergency.CheckpointManagerOptions(replica_axis_index=2))
    with pytest.raises(FileNotFoundError, match="create it on every host"):
        make((roots[0] / "missing", roots[1]))


def test_items_that_the_root_cannot_hold_are_refused(roots: tuple[Path, Path]) -> None:
    """An item would be lost with the ramdisk."""
    with make(roots) as manager:
        with pytest.raises(ValueError, match="must be an ocp"):
            manager.save(0, args=ARGS.PyTreeSave(state_of(0, mesh_of(2))))
        with pytest.raises(ValueError, match="must have the item 'state'"):
            manager.save(0, args=ARGS.Composite(model=ARGS.PyTreeSave({"w": jnp.ones(3)})))
        with pytest.raises(ValueError, match="items extra:"):
            manager.save(0, args=state_args(0, extra=ARGS.JsonSave({})))
        with pytest.raises(ValueError, match="give persistent_non_replicated_directory"):
            manager.save(0, args=state_args(0, dataset=ARGS.JsonSave({})))
        with pytest.raises(FileNotFoundError):
            manager.restore(None)


def test_local_policies_are_obeyed(roots: tuple[Path, Path]) -> None:
    """The ramdisk would take other steps than the caller's function chooses, or steps although it is read only."""
    asked: list[tuple[int, int | None]] = []

    def odd(step: int, latest: int | None = None) -> bool:
        asked.append((step, latest))
        return step % 2 == 1

    with make(roots, options=options_of(persistent=100, should_save_fn=odd)) as manager:
        for step in range(1, 5):
            assert manager.save(step, args=state_args(step)) == (step % 2 == 1)
            manager.wait_until_finished()
        assert asked[-1] == (4, 3)
        assert [record.step for record in manager.manager.steps() if "ram" in record.tiers] == [3]
    with make(roots, options=options_of(persistent=100, read_only=True)) as manager:
        assert not manager.save(5, args=state_args(5))
        assert_same(manager.restore(None).state, state_of(3, mesh_of(2)))


def test_dataset_is_restored_from_the_step_of_the_state(roots: tuple[Path, Path]) -> None:
    """Data would be repeated or left out: Orbax keeps the dataset in persistent steps alone."""
    iterator = iter(grain.MapDataset.range(100).to_iter_dataset())
    where: dict[str, Any] = {"persistent_non_replicated_directory": roots[1].parent / "data"}
    with make(roots, **where) as manager:
        for step in range(5):
            next(iterator)
            manager.save(step, args=state_args(step, dataset=grain_checkpoint.CheckpointSave(iterator)))
            manager.wait_until_finished()
    fresh = iter(grain.MapDataset.range(100).to_iter_dataset())
    with make(roots, **where) as manager:
        args = ARGS.Composite(dataset=grain_checkpoint.CheckpointRestore(fresh))
        found = manager.restore(None, args=args)
        assert_same(found.state, state_of(4, mesh_of(2)))
        assert next(fresh) == 5
    for slot in next(roots[0].glob("*data*"), roots[0]).rglob("slot-*.bin"):
        slot.write_bytes(b"")
    with make(roots, **where) as manager:
        found = manager.restore(None, args=args)
        assert_same(found.state, state_of(0, mesh_of(2)))
        assert next(fresh) == 1, "the data of another step"


def test_flipped_bit_in_the_ramdisk_gives_the_durable_step(roots: tuple[Path, Path]) -> None:
    """Orbax's manager would go on from a damaged state."""
    with make(roots) as manager:
        for step in range(3):
            manager.save(step, args=state_args(step))
            manager.wait_until_finished()
    for slot in roots[0].rglob("slot-*.bin"):
        data = bytearray(slot.read_bytes())
        data[8] ^= 1
        slot.write_bytes(data)
    with make(roots) as manager:
        assert_same(manager.restore(None).state, state_of(0, mesh_of(2)))


def test_what_orbax_lacks_is_there(roots: tuple[Path, Path]) -> None:
    """`delete`, `metadata` and `best_step` raise NotImplementedError in Orbax's manager."""
    with make(roots) as manager:
        manager.save(0, args=state_args(0))
        manager.wait_until_finished()
        assert manager.best_step() == 0
        assert manager.metadata(0) is not None
        assert manager.metrics(0) is None
        assert isinstance(manager.manager, ckptkit.CheckpointManager)
        manager.delete(0)
        assert not manager.all_steps(read=True)
    assert not list(roots[1].glob("0"))


OBEYED = {
    "CheckpointManagerOptions": "local persistent replica_axis_index step_name_format cleanup_tmp_directories "
    "enable_async_checkpointing async_options multiprocessing_options",
    "LocalCheckpointOptions": "save_interval_steps max_to_keep read_only should_save_fn",
    "PersistentCheckpointOptions": "save_interval_steps max_to_keep keep_period should_save_fn save_decision_policy "
    "preservation_policy",
    "MultiprocessingOptions": "coordination_timeout_secs",
}
REFUSED = {"save_decision_policy", "preservation_policy", "debug_use_full_global_mesh"}  # of the local options
DEPARTURES = {"single_host_load_and_broadcast"}


def test_every_name_of_orbax_is_covered() -> None:
    """A new release of Orbax may have an argument, a method or a field that would be ignored."""
    stock, ours = orbax_emergency.CheckpointManager, emergency.CheckpointManager
    for name, value in vars(stock).items():
        if name.startswith("_") and name != "__init__":
            continue
        assert name in vars(ours), f"{name} is Orbax's own, and its manager was never made"
        if callable(value):
            missing = set(inspect.signature(value).parameters) - set(inspect.signature(vars(ours)[name]).parameters)
            assert not missing, f"{name} has no {missing}"
    page = (Path(__file__).parents[2] / "docs" / "departures.md").read_text()
    for name, obeyed in OBEYED.items():
        fields = {each.name for each in dataclasses.fields(getattr(orbax_emergency, name))} - set(obeyed.split())
        assert fields <= (REFUSED if name == "LocalCheckpointOptions" else DEPARTURES), (name, fields)
        assert all(field in page for field in fields)
