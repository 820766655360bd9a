"""Statistics of tensors and the differences between two, block by block within a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import ml_dtypes
import numpy as np

from ckptkit.conversion.mapping import Tensors, is_floating
from ckptkit.formats.tensors import MEMORY_BYTES, Tensor
from ckptkit.model.boxes import Box, blocks_of, cells_of
from ckptkit.model.manifest import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of a tensor's finite elements, in float64. None without such elements, for keys, and `std` of bool.

    `norm` is the square root of the sum of squares. For complex numbers, all values are of their absolute values.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    norm: float
    nan: int
    inf: int


def statistics_of(tensor: Tensor, memory_bytes: int = MEMORY_BYTES) -> Statistics:
    """One pass over the tensor. Mean and deviation are merged block by block (Chan et al. 1979), so that they do not
    cancel. Raises what `Tensor.read` does."""
    count, mean, spread, squares = 0, 0.0, 0.0, 0.0
    low, high, nan, inf = math.inf, -math.inf, 0, 0
    for values, times in _parts_of(tensor, memory_bytes):
        with np.errstate(all="ignore"):  # overflows are infinite, as in the result
            finite = np.isfinite(values)
            nan += int(np.isnan(values).sum()) * times
            values = values[finite]
            inf += int(finite.size - values.size) * times
            if not values.size:
                continue
            part_mean, size = float(values.mean()), values.size * times
            total, delta = count + size, part_mean - mean
            spread += float(np.square(values - part_mean).sum()) * times + delta * delta * count * size / total
            mean += delta * size / total
            squares += float(np.square(values).sum()) * times
            low, high, count = min(low, float(values.min())), max(high, float(values.max())), total
    return Statistics(
        minimum=low if count else None,
        maximum=high if count else None,
        mean=mean if count else None,
        std=math.sqrt(spread / count) if count else None,
        norm=math.sqrt(squares),
        nan=nan,
        inf=inf - nan,
    )


_PART = 1 << 20  # elements that are made wide at once
_LISTED_FROM_BYTES = 1 << 30  # below, all of a tensor is read sooner than its chunks are listed


def _parts_of(tensor: Tensor, memory_bytes: int) -> Iterator[tuple[np.ndarray, int]]:
    """The elements of a tensor in float64, part by part, and how often each part occurs."""
    for box, count in _boxes_of([tensor], tensor.block_shape(memory_bytes)):
        yield from ((part, count) for part in _wide_parts(tensor.read(box)))


def _boxes_of(tensors: Sequence[Tensor], block: Sequence[int]) -> Iterator[tuple[Box, int]]:
    """Blocks that make up tensors of one shape, and how often each counts. Chunks that none of them stores have one
    value, and a damaged shape claims 2^60 elements: one element counts for all of them."""
    shape = tensors[0].shape
    chunks: dict[tuple[int, ...], Box] = {}
    if all(tensor.stored is not None and tensor.nbytes >= _LISTED_FROM_BYTES for tensor in tensors):
        listed = [tensor.stored() for tensor in tensors if tensor.stored is not None]
        chunk = listed[0][0]
        chunks = {box.start: box for _, found in listed for box in found}
        absent = math.prod(shape) - sum(box.size for box in chunks.values())
        if absent and all(each == chunk for each, _ in listed):
            first = next(box.start for box in blocks_of(shape, chunk) if box.start not in chunks)
            yield Box(first, tuple(at + 1 for at in first)), absent
            yield from ((part, 1) for box in chunks.values() for part in cells_of(box, block))
            return
    yield from ((box, 1) for box in blocks_of(shape, block))


def _wide_parts(block: np.ndarray) -> Any:
    flat = block.reshape(-1)
    for at in range(0, flat.size, _PART):
        part = flat[at : at + _PART]
        yield np.abs(part).astype(np.float64) if part.dtype.kind == "c" else part.astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafDifference:
    """Differences in the values of one leaf. `ulp` counts representable numbers between two values, and is None if the
    dtype is not a floating-point one of up to 64 bits. `cosine` is None if one side is all zeros. `close`: every
    element within the tolerances."""

    name: str
    changed: float
    max_abs: float
    max_rel: float
    ulp: int | None
    cosine: float | None
    close: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The comparison of two checkpoints. Names are sorted; `values` are the leaves whose bits differ."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    shapes: tuple[tuple[str, str, str], ...]
    values: tuple[LeafDifference, ...]
    equal: int

    @property
    def same(self) -> bool:
        """Whether they hold the same leaves, each within the tolerances (by default: the same bits)."""
        return not (self.only_a or self.only_b or self.shapes) and all(leaf.close for leaf in self.values)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"format": 1, "same": self.same, **asdict(self)}


def diff(
    a: Tensors,
    b: Tensors,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    memory_bytes: int = MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Difference:
    """Compares the tensors of two checkpoints by name. Their formats may differ.

    Leaves of different shape are only named; those of different dtype, or keys of another implementation, are named
    and their values compared. An element is close where |a - b| <= atol + rtol * |b|, or both are NaN, or the same
    infinity. Without tolerances only equal bits are the same. Cost: both are read once, unless their chunks differ.
    `progress` is called for each leaf with the bytes of `a` that were compared so far, and with their total.
    """
    shapes, values, equal = [], [], 0
    common = sorted(a.keys() & b.keys())
    total, done = sum(a[name].nbytes for name in common), 0
    for name in common:
        one, two = a[name], b[name]
        if progress is not None:
            progress(done, total)
        done += one.nbytes
        if _kind(one) != _kind(two):
            shapes.append((name, _words(one), _words(two)))
        if one.shape != two.shape:
            continue
        found = _difference(name, one, two, rtol, atol, memory_bytes // 2)
        if found is None:
            equal += _kind(one) == _kind(two)
        else:
            values.append(found)
    return Difference(
        only_a=tuple(sorted(a.keys() - b.keys())),
        only_b=tuple(sorted(b.keys() - a.keys())),
        shapes=tuple(shapes),
        values=tuple(values),
        equal=equal,
    )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Why equal bits mean different values: keys of two implementations draw different numbers."""
    return tensor.shape, tensor.dtype, tensor.leaf.key_impl


def _words(tensor: Tensor) -> str:
    return describe(tensor.leaf.key_impl or tensor.dtype.name, tensor.shape)


def _difference(name: str, a: Tensor, b: Tensor, rtol: float, atol: float, memory_bytes: int) -> LeafDifference | None:
    """The difference of one leaf; None if all bits are the same."""
    # An extended float has no integer of its width to count with.
    floating = a.dtype == b.dtype and is_floating(a) and a.dtype.kind != "c" and a.dtype.itemsize <= 8
    found = _Comparison(rtol, atol, floating=floating)
    block = max(a.block_shape(memory_bytes), b.block_shape(memory_bytes), key=lambda shape: math.prod(shape))
    for box, count in _boxes_of([a, b], tuple(max(1, rows) for rows in block)):
        flat_a, flat_b = a.read(box).reshape(-1), b.read(box).reshape(-1)
        for at in range(0, flat_a.size, _PART):
            with np.errstate(all="ignore"):  # overflows are infinite, as in the result
                found.add(flat_a[at : at + _PART], flat_b[at : at + _PART], count)
    return found.result(name) if found.changed else None


@final
class _Comparison:
    """The differences between two arrays, compared part by part."""

    def __init__(self, rtol: float, atol: float, *, floating: bool):
        self._rtol, self._atol, self._floating = rtol, atol, floating
        self.changed, self._size, self._ulp = 0, 0, 0
        self._max_abs = self._max_rel = self._dot = self._square_a = self._square_b = 0.0
        self._close = True

    def add(self, a: np.ndarray, b: np.ndarray, count: int) -> None:
        """The next elements of both, which occur `count` times."""
        bits = _unequal(a, b)
        self._size += count * a.size
        self.changed += count * int(bits.sum())
        wide_a, wide_b = _wide(a), _wide(b)
        finite = np.isfinite(wide_a) & np.isfinite(wide_b)
        x, y = wide_a[finite], wide_b[finite]
        self._dot += count * float(np.real(np.vdot(y, x)))
        self._square_a += count * float(np.square(np.abs(x)).sum())
        self._square_b += count * float(np.square(np.abs(y)).sum())
        if not bits.any():
            return
        gap, scale = _gap(a[finite], b[finite], x, y), np.abs(y)
        same = np.array_equal(wide_a[~finite], wide_b[~finite], equal_nan=True)
        ratio = np.where(gap == 0, 0.0, gap / scale)
        self._max_abs = max(self._max_abs, float(gap.max(initial=0.0))) if same else math.inf
        self._max_rel = max(self._max_rel, float(ratio.max(initial=0.0))) if same else math.inf
        tolerant = self._rtol > 0 or self._atol > 0
        self._close &= tolerant and same and bool((gap <= self._atol + self._rtol * scale).all())
        if self._floating:
            self._ulp = max(self._ulp, _ulp(a, b))

    def result(self, name: str) -> LeafDifference:
        """The difference of all parts that were added."""
        lengths = math.sqrt(self._square_a) * math.sqrt(self._square_b)
        cosine = self._dot / lengths if lengths else math.nan
        return LeafDifference(
            name=name,
            changed=self.changed / self._size,
            max_abs=self._max_abs,
            max_rel=self._max_rel,
            ulp=self._ulp if self._floating else None,
            cosine=cosine if math.isfinite(cosine) else None,
            close=self._close,
        )


def _wide(part: np.ndarray) -> np.ndarray:
    return part.astype(np.complex128 if part.dtype.kind == "c" else np.float64)


def _gap(a: np.ndarray, b: np.ndarray, wide_a: np.ndarray, wide_b: np.ndarray) -> np.ndarray:
    """|a - b| in float64. Of 64-bit integers the difference is taken first: float64 holds them up to 2^53."""
    wide = np.abs(wide_a - wide_b)
    if not {a.dtype.kind, b.dtype.kind} <= {"i", "u"} or max(a.dtype.itemsize, b.dtype.itemsize) < 8:
        return wide
    less, x, y = a < b, a.astype(np.uint64), b.astype(np.uint64)
    exact = np.where(less, y - x, x - y).astype(np.float64)  # modulo 2^64
    return np.where(wide < 2.0**63, exact, wide)


def _unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two parts differ: in any bit, or in their value where they have not the same dtype."""
    if a.dtype != b.dtype:
        integers = {a.dtype.kind, b.dtype.kind} <= {"i", "u"}  # NumPy compares these exactly
        return a != b if integers else _wide(a) != _wide(b)
    size = a.dtype.itemsize
    if size <= 8:
        return a.view(f"u{size}") != b.view(f"u{size}")
    return (a.view("u8").reshape(-1, size // 8) != b.view("u8").reshape(-1, size // 8)).any(axis=1)


def _ulp(a: np.ndarray, b: np.ndarray) -> int:
    """The most representable numbers between two elements: floats in the order of their bits, with -0.0 next to +0.0.

    Dawson, "Comparing floating point numbers", 2012. Elements with NaN on a side are left out.
    """
    known = ~(np.isnan(a.astype(np.float64)) | np.isnan(b.astype(np.float64)))
    ordered = []
    for part in (a[known], b[known]):
        bits = part.view(f"u{part.dtype.itemsize}").astype(np.uint64)
        facts = ml_dtypes.finfo(part.dtype)
        sign = np.uint64(1 << (facts.bits - 1))  # of fewer than 8 bits in a byte, too
        signed = bits & sign if facts.min < 0 else np.zeros_like(bits)  # float8_e8m0fnu has no sign
        ordered.append(np.where(signed, sign - (bits & (sign - np.uint64(1))), bits + sign))
    high, low = np.maximum(*ordered), np.minimum(*ordered)
    return int((high - low).max(initial=0))
