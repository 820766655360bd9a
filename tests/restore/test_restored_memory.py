"""Whose memory a staged and a restored state are: nobody else's."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptkit
from ckptkit.slots.arena import Arena
from ckptkit.snapshot import copying, describe, shards
from tests.snapshot.snapshots import SHARDINGS, big_tree, named, plain, restore, save
from tests.states import abstract


def pointers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def test_restored_arrays_do_not_alias_the_slot(arena: Arena) -> None:
    """If it failed, the next save would change the weights of the running model (FACTS 3)."""
    tree = big_tree(0)
    manifest = save(arena, tree)
    found = restore(arena, manifest, abstract(tree))
    expected = jax.tree.map(lambda leaf: plain(leaf).copy(), tree)
    for slot in arena._slots:
        slot.memory[:] = 0x55
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a).view(np.uint8), b.view(np.uint8)), found, expected)


def test_no_two_devices_share_restored_memory(arena: Arena) -> None:
    """If it failed, a donating step on one replica would overwrite the other replica's weights."""
    tree = big_tree(0)
    found = restore(arena, save(arena, tree), abstract(tree))
    all_pointers = [p for leaf in jax.tree.leaves(found) for p in sorted(pointers(leaf))]
    shards = sum(len(leaf.addressable_shards) for leaf in jax.tree.leaves(found))
    assert len(set(all_pointers)) == len(all_pointers) == shards


@functools.partial(jax.jit, donate_argnums=0)
def step(tree: Any, seed: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + seed.astype(leaf.dtype), tree)


def finite_tree(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    specs = {"replicated": named(), "split": named("x", "y"), "half": named("x")}
    return {
        name: jax.device_put(rng.integers(-1000, 1000, (64, 64)).astype(np.float32), spec)
        for name, spec in specs.items()
    }


def test_donating_step_on_restored_arrays_is_correct(arena: Arena) -> None:
    """If it failed, the first step after a resume would compute on memory that it also writes."""
    tree = finite_tree(1)
    found = restore(arena, save(arena, tree), abstract(tree))
    expected = jax.tree.map(lambda leaf: plain(leaf).copy(), tree)
    for n in range(1, 6):
        found = step(found, jnp.int32(n))
        expected = jax.tree.map(lambda leaf, n=n: leaf + np.float32(n), expected)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(plain(a), b), found, expected)
        jax.tree.map(
            lambda leaf: [np.testing.assert_array_equal(s.data, plain(leaf)[s.index]) for s in leaf.addressable_shards],
            found,
        )


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=5)
def test_donating_steps_do_not_change_a_saved_checkpoint(seed: int) -> None:
    """If it failed, a checkpoint would hold parts of two steps, and its digests would prove it whole."""
    tree = finite_tree(seed)
    slots: list[tuple[describe.Description, np.ndarray, Any]] = []
    for n in range(6):
        description = describe.describe_items({"state": tree})
        memory = np.empty(description.slot_bytes, np.uint8)
        expected = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)
        copying.copy_shards(shards.local_shards(description, {"state": tree}), memory)
        tree = step(tree, jnp.int32(n + 1))  # at once, as a training loop does
        tree = step(tree, jnp.int32(n + 2))
        slots.append((description, memory, expected))
    jax.block_until_ready(tree)
    for description, memory, expected in slots:
        for source in description.items["state"]:
            for box in source.record.boxes:
                stored = describe.box_array(box, source.record, memory)
                np.testing.assert_array_equal(stored, expected[source.record.path[0]][box.box.slices()])


@pytest.mark.parametrize("sharding", ["one device", "2-D", "replicated"])
def test_staging_keeps_no_reference_to_the_state(sharding: str) -> None:
    """If it failed, the step after a save would take fresh memory instead of the donated (FACTS 3): a slow step."""
    value = jax.device_put(np.ones((256, 256), np.float32), SHARDINGS[sharding]())
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    unstaged = jax.block_until_ready(double(jax.device_put(np.ones((256, 256), np.float32), SHARDINGS[sharding]())))
    before = pointers(unstaged)
    reused = pointers(jax.block_until_ready(double(unstaged))) == before
    assert reused, "donation itself does not reuse memory here: this test cannot tell"
    value = jax.block_until_ready(double(value))
    description = describe.describe_items({"state": {"w": value}})
    copying.copy_shards(
        shards.local_shards(description, {"state": {"w": value}}), np.empty(description.slot_bytes, np.uint8)
    )
    del description
    before = pointers(value)
    assert pointers(jax.block_until_ready(double(value))) == before


def test_cast_leaves_replace_the_stored_ones_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore in bfloat16 would need the memory of both dtypes on the devices, half as much again."""
    names = [f"w{number}" for number in range(16)]
    state = {name: jnp.ones(1 << 16) for name in names}
    state_bytes = sum(leaf.nbytes for leaf in state.values())
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=ocp.args.StandardSave(state))  # pyright: ignore[reportCallIssue]
    del state
    gc.collect()
    before, live = _live_bytes(), list[int]()
    kind: Any = type(jnp.zeros(()))
    real = kind.astype

    def counted(leaf: Any, *args: Any, **words: Any) -> Any:
        cast = real(leaf, *args, **words)
        live.append(_live_bytes() - before)
        return cast

    monkeypatch.setattr(kind, "astype", counted)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {name: jax.ShapeDtypeStruct((1 << 16,), jnp.bfloat16, sharding=device) for name in names}
    with ckptkit.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(0, args=ocp.args.StandardRestore(wanted))  # pyright: ignore[reportCallIssue]
    assert {leaf.dtype for leaf in restored.values()} == {jnp.dtype("bfloat16")}
    assert len(live) == len(names)
    assert max(live) < 1.1 * state_bytes


def _live_bytes() -> int:
    return sum(leaf.nbytes for leaf in jax.live_arrays())
