"""Which error a caller gets, and when: from `save` and `restore`, and not from a thread hours later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import ckptkit
from tests.states import assert_same

args: Any = ocp.args


def make(tmp_path: Path, tier: str = "durable", **more: Any) -> Any:
    tiers = [ckptkit.Tier.ram(str(tmp_path / "ram"))] if tier == "ram" else []
    return ckptkit.CheckpointManager(tmp_path / "run", tiers=tiers, host_id="host", **more)


@pytest.mark.parametrize("tier", ["durable", "ram"])
def test_dtypes_without_a_zarr_type_are_refused_by_save(tmp_path: Path, tier: str) -> None:
    """Every durable save would fail in the background, after hours of a run that looks well."""
    tree = {"a": jnp.arange(4, dtype=jnp.uint4), "b": {"c": jnp.ones(2, jnp.float8_e4m3)}, "d": jnp.arange(3)}
    with make(tmp_path, tier) as manager:
        with pytest.raises(ValueError, match=r"durable tier: a \(uint4\), b\.c \(float8_e4m3\); cast them"):
            manager.save(0, args=args.StandardSave(tree))
        assert manager.save(1, args=args.StandardSave({"d": tree["d"]}))


def test_step_that_no_manifest_can_name_is_refused_by_save(tmp_path: Path) -> None:
    """The save would fail in the writer thread, on every process."""
    with make(tmp_path, "ram") as manager:
        with pytest.raises(ValueError, match=r"step 1000000000000 cannot be saved: steps are below 1000000000000"):
            manager.save(10**12, args=args.StandardSave({"d": jnp.arange(3)}))
        assert manager.save(10**12 - 1, args=args.StandardSave({"d": jnp.arange(3)}))


@pytest.mark.parametrize("item", ["state", "unknown"])
def test_missing_step_is_reported_before_an_unknown_item(tmp_path: Path, item: str) -> None:
    """A loop that begins anew on FileNotFoundError would stop with a ValueError."""
    wanted = args.Composite(**{item: args.StandardRestore()})
    names: Any = {"item_names": ("state",)}
    with make(tmp_path, **names) as manager, ocp.CheckpointManager(tmp_path / "run", **names) as stock:
        for each in (stock, manager):
            with pytest.raises(FileNotFoundError):
                each.restore(3, args=wanted)


def test_unknown_item_of_a_present_step_is_refused_as_by_orbax(tmp_path: Path) -> None:
    """The order of errors must not hide the other one."""
    names: Any = {"item_names": ("state",)}
    with make(tmp_path, **names) as manager:
        manager.save(3, args=args.Composite(state=args.StandardSave({"d": jnp.arange(3)})))
        with pytest.raises(KeyError, match="unknown"):
            manager.restore(3, args=args.Composite(unknown=args.StandardRestore()))


@pytest.mark.parametrize("tier", ["durable", "ram"])
def test_part_is_restored_with_restore_args_of_the_whole_tree(tmp_path: Path, tier: str) -> None:
    """Callers build `restore_args` once for the whole state: the part would raise "Dict key mismatch"."""
    on = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    wishes = {"a": ocp.ArrayRestoreArgs(sharding=on), "b": {"c": ocp.ArrayRestoreArgs(sharding=on)}}
    tree = {"a": jnp.arange(4.0), "b": {"c": jnp.ones(2)}}
    wanted = args.PyTreeRestore({"b": {"c": 0}}, restore_args=wishes, partial_restore=True)
    with make(tmp_path, tier) as manager:
        manager.save(0, args=args.PyTreeSave(tree))
        manager.wait_until_finished()
        found = manager.restore(0, args=wanted)
    with ocp.CheckpointManager(tmp_path / "run") as stock:
        expected = stock.restore(0, args=wanted)
    assert_same(found, expected)
    assert found["b"]["c"].sharding == expected["b"]["c"].sharding == on


def test_active_processes_of_another_job_are_refused(tmp_path: Path) -> None:
    """The constructor would wait ten minutes for processes that never come."""
    some = ocp.options.MultiprocessingOptions(active_processes={0, 1}, barrier_sync_key_prefix="some")
    with pytest.raises(ValueError, match=r"active_processes is \[0, 1\], and the job has 1 process:"):
        make(tmp_path, options=ocp.CheckpointManagerOptions(multiprocessing_options=some))


@pytest.mark.parametrize("tier", ["durable", "ram"])
@pytest.mark.parametrize("staging", ["slot_copy", "device_copy"])
def test_save_and_restore_pass_a_transfer_guard(tmp_path: Path, tier: str, staging: Any) -> None:
    """A loop that guards against transfers of its own could not be resumed: typed keys made one."""
    mesh = jax.make_mesh((4,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    state = {
        "w": jax.device_put(jnp.arange(8.0), split),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), split),
        "key": jax.random.key(3),
        "n": 3,
    }
    items = args.Composite(state=args.StandardSave(state), array=args.ArraySave(jnp.arange(3)))
    abstract = {
        name: leaf if name == "n" else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in state.items()
    }
    wide = {**abstract, "w": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=split)}
    saving = ckptkit.SaveOptions(staging=staging)
    with jax.transfer_guard("disallow"), make(tmp_path, tier, saving=saving) as manager:
        manager.save(0, args=items)
        manager.wait_until_finished()
        found = [
            manager.restore(None),
            *(manager.restore(0, args=args.Composite(state=args.StandardRestore(each))) for each in (abstract, wide)),
        ]
    for each in found[:2]:
        assert_same(each["state"], state)
    assert found[2]["state"]["w"].dtype == jnp.bfloat16
