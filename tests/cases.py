"""Cases of one test that are alike: a few of them in `make test`, all in CI and in `make campaign NAME=long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

_T = TypeVar("_T")


def long_except(kept: Iterable[_T], cases: Iterable[_T]) -> list[object]:
    """The cases, of which `make test` runs those in `kept`; each of these must be one of the cases."""
    kept, cases = list(kept), list(cases)
    unknown = [each for each in kept if each not in cases]
    assert not unknown, f"no such case: {unknown}"
    return [each if each in kept else pytest.param(*_values(each), marks=pytest.mark.long) for each in cases]


def _values(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)  # a tuple has the values of several names
