"""The inputs of a diagnosis's rules, and their findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ckptkit.events import Event, Kind
from ckptkit.goodput import GoodputReport
from ckptkit.inspection import StepEntry
from ckptkit.upkeep import Usage

AdviceKind = Literal["slow", "at risk", "wasteful"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One sentence of what is the matter, and one of what to set or do. `rule` is the name of its function.

    `of_run`: the share of the run's time that it costs; `stored_bytes`: bytes that no restore needs. None: not known.
    """

    rule: str
    kind: AdviceKind
    what: str
    advice: str
    of_run: float | None = None
    stored_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A tier on a mount that it is not for. `tier` is None for a fast one whose name is not known."""

    tier: str | None
    path: str
    file_system: str
    problem: str
    rate_bytes_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run as it is known: its account and events (none where no logs were given), its steps, its bytes, its mounts.

    `events` are of all processes, attempts and the launcher, in the order of time. `host_id` is this host's.
    `durable_room`: the bytes of the file system of the root, and the free ones; None for a bucket.
    """

    usage: Usage
    steps: Sequence[StepEntry] = ()
    report: GoodputReport | None = None
    events: Sequence[Event] = field(default_factory=list)
    misplaced: Sequence[Misplaced] = ()
    host_id: str = ""
    durable_room: tuple[int, int] | None = None

    def of(self, kind: Kind, tier: str | None = None) -> list[Event]:
        """The events of a kind, and of a tier where one is given."""
        return [event for event in self.events if event.kind == kind and tier in (None, event.tier)]

    @cached_property
    def tiers(self) -> set[str]:
        """The tiers to which anything was committed."""
        return {event.tier for event in self.of(Kind.COMMITTED) if event.tier is not None}
