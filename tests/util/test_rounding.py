"""One rounding, against the nearest of all values of a dtype and the exact midpoints between them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptkit.conversion.casting import rounded

SIGNED = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float6_e2m3fn", "float4_e2m1fn"]
WIDE = [np.float64, np.longdouble]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def positives(dtype: np.dtype[Any]) -> np.ndarray:
    """All finite values from 0 up, as float64."""
    count = 1 << (ml_dtypes.finfo(dtype).bits - 1)
    found = np.arange(count).astype(f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        found = found.astype(np.float64)
    return found[np.isfinite(found)]


def nearest(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """By the midpoints, which float64 holds exactly; a tie goes to the even one, which has an even index."""
    wide = positives(dtype)
    middles = (wide[:-1] + wide[1:]) / 2
    below, above = np.searchsorted(middles, values, "left"), np.searchsorted(middles, values, "right")
    return wide[np.where(below % 2 == 0, below, above)]


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("name", SIGNED)
def test_each_value_is_rounded_once(name: str, wide: Any) -> None:
    """A value just above the middle of two would be rounded to it, and then down."""
    dtype, rng = dtype_of(name), np.random.default_rng(5)
    known = positives(dtype)
    lows = rng.integers(0, len(known) - 1, 20_000)
    middles = (known[lows] + known[lows + 1]) / 2
    values = np.concatenate(
        [
            known,
            middles,
            *(np.nextafter(middles, towards) for towards in (0, np.inf)),
            *(middles * (1 + sign * 2.0**-40) for sign in (-1, 1)),
            known[lows] + (known[lows + 1] - known[lows]) * rng.uniform(size=lows.size),
        ]
    )
    values = values[values <= known[-1]]
    expected = nearest(values, dtype)
    for sign in (1, -1):
        found = rounded((sign * values).astype(wide), dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(np.float64), sign * expected)


def test_the_reference_agrees_with_exact_fractions() -> None:
    """The other test would compare with a reference that rounds wrongly itself."""
    dtype, rng = dtype_of("bfloat16"), np.random.default_rng(6)
    known = positives(dtype)
    values = rng.standard_normal(200) ** 2 * 10.0 ** rng.uniform(-30, 30, 200)
    for value, found in zip(values, nearest(values, dtype), strict=True):
        at = int(np.searchsorted(known, value))
        near = known[max(0, at - 1) : at + 1]
        assert found == min(near, key=lambda each: abs(Fraction(float(each)) - Fraction(float(value))))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("bfloat16", [1e300, -1e300, np.inf, -np.inf, 1e-310], [np.inf, -np.inf, np.inf, -np.inf, 0]),
        ("bfloat16", [3.3961775292304e38, 3.3961775292305e38], [3.3895313892515355e38, np.inf]),
        ("float8_e4m3fn", [464.0, 464.0000001, np.inf], [448, np.nan, np.nan]),
        ("float8_e5m2", [61439.9999999, 61440.0, np.nan], [57344, np.inf, np.nan]),
    ],
)
def test_values_out_of_range_are_those_of_the_dtype(name: str, values: list[float], expected: list[float]) -> None:
    """A value that does not fit would become a finite one, or one that fits infinite."""
    found = rounded(np.asarray(values), dtype_of(name)).astype(np.float64)
    np.testing.assert_array_equal(found, expected)
    for value, one in zip(values, expected, strict=True):  # without dimensions, too
        np.testing.assert_array_equal(rounded(np.asarray(value), dtype_of(name)).astype(np.float64), one)


def test_signs_of_zeros_and_wider_dtypes_stay() -> None:
    """A zero would lose its sign, or a cast that needs no help change."""
    found = rounded(np.asarray([0.0, -0.0, -1e-320]), dtype_of("bfloat16"))
    assert np.signbit(found.astype(np.float64)).tolist() == [False, True, True]
    wide = np.random.default_rng(7).standard_normal(100)
    assert rounded(wide, np.dtype(np.float32)).tobytes() == wide.astype(np.float32).tobytes()
    assert rounded(wide, np.dtype(np.complex64)).tobytes() == wide.astype(np.complex64).tobytes()
