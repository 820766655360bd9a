"""The name of each dtype in each format, and how a format stores dtypes for which it has no name.

A dtype without a name of its own is stored as another dtype of the same bytes. A note next to the tensor records the
real one: `{"dtype": "int4", "shape": [3]}` for a leaf stored as int8. A reader that does not know the note sees the
stored bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ckptkit.inspection.words import dtype_name

_FP8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
SAFETENSORS: Mapping[str, np.dtype[Any]] = {
    **{f"F{8 * size}": np.dtype(f"float{8 * size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"uint{8 * size}") for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(bool),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "C64": np.dtype(np.complex64),
    **{word: np.dtype(kind) for word, kind in _FP8.items()},
}
TORCH: Mapping[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "bool", "complex64", "complex128")},
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    },
}
# Names of newer versions that few readers know: we write notes instead, and read the names.
_NOT_WRITTEN = frozenset({"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"})
_INTS = frozenset([int])  # a bool is an int to `isinstance`
SAFETENSORS_WORDS = {dtype: word for word, dtype in SAFETENSORS.items() if word not in _NOT_WRITTEN}
TORCH_WORDS = {dtype: word for word, dtype in TORCH.items()}


def stored_as(dtype: np.dtype[Any], shape: tuple[int, ...], known: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and shape under which a format whose dtypes are `known` stores an array: its own, where it has them.

    Complex numbers become pairs of floats in a last dimension of two, all else integers of the same width.
    """
    if dtype in known:
        return dtype, shape
    if dtype.kind == "c":
        return np.dtype(f"float{4 * dtype.itemsize}"), (*shape, 2)
    return np.dtype(f"int{8 * dtype.itemsize}"), shape


def note_of(dtype: np.dtype[Any], shape: tuple[int, ...], known: Any, key_impl: str | None) -> dict[str, Any] | None:
    """The note that a tensor needs to be read back as it was; None if the format needs no note."""
    note: dict[str, Any] = {} if dtype in known else {"dtype": dtype.name, "shape": list(shape)}
    if key_impl is not None:
        note["key_impl"] = key_impl
    return note or None


def noted(
    dtype: np.dtype[Any], shape: tuple[int, ...], note: Any, known: Any
) -> tuple[np.dtype[Any], tuple[int, ...], str | None]:
    """The dtype, shape and key implementation that a note gives a stored tensor; raises ValueError for a wrong note."""
    if note is None:
        return dtype, shape, None
    if not isinstance(note, dict) or not isinstance(note.get("key_impl", ""), str):
        raise ValueError(f"{str(note)[:100]!r} is not a note of a tensor")
    if "dtype" not in note:
        return dtype, shape, note.get("key_impl")
    meant, meant_shape = plain_dtype(note["dtype"]), checked_shape(note["shape"])
    if stored_as(meant, meant_shape, known) != (dtype, shape):
        raise ValueError(f"a tensor stored as {dtype}{list(shape)} cannot be {meant}{list(meant_shape)}")
    return meant, meant_shape, note.get("key_impl")


def plain_dtype(word: Any) -> np.dtype[Any]:
    """The dtype of a name. Raises ValueError for a name that is not a dtype of numbers."""
    try:
        return np.dtype(dtype_name(word))
    except TypeError as error:
        raise ValueError(f"{word!r} is no dtype") from error


def checked_shape(sizes: Any) -> tuple[int, ...]:
    """A shape out of a file; raises ValueError if `sizes` is not a shape."""
    listed = type(sizes) in (list, tuple)
    if not listed or not _INTS.issuperset(map(type, sizes)) or (sizes and not 0 <= min(sizes) <= max(sizes) < 1 << 62):
        kinds = [type(size).__name__ for size in sizes[:8]] if listed else type(sizes).__name__
        raise ValueError(f"no shape: {kinds}, negative, or too large")
    if len(sizes) > 32:
        raise ValueError(f"{len(sizes)} dimensions, and 32 are the most that are read")
    return tuple(sizes)
