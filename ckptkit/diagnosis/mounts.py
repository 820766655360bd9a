"""The mounts of a run's tiers: those that its logs report, and those of this host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptkit.diagnosis.records import Misplaced
from ckptkit.events import Event, Kind
from ckptkit.model.tiers import DURABLE
from ckptkit.store.backends import properties_of
from ckptkit.store.misplaced import measured_rate_bytes_s, root_problem, tier_problem
from ckptkit.store.mounts import file_system_of
from ckptkit.store.roots import root_url


def misplaced(root: str, tiers: Sequence[str], events: Sequence[Event], *, measure: bool) -> list[Misplaced]:
    """The misplaced tiers: `root` and `tiers` as they are on this host, and others as the events report them.

    Writes nothing, except with `measure`: up to 32 MiB into each fast tier that is misplaced, for up to a second, which
    it then removes.
    """
    root = root_url(root)
    reported = {os.path.realpath(each.path): each for each in _reported(events)}
    opened = [event.fields.get("places", {}) for event in events if event.kind == Kind.OPENED]
    names = {os.path.realpath(path): name for places in opened for name, path in places.items()}
    found = [*_root(root), *_fast(tiers, names, reported, measure=measure)]
    seen = {os.path.realpath(each) for each in (root, *tiers) if os.path.exists(each)}
    return [*found, *(each for path, each in reported.items() if path not in seen)]


def _reported(events: Sequence[Event]) -> Iterator[Misplaced]:
    """The last report of each tier, with its last rate: a manager measures once for each mount."""
    last, rates = dict[str | None, Event](), dict[str | None, float]()
    for event in events:
        if event.kind == Kind.MOUNTED:
            last[event.tier] = event
            rates |= {event.tier: event.fields["rate_bytes_s"]} if "rate_bytes_s" in event.fields else {}
    for tier, event in last.items():
        if event.fields.get("problem"):
            path, name, problem = (str(event.fields.get(each)) for each in ("path", "file_system", "problem"))
            yield Misplaced(tier=tier, path=path, file_system=name, problem=problem, rate_bytes_s=rates.get(tier))


def _root(root: str) -> Iterator[Misplaced]:
    if properties_of(root).file_system:
        found = file_system_of(root)
        if (problem := root_problem(found)) is not None:
            yield Misplaced(tier=DURABLE, path=root, file_system=found.name, problem=problem)


def _fast(
    tiers: Sequence[str], names: dict[str, str], reported: dict[str, Misplaced], *, measure: bool
) -> Iterator[Misplaced]:
    for tier in tiers:
        path, found = os.path.realpath(tier), file_system_of(tier)
        name = names.get(path)
        problem = tier_problem(name, found) if os.path.exists(tier) else None
        if problem is not None:
            rate = measured_rate_bytes_s(Path(tier)) if measure else None
            if rate is None and path in reported:
                rate = reported[path].rate_bytes_s
            yield Misplaced(tier=name, path=tier, file_system=found.name, problem=problem, rate_bytes_s=rate)
