"""The events of one run in order of time, for a picture of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptkit.events import Event, Kind
from ckptkit.goodput.parts import Interval, Part, partition
from ckptkit.goodput.report import Disruption, Injected, goodput_report, stalls_of
from ckptkit.goodput.runs import attempts_of, clock_of, intervals

_PROCESSES_SHOWN, _LINES_SHOWN = 8, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Time with one name. Seconds since the run began."""

    start_s: float
    end_s: float
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMark:
    """The way of a save into a tier, or the reason why it did not get there (then it has no length)."""

    step: int | None
    tier: str
    start_s: float
    end_s: float
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMark:
    """A loss, its cost, and the log lines that lead to it: the launcher's, and each process's last ones.

    `lines`: the name of the log and the line, at most 3 of each of 8 processes, the lost one first.
    """

    at_s: float
    loss: Disruption
    lines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreMark:
    """A restore: when it ended on the slowest process, and the tiers that served it, most bytes first."""

    at_s: float
    step: int | None
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The run in order; times are seconds since `origin_s`, which is wall-clock time."""

    origin_s: float
    wall_s: float
    stretches: tuple[Stretch, ...]
    saves: tuple[SaveMark, ...]
    losses: tuple[LossMark, ...]
    restores: tuple[RestoreMark, ...]
    stalls_ms: tuple[float, ...]
    injected: tuple[Injected, ...] = ()


def timeline_of(logs: Sequence[Sequence[Event]]) -> Timeline:
    """The timeline of the logs that `goodput_report` takes; neighbours of one name are one stretch."""
    report = goodput_report(logs)
    attempts, launcher = attempts_of(logs)
    origin_s, end_s = clock_of(attempts, launcher)
    events = [(attempt.number, event) for attempt in attempts for event in attempt.events]
    told = {event.fields["attempt"]: event for event in launcher if event.kind == Kind.DISRUPTED}
    lost_at = {number: event.at_s for number, event in told.items()}
    by_number = {attempt.number: attempt.events for attempt in attempts}
    last_at = {attempt.number: attempt.last_s for attempt in attempts}
    return Timeline(
        origin_s=origin_s,
        wall_s=end_s - origin_s,
        stretches=tuple(_merged(intervals(attempts, launcher, (origin_s, end_s)), origin_s)),
        saves=tuple(_saves(events, origin_s)),
        losses=tuple(
            LossMark(
                at_s=lost_at.get(loss.attempt, last_at.get(loss.attempt, origin_s)) - origin_s,
                loss=loss,
                lines=tuple(_lines(loss, told.get(loss.attempt), by_number.get(loss.attempt, []))),
            )
            for loss in report.disruptions
        ),
        restores=tuple(_restores(events, origin_s)),
        stalls_ms=tuple(sorted(1e3 * stall_s for *_, stall_s in stalls_of(attempts))),
        injected=report.injected,
    )


def _lines(loss: Disruption, told: Event | None, events: Sequence[Event]) -> Iterable[tuple[str, str]]:
    """The launcher's line about a loss, and the last ones of each process of the attempt."""
    if told is not None:
        yield "launcher.jsonl", told.to_json()
    number = next((event.fields["attempt"] for event in events if event.kind == Kind.STARTED), loss.attempt)
    processes = sorted({event.process for event in events}, key=lambda process: (process != loss.process, process))
    for process in processes[:_PROCESSES_SHOWN]:
        own = sorted((event for event in events if event.process == process), key=lambda event: event.at_s)
        for event in own[-_LINES_SHOWN:]:
            yield f"attempt-{number}-process-{process}.jsonl", event.to_json()


def _merged(claims: Iterable[Interval], origin_s: float) -> list[Stretch]:
    merged: list[Stretch] = []
    for piece in partition(claims):
        start_s, end_s = piece.start_s - origin_s, piece.end_s - origin_s
        if merged and merged[-1].part == piece.part:
            start_s = merged.pop().start_s
        merged.append(Stretch(start_s=start_s, end_s=end_s, part=piece.part))
    return merged


def _saves(events: Iterable[tuple[int, Event]], origin_s: float) -> list[SaveMark]:
    """One per save and tier, from the first process that began to the last that was done."""
    found: dict[tuple[int, int | None, str], SaveMark] = {}
    for attempt, event in events:
        at_s = event.at_s - origin_s
        if event.kind == Kind.COMMITTED and event.tier is not None:
            mark = SaveMark(
                step=event.step, tier=event.tier, start_s=at_s - event.fields["duration_s"], end_s=at_s, problem=None
            )
        elif event.kind in (Kind.SKIPPED, Kind.FAILED):
            problem = str(event.fields.get("reason", event.kind))
            mark = SaveMark(step=event.step, tier=event.tier or "all", start_s=at_s, end_s=at_s, problem=problem)
        else:
            continue
        key = (attempt, mark.step, mark.tier)
        before = found.get(key, mark)
        found[key] = replace(
            mark,
            start_s=min(before.start_s, mark.start_s),
            end_s=max(before.end_s, mark.end_s),
            problem=before.problem or mark.problem,
        )
    return sorted(found.values(), key=lambda mark: mark.start_s)


def _restores(events: Iterable[tuple[int, Event]], origin_s: float) -> list[RestoreMark]:
    by_restore: dict[tuple[int, int | None], list[Event]] = defaultdict(list)
    for attempt, event in events:
        if event.kind == Kind.RESTORED:
            by_restore[attempt, event.step].append(event)
    marks = []
    for (_, step), restored in by_restore.items():
        size: dict[str, int] = defaultdict(int)
        for tier, count in (pair for event in restored for pair in event.fields["sources"].items()):
            size[tier] += count
        tiers = tuple(sorted(size, key=lambda tier: -size[tier]))
        marks.append(RestoreMark(at_s=max(e.at_s for e in restored) - origin_s, step=step, tiers=tiers))
    return sorted(marks, key=lambda mark: mark.at_s)
