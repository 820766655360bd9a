"""Boxes and cells: which bytes are whose, and that no byte is nobody's."""

from __future__ import annotations

import math
from itertools import islice

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ckptkit.model.boxes import (
    Box,
    blocks_of,
    boxes_by_process,
    cell_shape,
    cells_before,
    cells_of,
    choose_writers,
    in_rows,
    missing_elements,
    rows_between_cells,
)

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """The boxes of an array that is split evenly into `parts` along each dimension."""
    steps = [n // p for n, p in zip(shape, parts, strict=True)]
    return [
        Box(
            tuple(i * s for i, s in zip(at, steps, strict=True)),
            tuple((i + 1) * s for i, s in zip(at, steps, strict=True)),
        )
        for at in np.ndindex(*parts)
    ]


@st.composite
def split_arrays(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and the even split of it: `(shape, parts)`, every part with the same shape."""
    parts = draw(st.lists(st.integers(1, 3), max_size=4).map(tuple))
    return tuple(p * draw(st.integers(1, 13)) for p in parts), parts


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box, with elements or without, inside an array of `shape`."""
    pairs = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def marked(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many of `boxes` hold each element."""
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices()] += 1
    return count


@given(data=st.data(), split=split_arrays(), itemsize=st.sampled_from([1, 2, 4, 8, 16]), limit=st.integers(1, 400))
@settings(deadline=None, max_examples=300)
def test_cells_tile_a_box_exactly_and_in_order(
    data: st.DataObject, split: tuple[tuple[int, ...], tuple[int, ...]], itemsize: int, limit: int
) -> None:
    """If it failed, a digest would be of bytes of two cells, or some bytes would have no digest at all."""
    shape, parts = split
    box = data.draw(st.sampled_from(grid(shape, parts)))
    cell = cell_shape(shape, box.shape, itemsize, limit)
    elements = np.arange(math.prod(shape)).reshape(shape)
    in_box_order = elements[box.slices()].reshape(-1)
    in_cell_order = [elements[each.slices()].reshape(-1) for each in cells_of(box, cell)]
    # Concatenated, the cells are the box's own bytes: every element once, each cell contiguous.
    np.testing.assert_array_equal(np.concatenate(in_cell_order), in_box_order)


@given(split=split_arrays(), itemsize=st.sampled_from([1, 2, 4, 8, 16]), limit=st.integers(1, 400))
@settings(deadline=None, max_examples=300)
def test_no_cell_crosses_a_box(split: tuple[tuple[int, ...], tuple[int, ...]], itemsize: int, limit: int) -> None:
    """If it failed, two processes would write the same zarr chunk and the later one would erase the other's half."""
    shape, parts = split
    cell = cell_shape(shape, grid(shape, parts)[0].shape, itemsize, limit)
    boxes = grid(shape, parts)
    for box in boxes[0], boxes[len(boxes) // 2], boxes[-1]:
        for each in cells_of(box, cell):
            whole_chunk = all(
                start % rows == 0 and (stop - start == rows or stop == n)
                for start, stop, rows, n in zip(each.start, each.stop, cell, shape, strict=True)
            )
            assert whole_chunk, (box, each, cell)


@given(split=split_arrays(), itemsize=st.sampled_from([1, 2, 4, 8, 16]), limit=st.integers(1, 400))
@settings(deadline=None, max_examples=300)
def test_cells_respect_the_limit_or_the_documented_exception(
    split: tuple[tuple[int, ...], tuple[int, ...]], itemsize: int, limit: int
) -> None:
    """If it failed, one cell could be as large as a leaf, and a partial read or a digest would not be bounded."""
    shape, parts = split
    box_shape = grid(shape, parts)[0].shape
    cell = cell_shape(shape, box_shape, itemsize, limit)
    cell_bytes = math.prod(cell) * itemsize
    if cell_bytes <= max(limit, itemsize):
        return
    cut = [axis for axis, rows in enumerate(cell) if rows > 1]
    axis = cut[0]
    # Only a split dimension whose divisors are poor may exceed it, and then by the nearest divisor above.
    assert parts[axis] > 1
    row_bytes = itemsize * math.prod(box_shape[axis + 1 :])
    wanted = limit // row_bytes
    divisors = [d for d in range(1, box_shape[axis] + 1) if box_shape[axis] % d == 0]
    assert max(d for d in divisors if d <= max(1, wanted)) * 16 < wanted
    assert cell[axis] == min(d for d in divisors if d > wanted) <= 4 * wanted


def test_prime_dimension_takes_the_next_divisor_unless_far() -> None:
    """If it failed, a prime split would give a digest per row, or one cell as large as the whole box."""
    assert cell_shape((2 * 311, 4), (311, 4), 4, limit_bytes=1600) == (311, 4)
    assert cell_shape((2 * 10007, 4), (10007, 4), 4, limit_bytes=1600) == (1, 4)
    assert cell_shape((10007, 4), (10007, 4), 4, limit_bytes=1600) == (100, 4)  # not split: any rows will do


def test_cells_are_even_where_padding_allows() -> None:
    """If it failed, the last cell of every large leaf would be padded: 64 MiB of memory and of disk for each."""
    assert cell_shape((32_000_000,), (32_000_000,), 4) == (16_000_000,)
    assert cell_shape((1 << 26,), (1 << 26,), 4) == (1 << 24,)
    assert cell_shape((50257, 768), (50257, 768), 4) == (16753, 768)  # 29 x 1733: no divisor, two rows of padding


@pytest.mark.parametrize(("shape", "cells"), [((), 1), ((0,), 0), ((3, 0), 0), ((1,), 1)])
def test_scalars_have_one_cell_and_empty_arrays_none(shape: tuple[int, ...], cells: int) -> None:
    """If it failed, a scalar would have no digest, or an empty array one that no reader computes."""
    box = Box.whole(shape)
    assert len(cells_of(box, cell_shape(shape, shape, 4))) == cells


@given(data=st.data(), shape=SHAPES)
@settings(deadline=None)
def test_intersection_is_set_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """If it failed, a resharded restore would copy the wrong rows of a neighbour."""
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = marked(shape, [a]) * marked(shape, [b])
    common = a.intersect(b)
    np.testing.assert_array_equal(both, np.zeros(shape, int) if common is None else marked(shape, [common]))
    assert common == b.intersect(a)


@given(data=st.data(), split=split_arrays())
@settings(deadline=None)
def test_missing_elements_counts_what_no_box_covers(
    data: st.DataObject, split: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """If it failed, a save with a hole would pass for whole and the hole be restored as whatever memory held."""
    shape, parts = split
    held = data.draw(st.lists(st.sampled_from(grid(shape, parts)), unique=True))
    wanted = data.draw(boxes_in(shape))
    covered = marked(shape, held)[wanted.slices()]
    assert missing_elements(wanted, held) == np.count_nonzero(covered == 0)


@pytest.mark.parametrize(
    ("start", "stop"), [((0,), (1, 1)), ((2,), (1,)), ((-1,), (1,))], ids=["ranks", "reversed", "negative"]
)
def test_invalid_box_is_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    """If it failed, a damaged manifest could index an array from its end."""
    with pytest.raises(ValueError, match=r"not a box: start \("):
        Box(start, stop)


def test_boxes_of_a_sharding_are_every_distinct_slice_once() -> None:
    """If it failed, a replica would be stored twice or a shard not at all."""
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = boxes_by_process(NamedSharding(mesh, PartitionSpec(None, "fsdp")), (4, 6))
    assert split == {Box((0, 0), (4, 3)): (0,), Box((0, 3), (4, 6)): (0,)}
    assert boxes_by_process(NamedSharding(mesh, PartitionSpec()), (4,)) == {Box((0,), (4,)): (0,)}
    assert boxes_by_process(SingleDeviceSharding(jax.devices()[2]), ()) == {Box((), ()): (0,)}
    both = boxes_by_process(NamedSharding(mesh, PartitionSpec(("data", "fsdp"))), (8,))
    assert [box.start for box in both] == [(0,), (2,), (4,), (6,)]


@given(data=st.data(), processes=st.integers(1, 5), leaves=st.integers(0, 12))
@settings(deadline=None)
def test_every_box_has_one_writer_among_its_holders(data: st.DataObject, processes: int, leaves: int) -> None:
    """If it failed, a box would be missing from the durable step, or be written by one that does not have it."""
    some = st.lists(st.integers(0, processes - 1), min_size=1, unique=True).map(lambda p: tuple(sorted(p)))
    holders = [
        {
            Box((i,), (i + 1 + data.draw(st.integers(0, 50)),)): data.draw(some)
            for i in range(data.draw(st.integers(1, 4)))
        }
        for _ in range(leaves)
    ]
    itemsizes = [data.draw(st.sampled_from([1, 2, 4, 8])) for _ in holders]
    cells = [(data.draw(st.integers(1, 60)),) for _ in holders]
    writers = choose_writers(holders, itemsizes, cells)
    assert [list(chosen) for chosen in writers] == [list(boxes) for boxes in holders]
    for boxes, chosen in zip(holders, writers, strict=True):
        for box, parts in chosen.items():
            assert all(writer in boxes[box] for _, writer in parts)
            assert sum(part.size for part, _ in parts) == box.size
            assert missing_elements(box, [part for part, _ in parts]) == 0
    assert writers == choose_writers(holders, itemsizes, cells)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
    count=st.integers(1, 6),
)
def test_parts_between_cells_have_the_cells_of_the_box_in_order(
    shape: list[int], data: st.DataObject, count: int
) -> None:
    """If it failed, a part of a leaf would be recorded with the digests of another part, and be refused as damaged."""
    start = [data.draw(st.integers(0, 2)) for _ in shape]
    axis = data.draw(st.integers(0, len(shape) - 1))  # as `cell_shape` cuts: single rows, then some rows, then all
    cell = [1] * axis + [data.draw(st.integers(1, shape[axis]))] + shape[axis + 1 :]
    box = Box(
        tuple(a * step for a, step in zip(start, cell, strict=True)),
        tuple(a * step + n for a, step, n in zip(start, cell, shape, strict=True)),
    )
    parts = rows_between_cells(box, cell, count)
    assert 1 <= len(parts) <= count
    assert [each for part in parts for each in cells_of(part, cell)] == cells_of(box, cell)
    numbers = [len(cells_of(part, cell)) for part in parts]
    assert [cells_before(box, part, cell) for part in parts] == [sum(numbers[:at]) for at in range(len(parts))]


def test_one_large_replicated_leaf_is_written_by_all_its_holders() -> None:
    """If it failed, one process would write a replicated embedding while the others look on."""
    everybody, rows = tuple(range(4)), 1_000_003  # of 256 floats: 1 GB, and nothing divides it
    box = Box.whole((rows, 256))
    cell = cell_shape(box.shape, box.shape, 4)
    (chosen,) = choose_writers([{box: everybody}], [4], [cell])
    load = dict.fromkeys(everybody, 0)
    for part, writer in chosen[box]:
        load[writer] += part.size * 4
    assert max(load.values()) <= box.size * 4 / 4 + cell[0] * 256 * 4
    assert min(load.values()) > 0


def test_boxes_that_even_out_are_not_cut() -> None:
    """If it failed, a model of many layers would have as many more records, and small objects, as it has processes."""
    box = Box.whole((64, 1024))
    chosen = choose_writers([{box: (0, 1)}] * 40, [4] * 40, [(8, 1024)] * 40)
    assert all(parts[0][0] == box and len(parts) == 1 for each in chosen for parts in each.values())


@given(data=st.data(), processes=st.integers(1, 5))
@settings(deadline=None)
def test_writers_are_balanced_to_within_the_largest_box(data: st.DataObject, processes: int) -> None:
    """If it failed, one host would upload the whole checkpoint of a data-parallel job while the others look on."""
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=30))
    everybody = tuple(range(processes))
    cells = [(n,) for n in sizes]
    writers = choose_writers([{Box((0,), (n,)): everybody} for n in sizes], [4] * len(sizes), cells)
    load = [0] * processes
    for n, chosen in zip(sizes, writers, strict=True):
        ((_, writer),) = chosen[Box((0,), (n,))]
        load[writer] += 4 * n
    assert max(load) - min(load) <= 4 * max(sizes)


@given(st.lists(st.integers(1, 4), min_size=0, max_size=3), st.data())
def test_cells_in_rows_are_pieces_of_the_box_in_order(shape: list[int], data: st.DataObject) -> None:
    """If it failed, the cells of a box would be read to the wrong places, each of them proven."""
    cell = [data.draw(st.integers(1, n + 1)) for n in shape]
    order = np.arange(int(np.prod(shape))).reshape(shape)
    pieces = [order[c.slices()].ravel() for c in cells_of(Box.whole(tuple(shape)), cell)]
    assert in_rows(shape, cell) == (np.concatenate(pieces).tolist() == order.ravel().tolist())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=3))
def test_blocks_tile_an_array_in_order(sizes: list[tuple[int, int]]) -> None:
    """A conversion would leave out a part of an array, or write one twice."""
    shape, block = [n for n, _ in sizes], [rows for _, rows in sizes]
    found = list(blocks_of(shape, block))
    assert [box.start for box in found] == sorted({box.start for box in found})
    assert (marked(tuple(shape), found) == 1).all()
    assert all(rows <= most for box in found for rows, most in zip(box.shape, block, strict=True))


def test_blocks_of_a_hostile_shape_take_no_memory() -> None:
    """A shape that was changed to 2**60 would take all memory before any block is read."""
    first, second = islice(blocks_of((1 << 60, 3), (1024, 2)), 2)
    assert (first.stop, second.start) == ((1024, 2), (0, 2))
