"""A tensor as another dtype, rounded once, and a count of the values that this dtype does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from ckptkit.formats.tensors import Tensor
from ckptkit.model.boxes import Box
from ckptkit.util.words import first_of

_PART = 1 << 20  # elements that are made wide at once
_NAMED = 5  # leaves in a note


@final
class Cast:
    """Reads boxes of a tensor as another dtype, each value rounded once to nearest even."""

    def __init__(self, source: Tensor, dtype: np.dtype[Any]):
        self._source = source
        self._dtype = dtype
        with np.errstate(invalid="ignore"):
            self._has_nan = bool(np.isnan(np.asarray(np.nan).astype(dtype)))
        self._lost: dict[Box, tuple[int, int]] = {}  # by box: one that is read twice counts once

    def __call__(self, box: Box) -> np.ndarray:
        """The box. Values that do not fit become infinite or NaN, as the dtype has them, and are counted."""
        values = self._source.read(box)
        made = np.empty(box.shape, self._dtype)
        flat, of_source = made.reshape(-1), values.reshape(-1)
        to_others = to_finite = 0
        for at in range(0, flat.size, _PART):
            part = of_source[at : at + _PART]
            flat[at : at + _PART] = found = rounded(part, self._dtype)
            with np.errstate(invalid="ignore"):  # a signalling NaN of a small dtype
                finite = np.isfinite(found)
                if self._has_nan and finite.all():
                    continue
                was_finite = np.isfinite(part)
            to_others += int((was_finite & ~finite).sum())
            to_finite += int((finite & ~was_finite).sum())
        if to_others or to_finite:
            self._lost[box] = to_others, to_finite
        return made

    @property
    def lost(self) -> tuple[int, int]:
        """The finite values read so far that became infinite or NaN, and those that were so and became finite."""
        lost = list(self._lost.values())
        return sum(one for one, _ in lost), sum(two for _, two in lost)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the boxes."""
        return self._dtype


def notes_of(casts: Mapping[str, Cast]) -> list[str]:
    """The values that casts have lost in what was read so far, for the notes of a conversion."""
    lost = {name: cast.lost for name, cast in casts.items()}
    notes = []
    for at, what in enumerate(("finite values became infinite or NaN", "infinite or NaN values became finite")):
        leaves = [f"{name} ({counts[at]} in {casts[name].dtype})" for name, counts in lost.items() if counts[at]]
        if leaves:
            notes.append(f"{what}: {first_of(leaves, _NAMED)}")
    return notes


def rounded(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """`values` as `dtype`, rounded once to the nearest, ties to even. Values that do not fit become infinite or NaN.

    NumPy casts float64 to the small dtypes of ml_dtypes by way of float32, and float128 to float16 by way of float64.
    The second rounding then sees a tie that the first has made. Here the way there rounds to odd, after which another
    rounding is right (Boldo and Melquiond, "When double rounding is odd", 2005).
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if values.dtype.kind == "f" and dtype.kind != "c" and dtype.itemsize <= 2:
            if values.dtype.itemsize > 8:
                values = _to_odd(values, np.float64, np.uint64)
            if values.dtype.itemsize == 8 and dtype.isbuiltin == 2:
                values = _to_odd(values, np.float32, np.uint32)
        return values.astype(dtype)


def _to_odd(values: np.ndarray, narrow: type[np.floating[Any]], bits: type[np.unsignedinteger[Any]]) -> np.ndarray:
    """Towards zero, with the last bit set wherever that is not exact."""
    found = values.astype(narrow)
    wide = found.astype(values.dtype)
    as_bits = found.view(bits)  # of the same array, which an array without dimensions is too
    as_bits -= (np.abs(wide) > np.abs(values)).astype(bits)
    as_bits |= (wide != values).astype(bits)
    return found
