"""One rounding from a wide float to a narrow one, where NumPy rounds twice."""

from __future__ import annotations

from typing import Any

import numpy as np


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
