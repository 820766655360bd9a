"""Which chunks to store an array in, so that the boxes of one mesh, or of several, are whole chunks. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from ckptkit.model.boxes import cell_shape

_FLOOR_BYTES = 64 << 10  # smaller chunks cost more in requests and in the tree of keys than their bytes
_CHOICES_MAX = 4096


@lru_cache(maxsize=4096)
def chunk_shape(
    shape: tuple[int, ...], boxes: tuple[tuple[int, ...], ...], itemsize: int, chunk_bytes: int
) -> tuple[int, ...]:
    """The chunk of an array whose devices hold boxes of these shapes, one for each mesh: about `chunk_bytes` at most.

    For one mesh it divides the box. For several it divides the boxes of all, unless that makes chunks below 64 KiB that
    no mesh asks for; then it is the grid with the least amplification on the worst of the meshes.
    """
    if 0 in shape:
        return tuple(max(1, size) for size in shape)
    common = tuple(math.gcd(*sizes) for sizes in zip(*boxes, strict=True))
    floor = min(_FLOOR_BYTES, *(math.prod(box) * itemsize for box in boxes)) if shape else 0
    grid = common if math.prod(common) * itemsize >= floor else _compromise(shape, boxes, common, floor // itemsize)
    return cell_shape(shape, grid, itemsize, chunk_bytes)


def worst_amplification(shape: Sequence[int], boxes: Sequence[Sequence[int]], grid: Sequence[int]) -> float:
    """The mean amplification of the mesh that has the worst, when an array is stored in a grid of such chunks."""
    return max(math.prod(_along(*sizes) for sizes in zip(shape, box, grid, strict=True)) for box in boxes)


@lru_cache(maxsize=4096)
def _along(size: int, rows: int, step: int) -> float:
    """Amplification along one dimension: the mean over its boxes."""
    if step % rows == 0 or rows % step == 0:
        return max(1.0, -(-rows // step) * step / rows)
    touched = sum((low + rows - 1) // step - low // step + 1 for low in range(0, size, rows))
    return touched * step / size


def _compromise(
    shape: tuple[int, ...], boxes: tuple[tuple[int, ...], ...], common: tuple[int, ...], floor: int
) -> tuple[int, ...]:
    sizes = [
        sorted({*column, least, size})
        for column, least, size in zip(zip(*boxes, strict=True), common, shape, strict=True)
    ]
    if math.prod(map(len, sizes)) > _CHOICES_MAX:
        sizes = [sorted({least, min(each), size}) for each, least, size in zip(sizes, common, shape, strict=True)]
    grids = itertools.islice(itertools.product(*sizes), _CHOICES_MAX)
    wide = [grid for grid in (*grids, tuple(shape)) if math.prod(grid) >= floor]
    return min(wide, key=lambda grid: (worst_amplification(shape, boxes, grid), math.prod(grid), grid))
