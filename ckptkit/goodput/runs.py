"""The event logs of a run, grouped by attempt, and the claims that their spans make to its time."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import median_low
from typing import Literal, NamedTuple

from ckptkit.events import LOG_NAME, Event, Kind, read_events
from ckptkit.goodput.parts import Interval, Part, part_of
from ckptkit.goodput.signs import Stride, is_restore, spans_of, strides_of, usual_step_s
from ckptkit.util.words import count_text

StepsFrom = Literal["spans", "calls", "both", "nothing"]  # both: some attempts by spans, some by calls


class RunLogs(NamedTuple):
    """The logs of a run, and a note for each file with lines that could not be read."""

    logs: list[list[Event]]
    notes: tuple[str, ...]


def load_run(directory: str | os.PathLike[str]) -> list[list[Event]]:
    """The logs of a run, as `read_run` reads them, without its notes."""
    return read_run(directory).logs


def read_run(directory: str | os.PathLike[str]) -> RunLogs:
    """The logs of a run: `launcher.jsonl` and `attempt-<a>-process-<p>.jsonl`; other files are not read.

    Skips events of kinds that only a newer ckptkit knows, with a note. Raises ValueError for a damaged line, and
    FileNotFoundError for a directory without logs.

    The name gives the process, and also the attempt if no `started` event has it: many loops write none, and a full
    disk loses it.
    """
    root = Path(directory)
    paths = sorted(chain(root.glob("launcher.jsonl"), root.glob("attempt-*-process-*.jsonl")))
    if not paths:
        raise FileNotFoundError(
            f"no event logs in {root}: expected launcher.jsonl or attempt-<a>-process-<p>.jsonl; "
            "name the directory that the run was given as --events"
        )
    logs, notes = list[list[Event]](), list[str]()
    for path in paths:
        unknown = Counter[str]()
        logs.append(_as_named(path, read_events(path, unknown=unknown)))
        notes += [_unread(path.name, unknown)] if unknown else []
    return RunLogs(logs, tuple(notes))


def _unread(name: str, unknown: Counter[str]) -> str:
    count, shown = unknown.total(), sorted(unknown)
    more = f" and {len(shown) - _KINDS_SHOWN} more" if len(shown) > _KINDS_SHOWN else ""
    return (
        f"{count_text(count, 'line')} of {name} could not be read: this ckptkit does not know the "
        f"kinds of event {', '.join(shown[:_KINDS_SHOWN])}{more}. Read the logs with the version that wrote them."
    )


def _as_named(path: Path, log: list[Event]) -> list[Event]:
    named = LOG_NAME.fullmatch(path.name)
    if named is None or not log:
        return log
    attempt, process = int(named[1]), int(named[2])
    log = [event if event.process == process else replace(event, process=process) for event in log]
    if any(event.kind == Kind.STARTED for event in log):
        return log
    return [Event(kind=Kind.STARTED, at_s=log[0].at_s, process=process, fields={"attempt": attempt}), *log]


def steps_done(directory: str | os.PathLike[str]) -> int | None:
    """The number of steps of the run with logs in `directory`, over all attempts; None if no log has it.

    A step that was taken and then lost counts: less the step that a run resumes from, it is the repeated work. None
    also if a log is damaged or cannot be read: a run must not stop for its account. Cost: process 0's logs are read
    (the others are equal), or the existing ones if process 0 has none here.
    """
    root = Path(directory)
    paths = list(root.glob("attempt-*-process-0.jsonl")) or root.glob("attempt-*-process-*.jsonl")
    try:
        return max(
            (step + 1 for path in paths for step, _ in _steps(read_events(path, unknown=Counter()))), default=None
        )
    except (ValueError, OSError):
        return None


_SIGNS = frozenset({Kind.OPENED, Kind.SPAN, Kind.CALLED, Kind.STAGED})  # that a run continues
_KINDS_SHOWN = 3  # in a note
_ODD_S = 3600.0  # so far outside of its neighbours' time no event of a log is right
_FAR_S = 366 * 86400.0  # the same for its first and last event, which have one neighbour
_CLOCK_S = 1e-3  # the start of a span is its end less a duration by another clock


class Redone(NamedTuple):
    """The steps of an attempt whose work was lost: done again later."""

    from_step: float  # later attempts did this step, and all above it, again
    rollbacks: list[
        tuple[float, int]
    ]  # in order: when the attempt went back, and to which step then or later, at least

    def undone(self, step: int, span: Event) -> bool:
        """Whether the attempt went back to before the step after it was done."""
        place = bisect_left(self.rollbacks, span.at_s, key=lambda each: each[0])
        return place < len(self.rollbacks) and step >= self.rollbacks[place][1]

    def keeps(self, step: int, span: Event) -> bool:
        """Whether the work of the step was kept."""
        return step < self.from_step and not self.undone(step, span)


def _rollbacks(
    primary: Iterable[Event], steps: Sequence[tuple[int, Event]], steps_from: StepsFrom
) -> list[tuple[float, int]]:
    """When process 0 went back within the attempt: by a guard, or by a restore of its own.

    The first step after it is the first one that was undone; the number of a save has no influence. The lowest one of
    this and all later times counts. A restore that no step of the attempt follows is known from the next attempt.
    """
    begun = sorted((start_s(span), step) for step, span in steps)
    found: list[tuple[float, int]] = []
    for event in sorted(primary, key=lambda event: event.at_s, reverse=True):
        by_guard = event.kind == Kind.ROLLED_BACK and event.step is not None
        if not (by_guard or is_restore(event)) or event.fields.get("failed"):
            continue
        place = bisect_left(begun, event.at_s - _CLOCK_S, key=lambda each: each[0])
        to_step = begun[place][1] if place < len(begun) else None
        if to_step is None or (event.step is not None and to_step < event.step):
            if not by_guard or event.step is None:
                continue
            to_step = event.step + (steps_from == "calls")
        found.append((event.at_s, min(to_step, found[-1][1]) if found else to_step))
    return found[::-1]


class Attempt(NamedTuple):
    """One attempt: the events of all processes, process 0's spans, and those of its spans that are steps.

    Where the loop recorded no `step` spans, they are made of its calls of the manager (`ckptkit.goodput.signs`).
    """

    number: int
    events: list[Event]
    spans: list[Event]
    steps: list[tuple[int, Event]]
    first_s: float | None  # process 0's first sign of life
    last_s: float  # its last one; where it gave none, the other processes', whose clocks may differ
    redone: Redone
    steps_from: StepsFrom

    @property
    def was_preempted(self) -> bool:
        """Whether it saved a last step because the scheduler wanted its machines."""
        return any(event.kind == Kind.PREEMPTED for event in self.events)

    @property
    def up_s(self) -> float:
        """From process 0's first sign of life to its last."""
        return 0.0 if self.first_s is None else self.last_s - self.first_s

    @property
    def is_finished(self) -> bool:
        """Whether it came to the end of the run that was planned then.

        It emitted FINISHED, or its manager was closed after all steps, without an exception or a preemption.
        """
        if any(event.kind == Kind.FINISHED for event in self.events):
            return True
        primary = [event for event in self.events if event.process == 0] or self.events
        closed = max((e for e in primary if e.kind == Kind.CLOSED), key=lambda event: event.at_s, default=None)
        if closed is None or closed.fields.get("failed") or self.was_preempted:
            return False
        return not any(event.kind in _SIGNS and event.at_s > closed.at_s for event in primary)


def attempts_of(logs: Sequence[Sequence[Event]]) -> tuple[list[Attempt], list[Event]]:
    """The attempts in order, and the events of the launcher.

    A restarted container or a resubmitted job may use a number twice. Each start is then an attempt of its own, and
    all are numbered in the order of time.
    """
    lives: dict[tuple[int, int], list[Event]] = defaultdict(list)  # by number, and which start with that number
    launcher: list[Event] = []
    for log in map(_with_plausible_stamps, logs):
        if any(event.process < 0 for event in log):
            launcher.extend(log)
            continue
        starts: Counter[int] = Counter()
        for life in _lives(log):
            number = next((e.fields["attempt"] for e in life if e.kind == Kind.STARTED), 0)
            lives[number, starts[number]].extend(life)
            starts[number] += 1
    numbered = _numbered(lives)
    primaries = [_without_computing([event for event in events if event.process == 0]) for _, events in numbered]
    explicit = [list(_steps(primary)) for primary in primaries]
    strides = [[] if told else strides_of(primary) for told, primary in zip(explicit, primaries, strict=True)]
    usual_s = usual_step_s(chain.from_iterable(strides))
    attempts: list[Attempt] = []
    wasted_from = math.inf
    for place in reversed(range(len(numbered))):
        (number, events), primary = numbered[place], primaries[place]
        spans = [event for event in primary if event.kind == Kind.SPAN]
        steps_from: StepsFrom = "spans" if explicit[place] else "calls" if strides[place] else "nothing"
        spans += _made(strides[place], usual_s)
        steps = list(_steps(spans))
        first_s = min(map(start_s, primary), default=None)
        last_s = max(event.at_s for event in primary or events)
        redone = Redone(wasted_from, _rollbacks(primary, steps, steps_from))
        attempts.append(Attempt(number, events, spans, steps, first_s, last_s, redone, steps_from))
        wasted_from = min([wasted_from, *(step for step, _ in steps)])
    return attempts[::-1], launcher


def _made(strides: Sequence[Stride], usual_s: float | None) -> Iterable[Event]:
    """Spans of the strides of an attempt; how long a step usually is, it knows best itself."""
    own_s = usual_step_s(strides)
    return spans_of(strides, usual_s if own_s is None else own_s, process=0)


def _without_computing(events: list[Event]) -> list[Event]:
    """The events of one process. A save that found its step unfinished waited for it: that time is the step's."""
    waited = [event for event in events if event.kind == Kind.STAGED and event.fields.get("computing_s", 0.0) > 0]
    staged = sorted(((e.at_s, e.fields["computing_s"], e.step) for e in waited), key=lambda each: each[0])
    if not staged:
        return events
    told: list[Event] = []
    for event in events:
        if event.kind == Kind.SPAN and event.fields["span"] == "checkpoint_save":
            begin_s = start_s(event)
            place = bisect_left(staged, begin_s, key=lambda each: each[0])
            if place < len(staged) and staged[place][0] <= event.at_s:
                _, computing_s, step = staged[place]
                cut_s = min(event.at_s, begin_s + computing_s)
                event = replace(event, fields={**event.fields, "duration_s": event.at_s - cut_s})
                told.append(Event.span("step_tail", start_s=begin_s, end_s=cut_s, process=event.process, step=step))
        told.append(event)
    return told


def steps_from_of(attempts: Iterable[Attempt]) -> StepsFrom:
    """Where the steps of a run are known from."""
    kinds: set[StepsFrom] = {attempt.steps_from for attempt in attempts if attempt.steps_from != "nothing"}
    if not kinds:
        return "nothing"
    return "both" if len(kinds) > 1 else kinds.pop()


def _steps(events: Iterable[Event]) -> Iterable[tuple[int, Event]]:
    """The steps that were done: one that ended in an exception, as when another process was lost, was not."""
    for event in events:
        if event.kind != Kind.SPAN or event.fields["span"] != "step" or event.fields.get("failed"):
            continue
        if event.step is not None:
            yield event.step, event


def _lives(log: Sequence[Event]) -> Iterable[Sequence[Event]]:
    """The log of a process, cut at each new start; events before its first `started` belong to its first life."""
    starts = [place for place, event in enumerate(log) if event.kind == Kind.STARTED]
    return [log[begin:end] for begin, end in pairwise([0, *starts[1:], len(log)]) if begin < end]


def _numbered(lives: dict[tuple[int, int], list[Event]]) -> list[tuple[int, list[Event]]]:
    if all(again == 0 for _, again in lives):
        return [(number, events) for (number, _), events in sorted(lives.items(), key=lambda life: life[0])]

    def began_s(events: list[Event]) -> float:
        return min(map(start_s, [event for event in events if event.process == 0] or events))

    first = min(number for number, _ in lives)
    return list(enumerate(sorted(lives.values(), key=began_s), start=first))


def start_s(event: Event) -> float:
    """When it began: a span is stamped at its end."""
    return event.at_s - max(0.0, event.fields["duration_s"]) if event.kind == Kind.SPAN else event.at_s


def lost_attempts(attempts: Sequence[Attempt], launcher: Sequence[Event]) -> list[int]:
    """The numbers of the attempts that were lost.

    The launcher's log decides for the attempts of which it has the end. Any other one was lost if it has a successor
    and had not finished: a run that is made longer has lost nothing.
    """
    told = {event.fields["attempt"] for event in launcher if event.kind == Kind.DISRUPTED}
    ended, running = set[int](), None
    for event in launcher:
        if event.kind in (Kind.STARTED, Kind.RELAUNCHED):
            running = event.fields["attempt"]
        elif event.kind == Kind.FINISHED and running is not None:
            ended.add(running)
    untold = {each.number for each in attempts[:-1] if not each.is_finished and each.number not in ended}
    return sorted(told | untold)


def _with_plausible_stamps(log: Sequence[Event]) -> Sequence[Event]:
    """A log without single events whose stamps cannot be right: a host may count from 1970 until its clock is set.

    A log is written in the order of time. An event is left out if it is more than `_ODD_S` outside the time between its
    neighbours. At an end of the log it is left out if it is more than `_FAR_S` from the middle one."""
    kept: list[Event] = []
    middle_s = median_low(event.at_s for event in log) if log else 0.0
    for place, event in enumerate(log):
        low_s = kept[-1].at_s if kept else None
        high_s = log[place + 1].at_s if place + 1 < len(log) else None
        if low_s is None or high_s is None:
            is_right = abs(event.at_s - middle_s) <= _FAR_S
        else:
            is_right = low_s > high_s or low_s - _ODD_S <= event.at_s <= high_s + _ODD_S
        if is_right:
            kept.append(event)
    return kept


def clock_of(attempts: Sequence[Attempt], launcher: Sequence[Event]) -> tuple[float, float]:
    """When the run began and ended. Raises ValueError where no process logged an event.

    A finished run ends with the last event of its process 0, like a job that reports its own end; the launcher's time
    to notice it does not count. Other processes count only if process 0 has no events: their hosts' clocks may be off
    by hours.
    """
    if not attempts:
        raise ValueError("no process of the run logged an event: there is nothing to account for")
    own = list(chain.from_iterable(attempt.events for attempt in attempts))
    own = [event for event in own if event.process == 0] or own
    told = [event for event in launcher if not (attempts[-1].is_finished and event.kind == Kind.FINISHED)]
    events = [*own, *told]
    return min(map(start_s, events)), max(event.at_s for event in events)


def intervals(
    attempts: Sequence[Attempt], launcher: Sequence[Event], clock_s: tuple[float, float]
) -> Iterable[Interval]:
    """Every claim to the time between the two ends of `clock_s`."""
    yield Interval(*clock_s, Part.OTHER, 0)
    idle_from_s, idle_part = clock_s[0], Part.INITIALIZATION
    lost = lost_attempts(attempts, launcher)
    for attempt in attempts:
        if attempt.first_s is None:  # process 0 was lost before its first event: the gap continues
            continue
        yield Interval(idle_from_s, attempt.first_s, idle_part, 1)
        if attempt.steps:  # time before the first step that no span covers
            yield Interval(attempt.first_s, start_s(attempt.steps[0][1]), Part.INITIALIZATION, 1)
        for span in attempt.spans:
            part = _part(span, attempt)
            if part is not None:
                yield Interval(start_s(span), span.at_s, part, 2)
        idle_from_s = max((span.at_s for span in attempt.spans), default=attempt.first_s)
        idle_part = Part.RECOVERY if attempt.number in lost or attempt.was_preempted else Part.STOPPED
    last_loss_s = max((e.at_s for e in launcher if e.kind == Kind.DISRUPTED), default=-math.inf)
    if last_loss_s >= max((a.first_s for a in attempts if a.first_s is not None), default=math.inf):
        yield Interval(idle_from_s, clock_s[1], Part.RECOVERY, 1)  # lost, and no attempt followed


def _part(span: Event, attempt: Attempt) -> Part | None:
    if span.fields["span"] in ("step", "step_tail"):
        if span.step is not None and attempt.redone.undone(span.step, span):
            return Part.WASTED_BY_SPIKE
        lost = span.fields.get("failed") or (span.step is not None and span.step >= attempt.redone.from_step)
        return Part.WASTED if lost else Part.PRODUCTIVE
    return part_of(span.fields["span"])
