"""A state into a slot and back, as the manager does it, and the bits of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckptkit.model.manifest import Manifest, SaveId, Writer
from ckptkit.restore.place import place
from ckptkit.restore.plan import Source, plan_restore
from ckptkit.restore.read import execute
from ckptkit.restore.tree import targets_of
from ckptkit.slots.arena import Arena
from ckptkit.slots.reader import SlotReader
from ckptkit.snapshot import copying, describe, shards

SAVE = SaveId(1, 5, 0)


def mesh() -> Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def named(*spec: Any) -> NamedSharding:
    return NamedSharding(mesh(), PartitionSpec(*spec))


SHARDINGS: dict[str, Callable[[], jax.sharding.Sharding]] = {
    "replicated": lambda: named(),
    "rows": lambda: named("x"),
    "rows over both": lambda: named(("x", "y")),
    "columns": lambda: named(None, "y"),
    "2-D": lambda: named("x", "y"),
    "one device": lambda: SingleDeviceSharding(jax.devices()[3]),
}
DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int4",
    "uint4",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "bool",
    "complex64",
]
SMALL_INTEGERS = {"int4": np.arange(-8, 8), "uint4": np.arange(16), "bool": np.arange(2)}


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Every kind of bit pattern that the dtype has: -0.0, NaNs with payloads and signs, denormals, infinities."""
    rng = np.random.default_rng(seed)
    if dtype in SMALL_INTEGERS:
        return rng.choice(SMALL_INTEGERS[dtype], shape).astype(np.dtype(dtype))
    size = int(np.prod(shape))
    itemsize = np.dtype(dtype).itemsize
    raw = rng.integers(0, 256, size * itemsize, np.uint8)
    if dtype == "float32" and size >= 8:
        raw = raw.view(np.uint32)
        raw[:8] = [0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x00000001, 0x7F800000, 0xFF800000, 0]
    return raw.view(np.dtype(dtype)).reshape(shape)


def big_tree(seed: int) -> dict[str, jax.Array]:
    """Large and aligned enough for transfers without a copy, replicated and split."""
    return {
        "replicated": jax.device_put(bits("float32", (64, 64), seed), named()),
        "split": jax.device_put(bits("float32", (64, 64), seed + 1), named("x", "y")),
        "half": jax.device_put(bits("int32", (64, 64), seed + 2), named("x")),
        "one": jax.device_put(bits("int32", (64, 64), seed + 3), SingleDeviceSharding(jax.devices()[0])),
    }


def save(arena: Arena, tree: Any, save_id: SaveId = SAVE) -> Manifest:
    """The manager's work on a state: describe, stage, digest, commit."""
    description = describe.describe_items({"state": tree})
    slot = arena.acquire(description.slot_bytes)
    assert slot is not None
    slot.memory[:] = 0xEE
    digests = copying.copy_shards(shards.local_shards(description, {"state": tree}), slot.memory)
    manifest = Manifest(
        save_id=save_id,
        writer=Writer(process=0, count=1, host="h"),
        slot=slot.name,
        arrays=describe.with_digests(description, digests),
        inline={},
    )
    arena.commit(slot, manifest.save_id, manifest.to_bytes())
    arena.release(slot)
    return manifest


def restore(arena: Arena, manifest: Manifest, abstract: Any) -> Any:
    """The manager's work to restore it: compare, plan, read and verify, place."""
    assert arena.directory is not None
    stored = manifest.arrays["state"]
    targets = targets_of("state", describe.leaves_by_path(abstract), stored, step=manifest.save_id.step, where="here")
    source = Source(tier="ram", manifests=(manifest,))
    plan = plan_restore(manifest.save_id, {target.key: target.form.boxes for target in targets}, [source])
    slot = SlotReader(arena.directory, manifest)

    def read(item: str, leaf: Any, record: Any, wanted: Any, into: Any) -> None:
        assert item == "state"
        slot.read(leaf, record, wanted, into)

    blocks: dict[Any, Any] = {}
    execute(plan, [read], lambda *_: None, blocks.__setitem__)
    leaves = [place(target, blocks[target.key]) for target in targets]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(abstract), leaves)


def plain(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        where = jax.tree_util.keystr(path)
        assert type(a) is type(b), where
        if isinstance(a, jax.Array):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), where
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (where, a.sharding, b.sharding)
        assert (plain(a).dtype, plain(a).shape) == (plain(b).dtype, plain(b).shape), where
        assert plain(a).tobytes() == plain(b).tobytes(), where
