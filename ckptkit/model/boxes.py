"""Boxes: which slice of a global array is held where, and how a box is cut into cells. Pure functions.

A *box* is a slice of a global array that one process holds; a *cell* is the unit of digests, of copies and of
the durable layout's zarr chunks. A cell is a whole number of leading rows of its box (C order), so the bytes of
a cell are contiguous in the bytes of its box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ge, sub
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax  # half a second that reading metadata does not pay

_TRIED_MAX = 1 << 20  # divisors: 0.05 s
CELL_BYTES = 64 << 20  # bounded, so that copies, digests and partial reads run in parallel (DESIGN, format)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open slice `[start, stop)` of a global array, one pair per dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")
        for a, b in zip(self.start, self.stop, strict=True):  # no generator: it is made for every box of every leaf
            if not 0 <= a <= b:
                raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of an array of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of_index(cls, index: Sequence[slice], shape: Sequence[int]) -> Box:
        """The box of a shard's index, as JAX gives it (`Shard.index`, `devices_indices_map`)."""
        bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        return cls(tuple(a for a, _, _ in bounds), tuple(b for _, b, _ in bounds))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(map(sub, self.stop, self.start))

    def intersect(self, other: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty (a box without elements intersects nothing)."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """The index of this box in its global array, or in a block that begins at `origin`."""
        origin = origin if origin is not None else (0,) * len(self.start)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin, strict=True))


def blocks_of(shape: Sequence[int], block: Sequence[int]) -> Iterator[Box]:
    """The blocks of an array in C order, the last of each dimension cut off; none of an array without elements.

    Cost: the memory of one box, also for a hostile shape with 2**60 blocks.
    """
    counts = [-(-n // rows) if n else 0 for n, rows in zip(shape, block, strict=True)]
    for number in range(math.prod(counts)):
        rest, start = number, [0] * len(counts)
        for axis in reversed(range(len(counts))):
            rest, at = divmod(rest, counts[axis])
            start[axis] = at * block[axis]
        yield Box(tuple(start), tuple(min(a + b, n) for a, b, n in zip(start, block, shape, strict=True)))


def pieces_of(block: Box, source: Sequence[int], limit: int) -> Iterator[Box]:
    """`block` in pieces, each of which touches source chunks of at most `limit` elements together, or one chunk.

    Pieces end where source chunks do, so no chunk is read for two of them.
    """
    grown = [max(1, rows) for rows in source]
    touched = [-(-b // s) - a // s for a, b, s in zip(block.start, block.stop, grown, strict=True)]
    counts = [1] * len(grown)
    for axis in reversed(range(len(grown))):
        counts[axis] = max(1, min(touched[axis], limit // max(1, math.prod(grown) * math.prod(counts))))
        if counts[axis] < touched[axis]:
            break
    cuts = []
    for a, b, rows, count in zip(block.start, block.stop, grown, counts, strict=True):
        step = rows * count
        inner = range((a // rows) * rows + step, b, step)
        cuts.append(list(itertools.pairwise([a, *inner, b])))
    for spans in itertools.product(*cuts):
        yield Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))


def missing_elements(wanted: Box, held: Iterable[Box]) -> int:
    """How many elements of `wanted` no box of `held` covers; the boxes of `held` may overlap."""
    missing = [wanted] if wanted.size else []
    for box in held:
        missing = [rest for part in missing for rest in _without(part, box)]
    return sum(part.size for part in missing)


def _without(box: Box, taken: Box) -> list[Box]:
    """`box` less `taken`, as boxes that do not overlap."""
    if box == taken:  # most often
        return []
    common = box.intersect(taken)
    if common is None:
        return [box]
    rest, start, stop = [], list(box.start), list(box.stop)
    for axis in range(len(start)):
        for low, high in ((start[axis], common.start[axis]), (common.stop[axis], stop[axis])):
            if low < high:
                rest.append(Box((*start[:axis], low, *start[axis + 1 :]), (*stop[:axis], high, *stop[axis + 1 :])))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
    return rest


@lru_cache(maxsize=4096)
def boxes_by_process(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Mapping[Box, tuple[int, ...]]:
    """Every distinct box of a global array with the processes that hold it, both in ascending order.

    Every process computes the same answer: it is a function of the global sharding alone. Remembered, for a state has
    many leaves of few shapes.
    """
    held: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        held.setdefault(Box.of_index(index or (), shape), set()).add(device.process_index)
    return {box: tuple(sorted(held[box])) for box in sorted(held)}


@lru_cache(maxsize=4096)
def boxes_held(sharding: jax.sharding.Sharding, shape: tuple[int, ...], process: int) -> tuple[Box, ...]:
    """The distinct boxes of a global array that a process holds, ascending."""
    return tuple(box for box, processes in boxes_by_process(sharding, shape).items() if process in processes)


def local_devices_by_box(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """The devices of this process that hold each box of a global array."""
    holding: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holding.setdefault(Box.of_index(index or (), shape), []).append(device)
    return holding


Parts = tuple[tuple[Box, int], ...]  # what a box is cut into, in order, each with the process that writes it


def choose_writers(
    holders: Sequence[Mapping[Box, tuple[int, ...]]], itemsizes: Sequence[int], cells: Sequence[Sequence[int]]
) -> list[dict[Box, Parts]]:
    """Which process writes each box of each leaf to the durable tier: once each, evenly by bytes.

    A box that several processes hold, and that is more than an eighth of what a process writes on average, is cut
    between cells into as many parts as it has holders. Smaller ones even out. Greedy in the given order: a part goes
    to the holder with the fewest bytes so far (ties: the lowest process). `cells` is the cell of each leaf.
    Deterministic, so that every process computes the same answer without talking.
    """
    least_bytes = cut_from_bytes(
        sum(box.size * itemsize for boxes, itemsize in zip(holders, itemsizes, strict=True) for box in boxes),
        len({process for boxes in holders for processes in boxes.values() for process in processes}),
    )
    load: dict[int, int] = {}
    chosen: list[dict[Box, Parts]] = []
    for boxes, itemsize, cell in zip(holders, itemsizes, cells, strict=True):
        writers: dict[Box, Parts] = {}
        # All boxes of a leaf are cut in the same way: their parts are a grid, as manifests require.
        count = min(map(len, boxes.values()), default=1)
        for box, processes in boxes.items():
            parts = []
            is_cut = count > 1 and box.size * itemsize > least_bytes
            for part in rows_between_cells(box, cell, count) if is_cut else [box]:
                writer = min(processes, key=lambda process: (load.get(process, 0), process))
                load[writer] = load.get(writer, 0) + part.size * itemsize
                parts.append((part, writer))
            writers[box] = tuple(parts)
        chosen.append(writers)
    return chosen


def cut_from_bytes(total_bytes: int, processes: int) -> float:
    """Boxes of more bytes than this are cut: an eighth of what a process writes on average."""
    return total_bytes / max(1, processes) / 8


def rows_between_cells(box: Box, cell: Sequence[int], count: int) -> list[Box]:
    """`box` cut into at most `count` parts of whole cells, in order: along the first dimension that has several. The
    cells of a part follow one another among those of the box, and each part has as many as another, or one more."""
    axis = _first_divided(box.shape, cell)
    if axis is None or box.size == 0:
        return [box]
    steps = -(-box.shape[axis] // cell[axis])
    cuts = [steps * part // min(count, steps) for part in range(min(count, steps) + 1)]
    bounds = [min(box.start[axis] + cut * cell[axis], box.stop[axis]) for cut in cuts]
    return [
        Box((*box.start[:axis], low, *box.start[axis + 1 :]), (*box.stop[:axis], high, *box.stop[axis + 1 :]))
        for low, high in itertools.pairwise(bounds)
    ]


def cells_before(box: Box, part: Box, cell: Sequence[int]) -> int:
    """How many cells of `box` come before those of `part`, one of `rows_between_cells`."""
    axis = _first_divided(box.shape, cell)
    if axis is None:
        return 0
    steps_before = (part.start[axis] - box.start[axis]) // cell[axis]
    return steps_before * math.prod(
        -(-rows // step) for rows, step in zip(box.shape[axis + 1 :], cell[axis + 1 :], strict=True)
    )


def _first_divided(shape: Sequence[int], cell: Sequence[int]) -> int | None:
    return next((axis for axis, (rows, step) in enumerate(zip(shape, cell, strict=True)) if step < rows), None)


def cell_shape(
    shape: Sequence[int], box_shape: Sequence[int], itemsize: int, limit_bytes: int = CELL_BYTES
) -> tuple[int, ...]:
    """The cell of a leaf whose boxes all have `box_shape`: at most about `limit_bytes`, the same everywhere.

    Leading dimensions are cut to single rows until one suffices. A dimension that is split over devices is cut at a
    divisor of the box, so that no cell crosses a box. If the divisors are poor (a prime), the nearest one above the
    limit is used, which avoids many tiny cells. Other dimensions are also cut at a divisor if that costs at most twice
    the cells: a partial last cell is padded to a whole one in memory and in the file.
    """
    cell = list(box_shape)
    for axis, rows in enumerate(box_shape):
        row_bytes = itemsize * math.prod(cell[axis + 1 :])
        if rows * row_bytes <= limit_bytes:
            break
        wanted = max(1, limit_bytes // row_bytes)
        whole_axis = rows == shape[axis]  # zarr allows a partial cell at the end of the array only
        cell[axis] = _even_rows(rows, wanted) if whole_axis else _near_divisor(rows, wanted)
        if cell[axis] > 1:
            break
    return tuple(max(1, rows) for rows in cell)


def cells_of(box: Box, cell: Sequence[int]) -> list[Box]:
    """The cells of a box in C order; the last along a dimension may be partial."""
    if box.size == 0:
        return []
    if all(map(ge, cell, box.shape)):  # most boxes
        return [box]
    corners = [()]
    for a, b, step in zip(box.start, box.stop, cell, strict=True):
        corners = [(*corner, at) for corner in corners for at in range(a, b, step)]
    return [
        Box(corner, tuple(min(at + step, b) for at, step, b in zip(corner, cell, box.stop, strict=True)))
        for corner in corners
    ]


def boxes_of_cells(box: Box, cell: Sequence[int]) -> list[Box]:
    """`box` cut into boxes of which each cell is a whole number of leading rows, as few as can be, in C order.

    One where the cells are leading rows of `box` already; a grid that is cut along several dimensions gives one for
    each column. `box` begins and ends where cells do, or where the array ends.
    """
    if box.size == 0:
        return []
    first = next((axis for axis, rows in enumerate(cell) if rows > 1), len(cell) - 1)
    return cells_of(box, [*box.shape[: first + 1], *cell[first + 1 :]])


def in_rows(box_shape: Sequence[int], cell: Sequence[int]) -> bool:
    """Whether the cells of a box follow one another in its C order, each in one piece."""
    divided = [axis for axis, (rows, step) in enumerate(zip(box_shape, cell, strict=True)) if step < rows]
    before = divided[-1] if divided else 0
    return all(min(rows, step) == 1 for rows, step in zip(box_shape[:before], cell[:before], strict=True))


def _even_rows(rows: int, wanted: int) -> int:
    """The largest divisor of `rows` up to `wanted`. If that is less than half of `wanted`, parts of nearly equal size:
    the last one is padded, and the padding is written and read."""
    below = max(d for d in _divisors(rows) if d <= wanted)
    return below if below * 2 >= wanted else -(-rows // -(-rows // wanted))


@lru_cache(maxsize=256)
def _divisors(rows: int) -> tuple[int, ...]:
    """All divisors of up to 2^40 rows. Of more, which only a damaged file claims, those that are found as fast."""
    tried = min(math.isqrt(rows), _TRIED_MAX)
    return tuple(sorted({d for i in range(1, tried + 1) if rows % i == 0 for d in (i, rows // i)}))


def _near_divisor(rows: int, wanted: int) -> int:
    """The largest divisor of `rows` up to `wanted`; if that is 16 times too small, one up to 4 times too large."""
    divisors = _divisors(rows)
    below = max(d for d in divisors if d <= wanted)
    if below * 16 >= wanted:
        return below
    above = min(d for d in divisors if d > wanted)
    return above if above <= 4 * wanted else below
