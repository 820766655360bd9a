"""The pure parts of a reshard against brute force: boxes, amplification, chunks, blocks, pieces, shares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.conversion.passes import block_shape, reads
from ckptkit.conversion.resharding.executing import share_of
from ckptkit.conversion.resharding.meshes import Mesh, Spec, box_shape, default_spec, full_spec, sharding_json
from ckptkit.conversion.resharding.planning import amplification, chunk_shape, read_by_devices, worst_amplification
from ckptkit.model.boxes import Box, blocks_of, boxes_of_cells, cells_of, pieces_of
from ckptkit.model.leaf_info import parsed_sharding, sharding_words

SIZES = st.integers(1, 12)
GRIDS = st.integers(1, 3).flatmap(
    lambda n: st.tuples(*(st.lists(SIZES, min_size=n, max_size=n).map(tuple) for _ in range(3)))
)


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], Spec, Mesh]:
    """A shape, and a spec that fits it, on a mesh of up to three axes."""
    mesh = Mesh(tuple((name, draw(st.integers(1, 3))) for name in "abc"[: draw(st.integers(1, 3))]))
    names = draw(st.permutations([name for name, _ in mesh.axes]))
    cuts = sorted(draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    spec = tuple(tuple(part) for part in (names[: cuts[0]], names[cuts[0] : cuts[1]]))
    shape = tuple(mesh.size(part) * draw(st.integers(1, 4)) for part in (*spec, ()))
    return shape, spec, mesh


def cells_touched(box: Box, cell: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Index by index."""
    spans = zip(box.start, box.stop, cell, strict=True)
    return set(itertools.product(*({index // step for index in range(a, b)} for a, b, step in spans)))


def elements_touched(box: Box, cell: tuple[int, ...]) -> int:
    """Of all cells that a box touches, each counted whole."""
    return len(cells_touched(box, cell)) * math.prod(cell)


def boxes_of_devices(shape: tuple[int, ...], spec: Spec, mesh: Mesh) -> list[Box]:
    """The box of each device, in the mesh's order."""
    inner = box_shape(shape, spec, mesh)
    parts = [mesh.part_of_devices(names) for names in full_spec(spec, len(shape))]
    starts = [
        tuple(int(part[device]) * rows for part, rows in zip(parts, inner, strict=True))
        for device in range(mesh.devices)
    ]
    return [Box(start, tuple(a + rows for a, rows in zip(start, inner, strict=True))) for start in starts]


@given(splits(), st.lists(SIZES, min_size=3, max_size=3).map(tuple))
def test_amplification_equals_counted_chunks(split: tuple[tuple[int, ...], Spec, Mesh], cell: tuple[int, ...]) -> None:
    """If it failed, the plan would promise reads that no process sees."""
    shape, spec, mesh = split
    counted = [elements_touched(box, cell) for box in boxes_of_devices(shape, spec, mesh)]
    assert read_by_devices(shape, spec, mesh, cell).tolist() == counted
    found = amplification([(shape, spec, cell, 4)] * 2, mesh)
    needed = math.prod(box_shape(shape, spec, mesh))
    assert found.read_bytes == 8 * sum(counted)
    assert found.needed_bytes == 8 * needed * mesh.devices
    assert found.worst == max(counted) / needed
    assert found.mean == sum(counted) / (needed * mesh.devices)


@pytest.mark.parametrize("axes", ["a=4", "a=2,b=2", "a=1,b=4"])
@pytest.mark.parametrize("spec", [(), (("a",),), (("b",), ("a",)), ((), ("b", "a")), (("a", "b"),)])
def test_boxes_equal_those_of_jax(axes: str, spec: Spec) -> None:
    """If it failed, the chunks would be those of a mesh that nobody has."""
    mesh = Mesh.parse(axes)
    if any(name not in dict(mesh.axes) for part in spec for name in part):
        spec = tuple(tuple(name for name in part if name in dict(mesh.axes)) for part in spec)
    types = (jax.sharding.AxisType.Auto,) * len(mesh.axes)
    real = jax.make_mesh([size for _, size in mesh.axes], [name for name, _ in mesh.axes], axis_types=types)
    sharding = jax.sharding.NamedSharding(real, jax.sharding.PartitionSpec(*spec))
    shape = (8, 16, 3)
    indices = sharding.devices_indices_map(shape)
    expected = [Box.of_index(indices[device], shape) for device in real.devices.reshape(-1)]
    assert boxes_of_devices(shape, spec, mesh) == expected
    assert parsed_sharding(sharding_words(sharding_json(spec, mesh))) == (spec, dict(mesh.axes))


@given(st.lists(st.integers(1, 40), min_size=0, max_size=4), st.sampled_from(["a=2,b=4", "a=3,b=2,c=2", "a=8", "a=1"]))
def test_the_default_split_is_the_largest_dimension(shape: list[int], axes: str) -> None:
    """If it failed, leaves would be whole on every device, or split where the mesh does not fit."""
    mesh = Mesh.parse(axes)
    spec = default_spec(shape, mesh)
    box_shape(shape, spec, mesh)  # fits
    fitting = [size for size in shape if size % mesh.devices == 0]
    if fitting and mesh.devices > 1:
        (axis,) = (axis for axis, part in enumerate(spec) if part)
        assert (shape[axis], mesh.size(spec[axis])) == (max(fitting), mesh.devices)
    elif spec == ():
        assert all(size % part for size in shape for _, part in mesh.axes if part > 1)


@given(splits(), st.integers(1, 400))
def test_chunks_for_one_mesh_are_each_read_whole_by_one_box(
    split: tuple[tuple[int, ...], Spec, Mesh], chunk_bytes: int
) -> None:
    """If it failed, a process would read bytes of its neighbours' on the very mesh that was asked for."""
    shape, spec, mesh = split
    box = box_shape(shape, spec, mesh)
    cell = chunk_shape(shape, (box,), 4, chunk_bytes)
    found = amplification([(shape, spec, cell, 4)], mesh)
    if all(rows % step == 0 for rows, step in zip(box, cell, strict=True)):
        assert found.worst == 1
    for rows, step, size in zip(box, cell, shape, strict=True):
        assert rows % step == 0 or rows == size  # only the end of an array is padded
    assert math.prod(cell) * 4 <= max(4 * chunk_bytes, 4)


@given(st.data())
def test_chunks_for_several_meshes_bound_the_amplification(data: st.DataObject) -> None:
    """If it failed, the layout that suits all meshes would suit one, or cost a request for every few bytes."""
    parts = data.draw(
        st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 5])), min_size=2, max_size=3)
    )
    shape = (12 * data.draw(st.integers(1, 60)), 10 * data.draw(st.integers(1, 60)))
    boxes = tuple((shape[0] // a, shape[1] // b) for a, b in parts)
    common = tuple(math.gcd(*sizes) for sizes in zip(*boxes, strict=True))
    cell = chunk_shape(shape, boxes, 4, 1 << 30)
    floor = min(64 << 10, *(4 * math.prod(box) for box in boxes))
    assert 4 * math.prod(cell) >= floor
    if 4 * math.prod(common) >= floor:
        assert worst_amplification(shape, boxes, cell) == 1
    else:
        assert all(worst_amplification(shape, boxes, cell) <= worst_amplification(shape, boxes, box) for box in boxes)


@given(GRIDS)
def test_worst_amplification_is_the_mean_over_boxes(grids: tuple[tuple[int, ...], ...]) -> None:
    """If it failed, the compromise between meshes would be chosen by another measure than is printed."""
    boxes, cell, times = grids
    shape = tuple(a * b for a, b in zip(boxes, times, strict=True))
    counted = [elements_touched(box, cell) for box in blocks_of(shape, boxes)]
    assert worst_amplification(shape, (boxes,), cell) == pytest.approx(sum(counted) / math.prod(shape))


def covers(boxes: Iterator[Box] | list[Box], shape: tuple[int, ...]) -> bool:
    seen = np.zeros(shape, int)
    for box in boxes:
        seen[box.slices()] += 1
    return bool((seen == 1).all())


@given(GRIDS, st.integers(1, 300), st.integers(1, 300))
@settings(deadline=None)
def test_blocks_are_whole_chunks_with_the_fewest_reads(
    grids: tuple[tuple[int, ...], ...], limit: int, handy: int
) -> None:
    """If it failed, memory would grow over the budget, or the source be read again and again."""
    shape, source, target = grids
    block = block_shape(shape, source, target, limit, handy)
    assert all(rows % step == 0 for rows, step in zip(block, target, strict=True))
    assert math.prod(block) <= limit or block == target
    assert covers(blocks_of(shape, block), shape)
    counted = sum(len(cells_touched(box, source)) for box in blocks_of(shape, block)) * math.prod(source)
    assert reads(shape, source, block) == counted
    # Nothing that is twice as large, up to the limit, would read less than half.
    every = itertools.product(*(range(t, -(-n // t) * t + 1, t) for n, t in zip(shape, target, strict=True)))
    best = min((reads(shape, source, each) for each in every if math.prod(each) <= limit), default=None)
    assert best is None or reads(shape, source, block) <= 2 * best


@given(GRIDS, st.integers(1, 300))
@settings(deadline=None)
def test_pieces_touch_each_chunk_once(grids: tuple[tuple[int, ...], ...], limit: int) -> None:
    """If it failed, one chunk would be read for two pieces, or a piece be more than the budget."""
    shape, source, stop = grids
    block = Box(tuple(min(n - 1, s // 2) for n, s in zip(shape, stop, strict=True)), shape)
    pieces = list(pieces_of(block, source, limit))
    touched = [cells_touched(piece, source) for piece in pieces]
    assert sum(map(len, touched)) == len(set().union(*touched)) == len(cells_touched(block, source))
    assert all(len(each) * math.prod(source) <= max(limit, math.prod(source)) for each in touched)
    assert sum(piece.size for piece in pieces) == block.size


@given(GRIDS)
def test_boxes_of_cells_hold_leading_rows(grids: tuple[tuple[int, ...], ...]) -> None:
    """If it failed, a digest would be taken for that of other bytes: readers take a cell for a run of its box."""
    shape, cell, _ = grids
    array = np.arange(math.prod(shape)).reshape(shape)
    boxes = boxes_of_cells(Box.whole(shape), cell)
    assert covers(boxes, shape)
    for box in boxes:
        inner = array[box.slices()]
        runs = [array[each.slices()].reshape(-1) for each in cells_of(box, cell)]
        assert np.concatenate(runs).tolist() == inner.reshape(-1).tolist()


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 6))
def test_shares_are_disjoint_complete_and_even(sizes: list[int], count: int) -> None:
    """If it failed, a block would be written by two processes, or by none."""
    shares = [share_of(sizes, process, count) for process in range(count)]
    assert [at for share in shares for at in share] == list(range(len(sizes)))
    if sum(sizes):
        assert max(sum(sizes[at] for at in share) for share in shares) <= sum(sizes) / count + max(sizes)


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=2,data=2", "data=2;model=4", "=3", "a=99999999"])
def test_invalid_mesh_is_refused(text: str) -> None:
    """If it failed, a typing error would be a plan for another machine."""
    with pytest.raises(ValueError, match="mesh"):
        Mesh.parse(text)
