"""The event logs of a run, told apart by attempt, and the claims that their spans make to its time."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ckptkit.events import Event, Kind, read_events
from ckptkit.goodput.parts import Interval, Part


def load_run(directory: str | os.PathLike[str]) -> list[list[Event]]:
    """The logs of a run: `launcher.jsonl` and `attempt-<a>-process-<p>.jsonl`; other files are not read."""
    root = Path(directory)
    paths = sorted(chain(root.glob("launcher.jsonl"), root.glob("attempt-*-process-*.jsonl")))
    if not paths:
        raise FileNotFoundError(
            f"no event logs in {root}: expected launcher.jsonl or attempt-<a>-process-<p>.jsonl; "
            "name the directory that the run was given as --events"
        )
    return [read_events(path) for path in paths]


def steps_done(directory: str | os.PathLike[str]) -> int | None:
    """How many steps the run whose logs are in `directory` has come to, over all attempts; None where none says.

    A step that was taken and then lost counts: less the step that a run resumes from, it is the work done again.
    """
    paths = Path(directory).glob("attempt-*-process-*.jsonl")
    spans = (event for path in paths for event in read_events(path) if event.kind == Kind.SPAN)
    return max((e.step + 1 for e in spans if e.fields["span"] == "step" and e.step is not None), default=None)


class Attempt(NamedTuple):
    """One attempt: the events of all processes, process 0's spans, and those of its spans that are steps."""

    number: int
    events: list[Event]
    spans: list[Event]
    steps: list[tuple[int, Event]]
    first_s: float | None  # process 0's first sign of life
    wasted_from: float  # later attempts did this step, and all above it, again


def attempts_of(logs: Sequence[Sequence[Event]]) -> tuple[list[Attempt], list[Event]]:
    """The attempts in order, and the events of the launcher."""
    by_number: dict[int, list[Event]] = defaultdict(list)
    launcher: list[Event] = []
    for log in logs:
        if any(event.process < 0 for event in log):
            launcher.extend(log)
        elif log:
            by_number[next((e.fields["attempt"] for e in log if e.kind == Kind.STARTED), 0)].extend(log)
    attempts: list[Attempt] = []
    wasted_from = math.inf
    for number, events in sorted(by_number.items(), reverse=True):
        primary = [event for event in events if event.process == 0]
        spans = [event for event in primary if event.kind == Kind.SPAN]
        steps = [(e.step, e) for e in spans if e.fields["span"] == "step" and e.step is not None]
        first_s = min(map(start_s, primary), default=None)
        attempts.append(Attempt(number, events, spans, steps, first_s, wasted_from))
        wasted_from = min([wasted_from, *(step for step, _ in steps)])
    return attempts[::-1], launcher


def start_s(event: Event) -> float:
    """When it began: a span is stamped at its end."""
    return event.at_s - max(0.0, event.fields["duration_s"]) if event.kind == Kind.SPAN else event.at_s


def clock_of(attempts: Sequence[Attempt], launcher: Sequence[Event]) -> tuple[float, float]:
    """When the run began and ended. Raises ValueError where no process logged an event.

    A run that finished ends with the last word of its processes, as a job does that reports its own end; what the
    launcher takes to see them gone is no part of it.
    """
    if not attempts:
        raise ValueError("no process of the run logged an event: there is nothing to account for")
    own = list(chain.from_iterable(attempt.events for attempt in attempts))
    finished = any(event.kind == Kind.FINISHED for event in attempts[-1].events)
    told = [event for event in launcher if not (finished and event.kind == Kind.FINISHED)]
    events = [*own, *told]
    return min(map(start_s, events)), max(event.at_s for event in events)


def intervals(
    attempts: Sequence[Attempt], launcher: Sequence[Event], clock_s: tuple[float, float]
) -> Iterable[Interval]:
    """Every claim to the time between the two ends of `clock_s`."""
    yield Interval(*clock_s, Part.OTHER, 0)
    idle_from_s, idle_part = clock_s[0], Part.INITIALIZATION
    for attempt in attempts:
        if attempt.first_s is None:  # process 0 was lost before its first event: the gap goes on
            continue
        yield Interval(idle_from_s, attempt.first_s, idle_part, 1)
        for span in attempt.spans:
            yield Interval(start_s(span), span.at_s, _part(span, attempt.wasted_from), 2)
        idle_from_s = max((span.at_s for span in attempt.spans), default=attempt.first_s)
        idle_part = Part.RECOVERY
    last_loss_s = max((e.at_s for e in launcher if e.kind == Kind.DISRUPTED), default=-math.inf)
    if last_loss_s >= max((a.first_s for a in attempts if a.first_s is not None), default=math.inf):
        yield Interval(idle_from_s, clock_s[1], Part.RECOVERY, 1)  # lost, and nobody came back


def _part(span: Event, wasted_from: float) -> Part:
    if span.fields["span"] == "step":
        return Part.WASTED if span.step is not None and span.step >= wasted_from else Part.PRODUCTIVE
    if span.fields["span"] == "broadcast":  # inside a restore
        return Part.CHECKPOINT_RESTORE
    return next((part for part in Part if part.value == span.fields["span"]), Part.OTHER)
