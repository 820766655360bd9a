"""Reading slots: the boxes that lie in them, and many at once."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.model.boxes import Box
from ckptkit.model.digests import digest_of
from ckptkit.model.manifest import BoxRecord, LeafRecord, Manifest, SaveId, Writer
from ckptkit.slots.reader import SlotReader, manifest_name_of, read_manifest, within
from ckptkit.util.pages import flat_block

SHAPES = [(0,), (3,), (8, 8), (16,)]


def manifest_of(offsets: list[int], shapes: list[tuple[int, ...]]) -> Manifest:
    """A leaf of one box at each offset, alternating between float32 and int16."""
    leaves = [
        LeafRecord(
            path=(str(number),),
            keys="d",
            kind="jax",
            shape=shape,
            dtype=("float32", "int16")[number % 2],
            cell=tuple(max(1, n) for n in shape),
            boxes=(BoxRecord(box=Box.whole(shape), offset=offset, digests=("",)),),
        )
        for number, (offset, shape) in enumerate(zip(offsets, shapes, strict=True))
    ]
    writer = Writer(process=0, count=1, host="h")
    return Manifest(save_id=SaveId(1, 1, 1), writer=writer, slot="slot-0.bin", arrays={"s": tuple(leaves)}, inline={})


@example([(0, (3,), True), (0, (8, 8), False)], 100)  # one without a place, which is larger than the slot
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(SHAPES), st.booleans()), max_size=6), st.integers(0, 900))
def test_only_boxes_inside_the_slot_are_left(boxes: list[tuple[int, tuple[int, ...], bool]], size_bytes: int) -> None:
    """Memory would be allocated for whatever a manifest claims beyond the end of its slot."""
    offsets, at = [], 0
    for gap, shape, placed in boxes:
        offsets.append(at + gap if placed else -1)
        at += gap + int(np.prod(shape)) * 4
    order = np.random.default_rng(len(boxes)).permutation(len(boxes))
    manifest = manifest_of([offsets[i] for i in order], [boxes[i][1] for i in order])
    found = within(manifest, size_bytes)
    for leaf, before in zip(found.arrays["s"], manifest.arrays["s"], strict=True):
        (record,) = before.boxes
        inside = record.offset + record.box.size * before.itemsize <= size_bytes
        assert leaf.boxes == (before.boxes if inside else ())


def test_manifest_of_many_leaves_is_read_without_a_collection(tmp_path: Path) -> None:
    """Collections look at each leaf again and again: half of the time in which a restart learns what its slots hold."""
    manifest = manifest_of([4096 * number for number in range(4000)], [(8, 8)] * 4000)
    path = tmp_path / manifest_name_of(manifest.save_id)
    path.write_bytes(manifest.to_bytes())
    before = sum(each["collections"] for each in gc.get_stats())
    assert read_manifest(path) == manifest
    assert sum(each["collections"] for each in gc.get_stats()) - before <= 2  # the one that was put off


def test_boxes_of_many_forms_come_from_one_copy(tmp_path: Path) -> None:
    """A leaf would have another's shape, type or bytes, or a damaged one would be returned."""
    shapes: list[tuple[int, ...]] = [[(8, 8), (64,), (4, 16)][number % 3] for number in range(30)]
    manifest = manifest_of([256 * ((7 * number) % 30) for number in range(30)], shapes)
    memory = np.random.default_rng(0).integers(0, 256, 30 * 256).astype(np.uint8)
    boxes, expected = [], []
    for leaf in manifest.arrays["s"]:
        (record,) = leaf.boxes
        stored = memory[record.offset : record.offset + leaf.held_bytes]
        expected.append(stored.view(leaf.dtype).reshape(leaf.shape).copy())
        boxes.append((leaf, replace(record, digests=(digest_of(stored),))))
    memory[boxes[4][1].offset] ^= 1
    memory.tofile(tmp_path / manifest.slot)
    found = SlotReader(tmp_path, manifest).read_run([(leaf, record) for leaf, record in boxes], flat_block)
    assert found[4] is None
    for block, wanted in zip(found[:4] + found[5:], expected[:4] + expected[5:], strict=True):
        assert block is not None
        assert (block.dtype, block.shape, block.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
