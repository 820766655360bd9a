"""`diagnose`: gathers the facts of a run and the mounts of its tiers, and asks every rule."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ckptkit.diagnosis.records import Advice, Facts, Misplaced
from ckptkit.diagnosis.rules import RULES
from ckptkit.errors import CorruptCheckpointError, with_damage
from ckptkit.events import Event, Kind
from ckptkit.goodput import GoodputReport, goodput_report, read_run
from ckptkit.inspection import list_steps
from ckptkit.inspection.records import FORMAT
from ckptkit.model.tiers import DURABLE
from ckptkit.store.backends import properties_of
from ckptkit.store.local import disk_room
from ckptkit.store.mounts import file_system_of, measured_rate_bytes_s, root_problem, tier_problem
from ckptkit.store.roots import root_url
from ckptkit.upkeep import usage
from ckptkit.util.plain import plain_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings of the rules for a run, the most urgent first. `events`: where its logs are; None: none were given.

    `facts`: the inputs of the rules.
    """

    root: str
    events: str | None
    rules: int
    advice: tuple[Advice, ...]
    facts: Facts
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = plain_fields(self, without=("facts",))
        return {"format": FORMAT, **found, "stored_bytes": self.facts.usage.stored_bytes}


def diagnose(
    root: str,
    *,
    events: str | None = None,
    tiers: Sequence[str] = (),
    host_id: str,
    timeout_s: float = 20.0,
    measure: bool = False,
) -> Diagnosis:
    """Looks at a durable root, this host's fast tiers, their mounts, and the event logs of its run (a directory, as for
    `goodput`). Reports what is slow, at risk or wasteful. Reads no array. Writes nothing, except with `measure`: up to
    32 MiB, which it then removes, into each fast tier that is on the wrong mount, for its rate.

    Without `events`, the rules that need them report nothing. Cost: that of `list_steps`, `usage` and reading the logs.
    Raises `StepNotFoundError` without a root, FileNotFoundError without logs, `CorruptCheckpointError` for logs that
    cannot be read, `StoreError`.
    """
    listing = list_steps(root, tiers=tiers, host_id=host_id, timeout_s=timeout_s)
    used = usage(root, tiers=tiers, host_id=host_id, timeout_s=timeout_s)
    report, told, notes = None, list[Event](), list(listing.notes)
    if events is not None:
        with with_damage(listing.problems):
            told, report = _account(events, notes)
    wrong = misplaced(listing.root, tiers, told, measure=measure)
    facts = Facts(
        usage=used,
        steps=listing.steps,
        report=report,
        events=told,
        misplaced=wrong,
        host_id=host_id,
        durable_room=disk_room(listing.root) if properties_of(listing.root).file_system else None,
    )
    advice = chain.from_iterable(rule(facts) for rule in RULES)
    return Diagnosis(
        root=listing.root,
        events=events,
        rules=len(RULES),
        advice=tuple(advice),
        facts=facts,
        notes=tuple(notes),
        problems=listing.problems,
    )


def _account(events: str, notes: list[str]) -> tuple[list[Event], GoodputReport | None]:
    """The events of a run in their order, and its goodput; a note where there is nothing to account for."""
    try:
        logs, unread = read_run(events)
        notes += unread
        told = sorted(chain.from_iterable(logs), key=lambda event: event.at_s)
        try:
            return told, goodput_report(logs)
        except ValueError as error:
            notes.append(f"no goodput: {events}: {error}")
            return told, None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{events}: {error}", path=events) from error


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
