"""Weights as int8 or float8 with scales: a scale for each block of a weight (a channel, a group or a tile).

`weight = quantised * scale`, symmetric, without a zero point. A scale is the largest magnitude of its block times the
reciprocal of the dtype's limit. A value is the weight times the reciprocal of its scale, clipped to the limits and
rounded to nearest even. All of it is in float32 and elementwise, so NumPy and JAX on CPUs get the same bits. (No
weight is divided: XLA compiles a division to such a multiplication in some programs, and not in others.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

Quantized = Literal["int8", "fp8"]

DTYPES: dict[Quantized, np.dtype[Any]] = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
# The largest magnitude: symmetric, so -128 is never used.
_LIMITS = {DTYPES["int8"]: np.float32(127), DTYPES["fp8"]: np.float32(448)}
# Of a scale: a block of zeros needs one too. Subnormal weights, which XLA takes for zeros, are zeros in units of it.
_SMALLEST = np.float32(2.0**-100)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafError:
    """The loss of one quantised leaf: the largest difference of an element, and the relative error of all.

    The latter is the root of the mean square of the differences, over that of the weights (0 if all weights are 0).
    """

    max_abs: float
    relative_rms: float


def blocks_of_scales(shape: Sequence[int], scales: Sequence[int]) -> list[tuple[int, ...]]:
    """The blocks of a weight that scales of that shape may belong to: none if none fits, two if the shapes allow both.

    Either all blocks are equal, or their size is a power of two and the last one is cut at the edge. 192 rows with 2
    scales are 96 and 96, or 128 and 64 as in the models of DeepSeek and transformers. One scale alone is of all.
    """
    if math.prod(scales) == 1:
        return [tuple(max(1, n) for n in shape)]
    if len(shape) != len(scales) or any(n < s or s < 1 for n, s in zip(shape, scales, strict=True)):
        return []
    each = [(_equal(n, s), _cut(n, s)) for n, s in zip(shape, scales, strict=True)]
    found = [tuple(a or b for a, b in each), tuple(b or a for a, b in each)]
    return [block for block in dict.fromkeys(found) if all(block)]


def block_that_fits(shape: Sequence[int], scales: Sequence[int], block: Sequence[int]) -> tuple[int, ...] | None:
    """A block of the last dimensions as one of all dimensions; None if it would have scales of another shape."""
    whole = (*(1,) * (len(shape) - len(block)), *block)
    if not len(shape) == len(scales) == len(whole):
        return None
    fits = all(-(-n // size) == s for n, size, s in zip(shape, whole, scales, strict=True))
    return tuple(min(n, size) for n, size in zip(shape, whole, strict=True)) if fits and all(shape) else None


def blocks_text(blocks: Sequence[Sequence[int]]) -> str:
    """Blocks in a message: `blocks of 96x64 or blocks of 128x64`."""
    return " or ".join(f"blocks of {'x'.join(map(str, block))}" for block in blocks)


def _equal(size: int, count: int) -> int:
    """The size of `count` equal blocks; 0 if they cannot be equal."""
    return 0 if size % count else size // count


def _cut(size: int, count: int) -> int:
    """The power of two (or the whole) that gives `count` blocks, the last of which may be shorter; 0 if none does."""
    if count == 1:
        return size
    return next((rows for power in range(size.bit_length()) if -(-size // (rows := 1 << power)) == count), 0)


def largest(weights: Any, block: Sequence[int]) -> Any:
    """The largest magnitude in each block, as float32: an array of the shape of the scales. NaN where one is there."""
    xp = weights.__array_namespace__()
    counts = [-(-n // b) for n, b in zip(weights.shape, block, strict=True)]
    sizes = [size for each in zip(counts, block, strict=True) for size in each]
    magnitudes = xp.abs(xp.astype(weights, np.float32))
    rest = [(0, count * b - n) for n, count, b in zip(weights.shape, counts, block, strict=True)]
    if any(missing for _, missing in rest):  # blocks that the edge cuts
        magnitudes = xp.pad(magnitudes, rest)
    return xp.max(magnitudes.reshape(sizes), axis=tuple(range(1, len(sizes), 2)))


def scales_for(magnitudes: Any, dtype: np.dtype[Any]) -> Any:
    """The scale of each block, float32, from its largest magnitude."""
    xp = magnitudes.__array_namespace__()
    return xp.maximum(magnitudes * (np.float32(1) / _LIMITS[dtype]), _SMALLEST)


def quantize(weights: Any, scales: Any, dtype: np.dtype[Any]) -> Any:
    """The weights in units of their scales, which have one element for each weight, or broadcast to that."""
    xp = weights.__array_namespace__()
    limit = _LIMITS[dtype]
    units = xp.clip(xp.astype(weights, np.float32) * (np.float32(1) / scales), -limit, limit)
    return xp.astype(xp.round(units) if dtype.kind == "i" else units, dtype)


def dequantize(values: Any, scales: Any) -> Any:
    """The weights, as float32."""
    xp = values.__array_namespace__()
    return xp.astype(values, np.float32) * xp.astype(scales, np.float32)


def spread(
    scales: Any, block: Sequence[int], start: Sequence[int], stop: Sequence[int], origin: Sequence[int] | None = None
) -> Any:
    """The scales of the elements `[start, stop)` of a weight, as an array that broadcasts to them.

    `scales` are those of all blocks, or those from block `origin` on.
    """
    xp = scales.__array_namespace__()
    for axis, (size, low, high) in enumerate(zip(block, start, stop, strict=True)):
        if scales.shape[axis] > 1:
            first = 0 if origin is None else origin[axis]
            scales = xp.take(scales, np.arange(low, high) // size - first, axis=axis)
    return scales


def error_of(squares: float, lost_squares: float, max_abs: float) -> LeafError:
    """The error from the sum of squares of the weights, that of the differences, and the largest difference."""
    return LeafError(max_abs=max_abs, relative_rms=math.sqrt(lost_squares / squares) if squares else 0.0)
