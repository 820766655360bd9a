"""Stage, digest, read back, place: the same bits in every dtype and sharding."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.durable.orbax.shardings import sharding_text
from ckptkit.errors import CorruptCheckpointError, TreeMismatchError
from ckptkit.model import digests as digests_module
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import LeafRecord, SaveId
from ckptkit.restore.tree import abstract_of, boxes_needed, targets_of
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import read_manifests
from ckptkit.snapshot import copying, describe, shards
from ckptkit.util import sharing
from tests.snapshot.snapshots import (
    DTYPES,
    SAVE,
    SHARDINGS,
    big_tree,
    bits,
    named,
    plain,
    restore,
    same_bits,
    save,
)
from tests.states import abstract

_steps = itertools.count()

# Bit for bit.


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_sharding_is_restored_bit_exact(arena: Arena, dtype: str, sharding: str) -> None:
    """If it failed, weights, scales or masks of this dtype would change in a save without anybody noticing."""
    value = jax.device_put(bits(dtype, (8, 4)), SHARDINGS[sharding]())
    assert np.asarray(value).tobytes() == bits(dtype, (8, 4)).tobytes()  # the device took the bits as they are
    tree = {"w": value}
    same_bits(restore(arena, save(arena, tree), abstract(tree)), tree)


@pytest.mark.parametrize("target", SHARDINGS)
@pytest.mark.parametrize("source", SHARDINGS)
def test_any_sharding_is_restored_as_any_other(arena: Arena, source: str, target: str) -> None:
    """If it failed, a job could not go on with another mesh."""
    values = bits("float32", (8, 4))
    manifest = save(arena, {"w": jax.device_put(values, SHARDINGS[source]())})
    wanted = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=SHARDINGS[target]())
    found = restore(arena, manifest, {"w": wanted})["w"]
    assert found.sharding == wanted.sharding
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


@given(
    shape=st.lists(st.integers(0, 3), max_size=3).map(lambda s: tuple(4 * n for n in s)),
    dtype=st.sampled_from(DTYPES),
    axes=st.permutations(["x", "y", None]),
    target=st.permutations(["x", "y", None]),
    cell_bytes=st.integers(1, 200),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_is_restored_on_any_mesh_with_any_cells(
    arena: Arena, shape: tuple[int, ...], dtype: str, axes: list[str | None], target: list[str | None], cell_bytes: int
) -> None:
    """If it failed, some shape (scalar, empty, split on two axes) could not be saved, or not on another mesh."""
    source = named(*axes[: len(shape)])
    wanted = named(*target[: len(shape)])
    values = bits(dtype, shape)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(describe, "cell_shape", functools.partial(describe.cell_shape, limit_bytes=cell_bytes))
        manifest = save(arena, {"w": jax.device_put(values, source)}, SaveId(1, next(_steps), 0))
    found = restore(arena, manifest, {"w": jax.ShapeDtypeStruct(shape, values.dtype, sharding=wanted)})["w"]
    assert (found.shape, found.dtype) == (shape, values.dtype)
    assert np.asarray(found).tobytes() == values.tobytes()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("spec", [(), ("x",), (("x", "y"),), (None, "y"), ("x", "y")], ids=str)
def test_typed_keys_are_restored_as_keys(arena: Arena, impl: str, spec: tuple[Any, ...]) -> None:
    """If it failed, a resumed run would draw other dropout masks."""
    keys = jax.random.split(jax.random.key(7, impl=impl), (4, 2))
    tree = {"keys": jax.device_put(keys, named(*spec)), "one": jax.random.key(3, impl=impl)}
    found = restore(arena, save(arena, tree), abstract(tree))
    same_bits(found, tree)
    drawn = jax.random.uniform(found["one"], (3,))
    assert np.asarray(drawn).tobytes() == np.asarray(jax.random.uniform(tree["one"], (3,))).tobytes()


def test_typed_keys_are_restored_on_another_mesh(arena: Arena) -> None:
    """If it failed, per-device keys would tie a checkpoint to the mesh that wrote it."""
    keys = jax.device_put(jax.random.split(jax.random.key(1), 4), named("x"))
    wanted = jax.ShapeDtypeStruct((4,), keys.dtype, sharding=named(("x", "y")))
    found = restore(arena, save(arena, {"k": keys}), {"k": wanted})["k"]
    assert plain(found).tobytes() == plain(keys).tobytes()
    assert len({plain(shard.data).tobytes() for shard in found.addressable_shards}) == 4


def test_host_leaves_keep_their_type(arena: Arena) -> None:
    """If it failed, counters and learning rates would change type on the first resume."""
    tree = {
        "int": 2**53 + 1,
        "big": 2**63 + 5,
        "negative": -(2**63),
        "float": -0.0,
        "nan": float("nan"),
        "bool": True,
        "array": bits("float32", (5, 3)),
        "f64": np.array([1e300, -0.0]),
        "i64": np.array([-(2**63), 2**63 - 1]),
        "bf16": bits("bfloat16", (7,)),
        "int4": bits("int4", (9,)),
        "scalar": np.array(3.5, np.float64),
        "empty": np.zeros((0, 3), np.int16),
        "transposed": bits("int16", (3, 4)).T,
        "strided": np.arange(20)[::3],
        "date": np.array(["2026-01-01"], "datetime64[D]"),
    }
    found = restore(arena, save(arena, tree), tree)
    same_bits(found, {**tree, "transposed": np.ascontiguousarray(tree["transposed"])})
    assert found["int"] == 2**53 + 1


def test_other_byte_orders_keep_their_values(arena: Arena) -> None:
    """If it failed, a big-endian array (from a file, for example) would come back as other numbers, and verify."""
    tree = {"w": np.arange(5, dtype=">f4")}
    try:
        manifest = save(arena, tree)
    except TypeError as error:  # refusing it is as right as converting it
        assert re.search(r"state:w .*byte order", str(error))  # noqa: PT017
        return
    found = restore(arena, manifest, {"w": np.zeros(5, np.float32)})
    np.testing.assert_array_equal(found["w"], tree["w"])


@pytest.mark.parametrize(
    "leaf",
    [
        np.array(["text"]),
        np.zeros(2, [("a", "f4"), ("b", "i4")]),
        np.array([{}], object),
        2**70,
        1j,
        "text",
        b"bytes",
        {1, 2},
    ],
    ids=["strings", "structured", "objects", "huge", "complex", "text", "bytes", "set"],
)
def test_unrestorable_leaves_are_refused_before_staging(arena: Arena, leaf: Any) -> None:
    """If it failed, the save would fail in the background, or be restored as something else."""
    with pytest.raises(TypeError, match=r"^state:bad is a \w+.*; a leaf to be saved is an array or a number"):
        describe.describe_items({"state": {"bad": leaf}})
    assert arena.held() == []


def test_uneven_splits_are_refused_by_name() -> None:
    """If it failed, a leaf with boxes of two shapes would be cut into cells that cross them."""

    class Uneven:
        def devices_indices_map(self, shape: tuple[int, ...]) -> Mapping[Any, Any]:
            del shape
            return {jax.devices()[0]: (slice(0, 3),), jax.devices()[1]: (slice(3, 8),)}

    from ckptkit.model.boxes import boxes_by_process

    boxes = boxes_by_process(Uneven(), (8,))  # pyright: ignore[reportArgumentType]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(describe, "boxes_by_process", lambda *_: boxes)
        with pytest.raises(
            ValueError, match=r"^state:w is split unevenly over its devices .*; pad it or replicate it$"
        ):
            describe.describe_items({"state": {"w": jnp.zeros(8)}})


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": np.zeros(1), "a": {"b": np.ones(1)}},
        {"a": [np.zeros(1)], "a.0": np.ones(1)},
    ],
    ids=["mapping", "sequence"],
)
def test_two_leaves_with_one_name_are_refused(tree: Any) -> None:
    """If it failed, both would be written to one zarr array, and the step could never be restored."""
    with pytest.raises(ValueError, match=r"a\.(b|0)"):
        describe.describe_items({"state": tree})


def test_boxes_are_page_aligned_and_disjoint() -> None:
    """If it failed, one leaf would overwrite the end of another."""
    tree = {f"{n}": jnp.zeros((n,), jnp.int8) for n in (0, 1, 4095, 4096, 4097)} | {
        "split": jax.device_put(jnp.zeros((8, 3), jnp.int16), named("x", None))
    }
    description = describe.describe_items({"state": tree, "more": {"w": np.zeros(5)}})
    spans = sorted(
        (box.offset, box.offset + box.box.size * source.record.itemsize)
        for sources in description.items.values()
        for source in sources
        for box in source.record.boxes
    )
    assert all(start % 4096 == 0 for start, _ in spans)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= description.slot_bytes


def test_large_states_are_copied_completely_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, a cell would be copied by nobody, or a piece of it would be left out of its digest."""
    monkeypatch.setattr(digests_module, "COPY_PIECE_BYTES", 1000)
    monkeypatch.setattr(sharing, "_SHARED_BYTES", 1)
    monkeypatch.setattr(copying, "SMALL_BYTES", 1001)
    monkeypatch.setattr(sharing, "COPY_THREADS", 4)
    tree = {f"{n}": bits("uint8", (n,), seed=n) for n in (1, 999, 1000, 1001, 0, 5000, 12345)}
    description = describe.describe_items({"state": tree})
    memory = np.full(description.slot_bytes, 0xEE, np.uint8)
    said: list[tuple[int, int]] = []
    digests = copying.copy_shards(
        shards.local_shards(description, {"state": tree}), memory, lambda start, stop, _: said.append((start, stop))
    )
    assert sorted(said) == sorted(cell for extent in description.extents for cell in extent.cells)
    for leaf in describe.with_digests(description, digests)["state"]:
        expected = tree[leaf.path[0]].tobytes()
        assert [box.digests for box in leaf.boxes] == [(digest_of(expected),) if expected else ()]
    for source in description.items["state"]:
        (box,) = source.record.boxes
        assert describe.box_array(box, source.record, memory).tobytes() == tree[source.record.path[0]].tobytes()
        end = box.offset + box.box.size
        assert (memory[end : -(-end // 4096) * 4096] == 0xEE).all()  # the padding is nobody's


# The stored leaves against the requested ones.


def test_every_difference_is_reported_at_once() -> None:
    """If it failed, a changed model would be mended one restart per leaf."""
    stored = [
        source.record
        for source in describe.describe_items(
            {
                "state": {
                    "a": jnp.zeros((2, 3)),
                    "b": jnp.zeros(4, jnp.bfloat16),
                    "gone": np.zeros(2),
                    "k": jax.random.key(0),
                }
            }
        ).items["state"]
    ]
    asked = {
        "a": jax.ShapeDtypeStruct((2, 4), np.float32),
        "b": jax.ShapeDtypeStruct((4,), np.float32),
        "k": jax.random.key(0, impl="rbg"),
        "new": {"x": 1},
    }
    with pytest.raises(TreeMismatchError) as caught:
        targets_of("state", describe.leaves_by_path(asked), stored, step=7, where="gs://b/run")
    lines = str(caught.value).splitlines()
    assert lines[0] == "step 7 in gs://b/run is not the tree that was asked for (5 differences):"
    assert lines[1:6] == [
        "  state:a is float32[2,3] on disk, float32[2,4] in abstract_state",
        "  state:b is bfloat16[4] on disk, float32[4] in abstract_state",
        "  state:gone is float64[2] on disk, but not in abstract_state",
        "  state:k is key<fry>[] on disk, key<rbg>[] in abstract_state",
        "  state:new.x is int in abstract_state, but not on disk",
    ]
    assert lines[6] == "Restore with the abstract state of the model that was saved, or change the model."
    assert caught.value.differences == tuple(line.strip() for line in lines[1:6])


@pytest.mark.parametrize(
    ("stored", "asked"),
    [(1.5, 1), (1.5, True), (7, True), (True, 1), (7, 1.5), (np.float32(1.5), 1)],
    ids=lambda v: f"{type(v).__name__}",
)
def test_numbers_of_another_kind_are_differences(arena: Arena, stored: Any, asked: Any) -> None:
    """If it failed, a step counter could come back as 3.5, or a flag as 7 (nothing is cast)."""
    manifest = save(arena, {"n": stored})
    with pytest.raises(TreeMismatchError, match=r"state:n is .* on disk, .* in abstract_state"):
        restore(arena, manifest, {"n": asked})


def test_tree_is_rebuilt_from_the_records(arena: Arena) -> None:
    """If it failed, `restore(step)` without an abstract state would give other shardings than were saved."""
    tree = {
        "layers": [{"w": jax.device_put(bits("float32", (8, 4)), named("x", "y"))}, {"w": jnp.zeros((2,))}] * 6,
        "key": jax.device_put(jax.random.split(jax.random.key(2), 4), named("x")),
        "count": 3,
        "host": np.arange(3),
    }
    manifest = save(arena, tree)

    def with_sharding(leaf: LeafRecord, value: Any) -> LeafRecord:
        text = sharding_text(value.sharding) if isinstance(value, jax.Array) else None
        return replace(leaf, extra={**leaf.extra, "sharding": text}) if text else leaf

    records = [with_sharding(*pair) for pair in zip(manifest.arrays["state"], jax.tree.leaves(tree), strict=True)]
    manifest = replace(manifest, arrays={"state": tuple(records)})
    same_bits(restore(arena, manifest, abstract_of(records)), tree)


# Every bit counts.


def test_flipped_bit_anywhere_is_rejected_by_name(arena: Arena) -> None:
    """If it failed, memory that rots would go into the model."""
    tree = {
        "a": jax.device_put(bits("bfloat16", (4, 2)), named("x", "y")),
        "b": np.arange(3, dtype=np.int8),
        "k": jax.random.key(1),
        "n": 7,
    }
    manifest = save(arena, tree)
    (slot,) = [slot for slot in arena._slots if slot.save_id == SAVE]
    covered = 0
    for leaf in manifest.arrays["state"]:
        for record in leaf.boxes:
            for bit in range(8 * record.box.size * leaf.itemsize):
                at = record.offset + bit // 8
                slot.memory[at] ^= 1 << bit % 8
                with pytest.raises(CorruptCheckpointError, match=rf"/slot-\d\.bin: leaf {leaf.name}, cell \("):
                    restore(arena, manifest, abstract(tree))
                slot.memory[at] ^= 1 << bit % 8
                covered += 1
    assert covered == 8 * manifest.held_bytes
    same_bits(restore(arena, manifest, abstract(tree)), tree)


def test_manifest_on_disk_restores_like_the_one_in_memory(arena: Arena) -> None:
    """If it failed, only the process that saved a step could restore it."""
    tree = big_tree(3) | {"k": jax.random.key(5), "n": 1}
    save(arena, tree)
    assert arena.directory is not None
    ((_, manifest),) = read_manifests([arena.directory])[0]
    same_bits(restore(arena, manifest, abstract(tree)), tree)


def test_a_target_needs_exactly_the_boxes_of_its_devices() -> None:
    """If it failed, a process would read the whole of every leaf, or miss a shard."""
    boxes = boxes_needed(named("x", "y"), (8, 4), 0)
    assert [box.start for box in boxes] == [(0, 0), (0, 2), (4, 0), (4, 2)]
    host = boxes_needed(None, (8, 4), 0)
    assert [(box.start, box.stop) for box in host] == [((0, 0), (8, 4))]
