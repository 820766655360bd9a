"""Restored arrays are the device's own: the first step may donate them."""

import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckptkit
from ckptkit.restore import execute, place
from ckptkit.restore.place import allocate_buffers, can_allocate, device_buffers_of

LARGE = 1 << 19  # float32: 2 MiB, a leaf with a block of its own


@pytest.mark.parametrize("medium", ["ram", "ssd", "durable"])
def test_donating_step_does_not_copy_restored_arrays(
    tmp_path: Path, medium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take as long as the restore, and as much memory again."""
    state: dict[str, Any] = {
        "w": jnp.arange(LARGE, dtype=jnp.float32),
        "m": jnp.arange(9 * LARGE, dtype=jnp.float32),  # read in parts
        "b": jnp.ones(LARGE * 2, jnp.bfloat16),
        "n": np.arange(LARGE),
    }
    landed: set[int] = set()

    def recorded(targets: Any) -> Any:
        blocks = device_buffers_of(targets)
        landed.update(block.ctypes.data for block in blocks.values())
        return blocks

    monkeypatch.setattr(execute, "device_buffers_of", recorded)
    tiers = {"ram": [ckptkit.Tier.ram(str(tmp_path / "fast"))], "ssd": [ckptkit.Tier.ssd(str(tmp_path / "fast"))]}
    with ckptkit.CheckpointManager(tmp_path / "durable", tiers=tiers.get(medium, [])) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.StandardRestore(state))  # pyright: ignore[reportCallIssue]
        assert isinstance(found["n"], np.ndarray)
        for name in ("w", "m", "b"):
            assert found[name].sharding == state[name].sharding
            before = found[name].unsafe_buffer_pointer()
            assert before in landed
            after = jax.jit(lambda x: x + 1, donate_argnums=0)(found[name])
            assert after.unsafe_buffer_pointer() == before
            assert np.array_equal(after, state[name] + 1)


def test_view_keeps_its_array_alive() -> None:
    """A thread that still reads into a part when the restore has failed would write into freed memory."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (landing,) = allocate_buffers([((LARGE,), np.dtype(np.float32))], sharding)
    kept = weakref.ref(landing.array)
    part = landing[10:20].view(np.uint8)
    del landing
    gc.collect()
    assert kept() is not None
    del part
    gc.collect()
    assert kept() is None


def test_only_large_arrays_with_numpy_layout_get_buffers() -> None:
    """A byte in the wrong place, or a host array where the user asked for another memory, would be silent."""
    (device, *_) = jax.devices()
    here = jax.sharding.SingleDeviceSharding(device)
    assert can_allocate((LARGE,), np.dtype(np.float32), here)
    assert not can_allocate((8,), np.dtype(np.float32), here)
    assert not can_allocate((LARGE,), np.dtype(np.float64), here), "JAX would cut it to 32 bits"
    assert not can_allocate((8 * LARGE,), np.dtype(jnp.int4), here)
    assert not can_allocate((LARGE,), np.dtype(np.float32), None)
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    assert not can_allocate((LARGE,), np.dtype(np.float32), pinned)


def test_restore_works_without_buffer_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface is experimental: a JAX without it must restore the same bits."""

    def gone(*_: Any) -> Any:
        raise ImportError("no buffer_callback here")

    monkeypatch.setattr(place, "allocate_buffers", gone)
    state = {"w": jnp.arange(LARGE, dtype=jnp.float32)}
    with ckptkit.CheckpointManager(tmp_path / "durable", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.StandardRestore(state))  # pyright: ignore[reportCallIssue]
    assert np.array_equal(found["w"], state["w"])


def test_dtypes_packed_on_the_device_are_restored_bit_exact(tmp_path: Path) -> None:
    """XLA packs four bits; a copy of host bytes into its memory would be wrong."""
    state = {"q": jnp.arange(4 * LARGE, dtype=jnp.int32).astype(jnp.int4), "t": jnp.ones(4 * LARGE, jnp.bool_)}
    with ckptkit.CheckpointManager(tmp_path / "durable", tiers=[ckptkit.Tier.ram(str(tmp_path / "ram"))]) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
        manager.wait_until_finished()
        found = manager.restore(1, args=ocp.args.StandardRestore(state))  # pyright: ignore[reportCallIssue]
    for name, leaf in state.items():
        assert found[name].dtype == leaf.dtype
        assert np.array_equal(np.asarray(found[name]), np.asarray(leaf))
