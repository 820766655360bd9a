"""One row of the table of results, and the result that it is from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

PEERS = ("orbax_async", "orbax_tuned", "orbax_v1", "orbax_sync")
ENOUGH = 5  # samples: with fewer, a row shows their range

Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """When, at which commit (`+`: files differed from it) and at which load of the machine a result began."""

    day: str = ""
    commit: str = ""
    load: float | None = None

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Source:
        """The part that the result stores: the oldest ones store less."""
        where = result.get("environment", {})
        load = where.get("load")
        return cls(day=where.get("at", "")[:10], commit=where.get("commit") or "", load=load[0] if load else None)

    @property
    def exact(self) -> bool:
        """Whether the commit is the code that was measured."""
        return bool(self.commit) and not self.commit.endswith("+")

    def __str__(self) -> str:
        """In words, as the report has it."""
        commit = f"at {self.commit.rstrip('+')}" if self.commit else "at a commit that was not stored"
        changed = "" if self.exact or not self.commit else ", dirty (with changes that are in no commit)"
        return f"{self.day} {commit}{changed}{'' if self.load is None else f', load {self.load:.1f}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `peer` is stock Orbax's best where there are several; None: nobody else has it, or no limit.

    `limit_name` is the contender that was faster than the plain copy, which is then not the limit.
    """

    benchmark: str
    case: str
    figure: str
    meaning: str
    ours: float
    spread: Range | None = None  # of our samples, where one median is not enough
    ends: Range | None = None  # the least and the greatest of our samples
    peer: float | None = None
    peer_name: str = ""
    peer_spread: Range | None = None
    peer_ends: Range | None = None
    torch: float | None = None
    torch_name: str = ""  # of the better one where there are several
    limit: float | None = None
    limit_name: str = ""
    samples: int = 1
    source: Source = field(default_factory=Source)

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's. None if it has no meaning: samples of a difference of two times may be below zero, and
        samples whose ranges overlap show no difference."""
        least = min((self.ours, *(self.ends or self.spread or ())))
        if self.peer is None or self.peer <= 0 or least < 0 or self.overlaps:
            return None
        return self.ours / self.peer

    @property
    def overlaps(self) -> bool:
        """Whether a sample of one side lies within the range of the other one."""
        ours, peers = self.ends or self.spread, self.peer_ends or self.peer_spread
        return bool(ours and peers and ours[0] <= peers[1] and peers[0] <= ours[1] and len({*ours, *peers}) > 1)


def spread_of(samples: Sequence[float]) -> Range | None:
    """The range of samples that are few, or that lie further apart than their median is large; None for others."""
    if len(samples) < 2:
        return None
    least, most = min(samples), max(samples)
    return (least, most) if len(samples) < ENOUGH or most - least > abs(median(samples)) else None


def ends_of(samples: Sequence[float]) -> Range | None:
    """The least and the greatest of several samples."""
    return (min(samples), max(samples)) if len(samples) > 1 else None


def measured(samples: Sequence[float]) -> dict[str, Any]:
    """The fields of a row that follow from our samples."""
    ends = ends_of(samples)
    return {"ours": median(samples), "spread": spread_of(samples), "ends": ends, "samples": len(samples)}
