"""Batches that a run leaves out: which batch of the data each step takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Skips:
    """Ranges `(first, stop)` of batches that are never trained on, in the numbering of the whole data order.

    Ascending and disjoint. Without skips, step k takes batch k; every skipped batch moves the later steps one batch on.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        edges = [edge for pair in self.ranges for edge in pair]
        if edges != sorted(set(edges)) or any(edge < 0 for edge in edges):
            raise ValueError(f"Skips({self.ranges}): give ascending, disjoint ranges (first, stop) with first < stop")

    def batch_of(self, step: int) -> int:
        """The batch that `step` takes; both count from 0."""
        batch = step
        for first, stop in self.ranges:
            if batch < first:
                break
            batch += stop - first
        return batch

    def batches(self, begin: int, end: int) -> Iterator[int]:
        """The batches of the steps from `begin` to `end`, exclusive."""
        return (self.batch_of(step) for step in range(begin, end))

    def and_also(self, first: int, stop: int) -> Skips:
        """These, and the batches from `first` to `stop`, exclusive."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted((*self.ranges, (first, stop))):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return Skips(tuple(merged))

    @property
    def total(self) -> int:
        """How many batches are skipped."""
        return sum(stop - first for first, stop in self.ranges)

    def to_json(self) -> list[list[int]]:
        """The form in which a position of the data holds them."""
        return [list(pair) for pair in self.ranges]

    @classmethod
    def from_json(cls, saved: Iterable[Iterable[int]]) -> Skips:
        """The ranges from the result of `to_json`. Raises ValueError if they are not such ranges."""
        pairs = [tuple(pair) for pair in saved]
        return cls(tuple((int(first), int(stop)) for first, stop in pairs))

    def __str__(self) -> str:
        return ", ".join(f"{first} to {stop - 1}" for first, stop in self.ranges) or "none"
