"""Reading what a plan names: in shared blocks, in parts, from several sources, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import CheckpointError, CorruptCheckpointError, PeerUnreachableError
from ckptkit.model.boxes import Box, cells_of
from ckptkit.model.cells import copy_proven
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.restore import read as box_reading
from ckptkit.restore.local_tiers import together
from ckptkit.restore.plan import Key, RestorePlan, Source, plan_restore
from ckptkit.util.pages import ALIGNMENT_BYTES

SAVE = SaveId(1, 5, 1)
DTYPES = ["uint8", "bfloat16", "float32", "complex64"]


@st.composite
def stored_leaves(draw: st.DrawFn) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Arrays with the shape of their cells; sizes on both sides of every threshold below."""
    leaves = []
    for _ in range(draw(st.integers(1, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 40), min_size=0, max_size=2)))
        cell = tuple(draw(st.integers(1, max(1, n))) for n in shape)
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        values = np.frombuffer(np.random.default_rng(len(leaves)).bytes(int(np.prod(shape)) * dtype.itemsize), dtype)
        leaves.append((values.reshape(shape), cell))
    return leaves


def manifest_of(leaves: Sequence[tuple[np.ndarray, tuple[int, ...]]]) -> Manifest:
    """Every leaf stored as one box; offsets are not used."""
    records = []
    for number, (values, cell) in enumerate(leaves):
        box = Box.whole(values.shape)
        digests = tuple(digest_of(values[c.slices()].tobytes()) for c in cells_of(box, cell))
        records.append(
            LeafRecord(
                path=(str(number),),
                keys="d",
                kind="jax",
                shape=values.shape,
                dtype=str(values.dtype),
                cell=cell,
                boxes=(BoxRecord(box=box, offset=0, digests=digests),),
            )
        )
    return Manifest(
        save_id=SAVE,
        writer=Writer(process=0, count=1, host="h"),
        slot="slot-0.bin",
        arrays={"state": tuple(records)},
        inline={},
    )


def halves(shape: tuple[int, ...]) -> list[Box]:
    """The request of two devices that hold a half each, if there are two."""
    if not shape or shape[0] < 2:
        return [Box.whole(shape)]
    middle = shape[0] // 2
    rest = (0,) * (len(shape) - 1)
    return [Box((0, *rest), (middle, *shape[1:])), Box((middle, *rest), shape)]


def reader(leaves: Sequence[tuple[np.ndarray, tuple[int, ...]]], spoil: Callable[[str, Box], None]) -> Any:
    """Reads from the arrays; `spoil` may raise."""

    def read(item: str, leaf: LeafRecord, record: BoxRecord, wanted: Box, into: np.ndarray) -> None:
        assert item == "state"
        spoil(leaf.name, wanted)
        copy_proven(leaf, record, wanted, into, lambda c, *_: leaves[int(leaf.name)][0][c.slices()], where="there")

    return read


def executed(
    plan: RestorePlan, readers: Sequence[Any], rejected: Any, announced: frozenset[int]
) -> tuple[dict[Key, Any], dict[str, int]]:
    """Under thresholds so low that small arrays take every way."""
    found: dict[Key, Any] = {}

    def proven(key: Key, blocks: dict[Box, np.ndarray]) -> None:
        assert key not in found, "a leaf is given once"
        found[key] = {box: block.copy() for box, block in blocks.items()}
        assert not any(block.ctypes.data % ALIGNMENT_BYTES for block in blocks.values() if block.size)

    with (
        mock.patch.object(box_reading, "_BLOCK_BYTES", 512),
        mock.patch.object(box_reading, "SMALL_BYTES", 128),
        mock.patch.object(box_reading, "copy_threads", return_value=3),
    ):
        return found, box_reading.execute(plan, readers, rejected, proven, announced=announced)


def check(found: dict[Key, Any], leaves: Sequence[tuple[np.ndarray, tuple[int, ...]]]) -> None:
    """Every wanted box is there, and has the bytes."""
    assert set(found) == {("state", (str(number),)) for number in range(len(leaves))}
    for key, blocks in found.items():
        values = leaves[int(key[1][0])][0]
        for box, block in blocks.items():
            assert (block.shape, block.dtype) == (box.shape, values.dtype)
            assert block.tobytes() == values[box.slices()].tobytes()


@settings(max_examples=60, deadline=None)
@given(stored_leaves(), st.booleans(), st.booleans(), st.data())
def test_every_read_method_gives_the_same_bytes(leaves: Any, split: bool, remote: bool, data: st.DataObject) -> None:
    """If it failed, arrays of some size, or some mesh, would come back with another's bytes.

    The first source loses some of its boxes: they come from the second, and are counted there.
    """
    manifest = manifest_of(leaves)
    sources = [Source(tier="ram", manifests=(manifest,), remote=remote), Source(tier="ssd", manifests=(manifest,))]
    wanted = {
        ("state", leaf.path): halves(leaf.shape) if split else [leaf.boxes[0].box] for leaf in manifest.arrays["state"]
    }
    lost = data.draw(st.sets(st.integers(0, len(leaves) - 1)))
    error = data.draw(st.sampled_from([CorruptCheckpointError, PeerUnreachableError]))

    def spoil(name: str, wanted: Box) -> None:
        if int(name) in lost:
            raise error(f"leaf {name}, {wanted}")

    told: list[CheckpointError] = []
    plan = plan_restore(SAVE, wanted, sources)
    readers = [reader(leaves, spoil), reader(leaves, lambda *_: None)]
    announced = frozenset({0} if data.draw(st.booleans()) else ())
    found, read_bytes = executed(plan, readers, lambda _, error: told.append(error), announced)
    check(found, leaves)
    of_tier = {"ram": 0, "ssd": 0}
    for number, (values, _) in enumerate(leaves):
        of_tier["ssd" if number in lost else "ram"] += values.nbytes
    assert {tier: read_bytes.get(tier, 0) for tier in of_tier} == of_tier
    assert bool(told) == bool(lost)


def test_leaf_damaged_in_every_source_raises_one_error() -> None:
    """If it failed, a leaf that is bad everywhere would be returned, or the readers of the others would never end."""
    leaves = [(np.arange(4096, dtype=np.float32).reshape(64, 64), (4, 64)) for _ in range(4)]
    manifest = manifest_of(leaves)
    plan = plan_restore(
        SAVE,
        {("state", leaf.path): [leaf.boxes[0].box] for leaf in manifest.arrays["state"]},
        [Source(tier=tier, manifests=(manifest,)) for tier in ("ram", "ssd")],
    )
    bad = [(values.copy(), cell) for values, cell in leaves]
    bad[2][0][63, 63] = -1
    given_back: list[Key] = []
    with (
        mock.patch.object(box_reading, "_BLOCK_BYTES", 512),
        pytest.raises(CorruptCheckpointError, match=r"there: leaf 2, cell \(60, 0\) to \(64, 64\) has digest"),
    ):
        box_reading.execute(
            plan,
            [reader(bad, lambda *_: None)] * 2,
            lambda *_: None,
            lambda key, _: given_back.append(key),
        )
    assert ("state", ("2",)) not in given_back


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("joined", [False, True])
def test_unreachable_source_is_not_treated_as_damage(order: tuple[int, int], joined: bool) -> None:
    """If it failed, all would go back to an older step because one copy is damaged, while a whole one cannot be reached
    for the moment."""
    leaves = [(np.arange(64, dtype=np.float32), (64,))]
    manifest = manifest_of(leaves)

    def away(*_: Any) -> None:
        raise PeerUnreachableError("process 3 did not answer")

    bad = [(leaves[0][0] + 1, (64,))]
    readers = [reader(leaves, away), reader(bad, lambda *_: None)]
    sources = [(Source(tier="peer", manifests=(manifest,)), readers[number]) for number in order]
    if joined:
        sources = [together(sources, "peer")]
    plan = plan_restore(SAVE, {("state", ("0",)): [Box.whole((64,))]}, [source for source, _ in sources])
    with pytest.raises(PeerUnreachableError, match="process 3 did not answer"):
        box_reading.execute(plan, [each for _, each in sources], lambda *_: None, lambda *_: None)


def test_a_record_of_another_dtype_is_damage() -> None:
    """If it failed, a manifest of another share could fill a block with elements of another kind."""
    one, other = ((np.arange(8, dtype=dtype), (8,)) for dtype in (np.int32, np.float32))
    sources = [Source(tier=tier, manifests=(manifest_of([leaf]),)) for tier, leaf in (("ram", one), ("ssd", other))]
    plan = plan_restore(SAVE, {("state", ("0",)): [Box((0,), (8,))]}, sources)

    def spoil(name: str, wanted: Box) -> None:
        raise CorruptCheckpointError(f"{name} {wanted}")

    with pytest.raises(CorruptCheckpointError, match="two dtypes"):
        box_reading.execute(
            plan, [reader([one], spoil), reader([other], lambda *_: None)], lambda *_: None, lambda *_: None
        )
