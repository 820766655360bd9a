"""A guard's record of a run, as plain values: saved with the data position, so that a resumed run has the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

from ckptkit.guard.rules import Reading

FORMAT = "ckptkit.guard/1"
STRETCHES_MAX = 100  # suspicious stretches that a record keeps: some 20 bytes each; older saves were deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A rule's finding. `onset` is the first step of the trouble, `step` the one whose value gave the alarm."""

    rule: str
    signal: str
    step: int
    onset: int
    value: float
    limit: float

    def to_json(self) -> dict[str, Any]:
        """As plain values that are JSON."""
        return {**asdict(self), "value": _plain(self.value), "limit": _plain(self.limit)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Alarm:
        """What `to_json` gave."""
        return cls(**{**saved, "value": float(saved["value"]), "limit": float(saved["limit"])})

    def __str__(self) -> str:
        about = f"{self.signal} {self.value:.6g}"
        limit = f", above {self.limit:.6g}" if math.isfinite(self.limit) else ""
        since = f" since step {self.onset}" if self.onset < self.step else ""
        return f"{self.rule} at step {self.step}: {about}{limit}{since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A way back that was taken: the alarm, the first step that is taken anew with other batches, and the batches
    (`first_batch` to `stop_batch`, exclusive) that are skipped. Not the save that was restored: nothing depends on it.
    """

    alarm: Alarm
    first_step: int
    first_batch: int
    stop_batch: int

    def __str__(self) -> str:
        return f"{self.alarm}; batches {self.first_batch} to {self.stop_batch - 1} are skipped"

    def to_json(self) -> dict[str, Any]:
        """As plain values that are JSON."""
        return {**asdict(self), "alarm": self.alarm.to_json()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Rollback:
        """What `to_json` gave."""
        return cls(**{**saved, "alarm": Alarm.from_json(saved["alarm"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRecord:
    """The last readings by signal, an alarm that was not answered yet, and every rollback of the run, oldest first.

    `suspicious`: the last stretches of steps (first, last) in which a signal was suspicious, ascending.
    """

    readings: Mapping[str, tuple[Reading, ...]] = field(default_factory=dict)
    alarm: Alarm | None = None
    rollbacks: tuple[Rollback, ...] = ()
    suspicious: tuple[tuple[int, int], ...] = ()

    @property
    def skips(self) -> Skips:
        """The batches that the rollbacks skip."""
        return reduce(lambda skips, each: skips.and_also(each.first_batch, each.stop_batch), self.rollbacks, Skips())

    @property
    def suspect_since(self) -> int | None:
        """The step since which a signal has been suspicious, None where none is."""
        starts = []
        for readings in self.readings.values():
            row = None
            for each in reversed(readings):
                if not each.suspect:
                    break
                row = each.step
            starts += [] if row is None else [row]
        return min(starts, default=None)

    def was_suspicious(self, step: int) -> bool:
        """Whether a signal was suspicious at a step."""
        return any(first <= step <= last for first, last in self.suspicious)

    def suspicious_with(self, step: int) -> tuple[tuple[int, int], ...]:
        """The stretches, with `step` among them: the newest one, or the one after it."""
        if self.suspicious and self.suspicious[-1][1] >= step - 1:
            *others, (first, last) = self.suspicious
            return (*others, (first, max(last, step)))
        return (*self.suspicious, (step, step))[-STRETCHES_MAX:]

    def to_json(self) -> dict[str, Any]:
        """As plain values that are JSON: some 30 bytes for each reading that the rules look at."""
        return {
            "format": FORMAT,
            "suspect_since": self.suspect_since,
            "alarm": None if self.alarm is None else self.alarm.to_json(),
            "rollbacks": [each.to_json() for each in self.rollbacks],
            "suspicious": [list(each) for each in self.suspicious],
            "readings": {
                signal: [[each.step, _plain(each.value), int(each.suspect)] for each in readings]
                for signal, readings in self.readings.items()
            },
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any] | None) -> GuardRecord:
        """The record from the result of `to_json`; None gives the record of a new run.

        Raises ValueError for what is not the record of a guard.
        """
        if saved is None:
            return cls()
        if saved.get("format") != FORMAT:
            raise ValueError(f"not the record of a guard: its format is {saved.get('format')!r}, expected {FORMAT!r}")
        return cls(
            readings={
                signal: tuple(Reading(int(step), float(value), bool(suspect)) for step, value, suspect in readings)
                for signal, readings in saved["readings"].items()
            },
            alarm=None if saved["alarm"] is None else Alarm.from_json(saved["alarm"]),
            rollbacks=tuple(Rollback.from_json(each) for each in saved["rollbacks"]),
            # Earlier versions wrote none.
            suspicious=tuple((int(first), int(last)) for first, last in saved.get("suspicious", ())),
        )


def describe(saved: Mapping[str, Any]) -> list[str]:
    """The content of a record, a line each: for a person who inspects a step."""
    record = GuardRecord.from_json(saved)
    lines = [str(each) for each in record.rollbacks]
    if record.alarm is not None:
        lines.append(f"saved with an alarm: {record.alarm}; a run that resumes here first goes back to an older save")
    elif record.suspect_since is not None:
        lines.append(f"saved while suspicious, since step {record.suspect_since}")
    return lines


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no NaN


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

    def and_also(self, first: int, stop: int) -> Skips:
        """These, and the batches from `first` to `stop`, exclusive."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted((*self.ranges, (first, stop))):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return Skips(tuple(merged))

    def __str__(self) -> str:
        return ", ".join(f"{first} to {stop - 1}" for first, stop in self.ranges) or "none"


@dataclass(frozen=True, slots=True)
class PickledGuard:
    """A `Guard` in another process: the skips that the guard had when it was pickled, and nothing else."""

    skips: Skips
