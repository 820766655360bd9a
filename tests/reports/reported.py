"""Public reports about checkpoints in JAX and PyTorch: each test here holds a need that one of them names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_Test = TypeVar("_Test", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A public report: where it is, what the person needed, and the test that holds it."""

    address: str
    needed: str
    test: Callable[..., object]


REPORTS: list[Report] = []


def reported(address: str, needed: str) -> Callable[[_Test], _Test]:
    """Records a test as that of the report at `address`, below https://github.com."""

    def record(test: _Test) -> _Test:
        REPORTS.append(Report(address=f"https://github.com/{address}", needed=needed, test=test))
        return test

    return record
