"""Where the time of a run went: a pure fold from the event logs of all processes and attempts to one report.

The kinds of time are ml-goodput-measurement's, in lower case. Process 0's spans partition the wall clock;
what they leave open is recovery (between two attempts), initialization (before the first) or `other`.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ckptkit.events import Event, Kind, read_events
from ckptkit.intervals import Interval, partition, sum_parts
from ckptkit.resume import Phase, resume_phases


class Part(StrEnum):
    """What a second of the run was spent on; everything but `productive` is badput."""

    PRODUCTIVE = "productive"
    INITIALIZATION = "initialization"
    TRAINING_PREP = "training_prep"
    COMPILE = "compile"
    DATA_LOADING = "data_loading"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_RESTORE = "checkpoint_restore"
    WASTED = "wasted_progress_from_disruption"
    RECOVERY = "infrastructure_recovery_from_disruption"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput by two definitions, each a share of the wall clock.

    `ml_goodput`: time in steps whose work was kept / total (Google, "ML Productivity Goodput").
    `new_steps`: distinct steps whose work was kept x median step time / elapsed; how often one was run does
    not count, nor what it cost more than the median.
    """

    ml_goodput: float
    new_steps: float
    distinct_steps: int
    step_s_p50: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruption:
    """One loss: what it cost, and how long until steps came out again (None: they never did).

    `resume_s` runs from the loss (from when it was noticed, where nobody knows its moment) to the end of the first
    step of a later attempt, `caught_up_s` to the end of the first step that had not been done before;
    `resume_phases_s` splits `resume_s`.
    """

    attempt: int
    process: int | None
    cause: str
    wiped: tuple[str, ...]
    lost_steps: int
    resume_s: float | None
    caught_up_s: float | None
    resume_phases_s: Mapping[Phase, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Stall of the step loop per save (its slowest process counts) and commit time per tier."""

    saves: int
    stall_ms_p50: float | None
    stall_ms_p99: float | None
    commit_s_p50: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """One restore: bytes served by each tier, over all processes; the slowest process's seconds."""

    attempt: int
    step: int | None
    source_bytes: Mapping[str, int]
    restore_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """The account of a run. `parts_s` has every `Part` and adds up to `wall_s`."""

    wall_s: float
    parts_s: Mapping[Part, float]
    goodput: Goodput
    disruptions: tuple[Disruption, ...]
    saves: Saves
    restores: tuple[Restore, ...]


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


def goodput_report(logs: Sequence[Sequence[Event]]) -> GoodputReport:
    """The account of one run from the logs of its launcher (if any), processes and attempts, in any order.

    The wall clock runs from the first event to the last, a span counting from its start. Nested spans are
    counted once: inner time belongs to the inner kind. Cost: O(n log n) in the events.
    """
    attempts, launcher = _attempts(logs)
    if not attempts:
        raise ValueError("no process of the run logged an event: there is nothing to account for")
    events = [*launcher, *chain.from_iterable(attempt.events for attempt in attempts)]
    clock_s = (min(map(_start_s, events)), max(event.at_s for event in events))
    segments = partition(_intervals(attempts, launcher, clock_s))
    parts_s = {Part(part): seconds for part, seconds in sum_parts(segments, Part, *clock_s).items()}
    return GoodputReport(
        wall_s=clock_s[1] - clock_s[0],
        parts_s=parts_s,
        goodput=_goodput(attempts, parts_s[Part.PRODUCTIVE], clock_s[1] - clock_s[0]),
        disruptions=_disruptions(attempts, launcher),
        saves=_saves(attempts),
        restores=_restores(attempts),
    )


class _Attempt(NamedTuple):
    """One attempt: the events of all processes, process 0's spans, and those of its spans that are steps."""

    number: int
    events: list[Event]
    spans: list[Event]
    steps: list[tuple[int, Event]]
    first_s: float | None  # process 0's first sign of life
    wasted_from: float  # later attempts did this step, and all above it, again


def _attempts(logs: Sequence[Sequence[Event]]) -> tuple[list[_Attempt], list[Event]]:
    by_number: dict[int, list[Event]] = defaultdict(list)
    launcher: list[Event] = []
    for log in logs:
        if any(event.process < 0 for event in log):
            launcher.extend(log)
        elif log:
            by_number[next((e.fields["attempt"] for e in log if e.kind == Kind.STARTED), 0)].extend(log)
    attempts: list[_Attempt] = []
    wasted_from = math.inf
    for number, events in sorted(by_number.items(), reverse=True):
        primary = [event for event in events if event.process == 0]
        spans = [event for event in primary if event.kind == Kind.SPAN]
        steps = [(e.step, e) for e in spans if e.fields["span"] == "step" and e.step is not None]
        first_s = min(map(_start_s, primary), default=None)
        attempts.append(_Attempt(number, events, spans, steps, first_s, wasted_from))
        wasted_from = min([wasted_from, *(step for step, _ in steps)])
    return attempts[::-1], launcher


def _start_s(event: Event) -> float:
    return event.at_s - max(0.0, event.fields["duration_s"]) if event.kind == Kind.SPAN else event.at_s


def _intervals(
    attempts: Sequence[_Attempt], launcher: Sequence[Event], clock_s: tuple[float, float]
) -> Iterable[Interval]:
    yield Interval(*clock_s, Part.OTHER, 0)
    idle_from_s, idle_part = clock_s[0], Part.INITIALIZATION
    for attempt in attempts:
        if attempt.first_s is None:  # process 0 was lost before its first event: the gap goes on
            continue
        yield Interval(idle_from_s, attempt.first_s, idle_part, 1)
        for span in attempt.spans:
            yield Interval(_start_s(span), span.at_s, _part(span, attempt.wasted_from), 2)
        idle_from_s = max((span.at_s for span in attempt.spans), default=attempt.first_s)
        idle_part = Part.RECOVERY
    last_loss_s = max((e.at_s for e in launcher if e.kind == Kind.DISRUPTED), default=-math.inf)
    if last_loss_s >= max((a.first_s for a in attempts if a.first_s is not None), default=math.inf):
        yield Interval(idle_from_s, clock_s[1], Part.RECOVERY, 1)  # lost, and nobody came back


def _part(span: Event, wasted_from: float) -> Part:
    if span.fields["span"] == "step":
        return Part.WASTED if span.step is not None and span.step >= wasted_from else Part.PRODUCTIVE
    return next((part for part in Part if part.value == span.fields["span"]), Part.OTHER)


def _goodput(attempts: Sequence[_Attempt], productive_s: float, wall_s: float) -> Goodput:
    steps = [pair for attempt in attempts for pair in attempt.steps]
    distinct_steps = len({step for a in attempts for step, _ in a.steps if step < a.wasted_from})
    step_s_p50 = median([span.fields["duration_s"] for _, span in steps] or [0.0])
    return Goodput(
        ml_goodput=productive_s / wall_s if wall_s > 0 else 0.0,
        new_steps=distinct_steps * step_s_p50 / wall_s if wall_s > 0 else 0.0,
        distinct_steps=distinct_steps,
        step_s_p50=step_s_p50,
    )


def _disruptions(attempts: Sequence[_Attempt], launcher: Sequence[Event]) -> tuple[Disruption, ...]:
    """One per loss that the launcher saw; without a launcher one per attempt that had a successor."""
    losses = {event.fields["attempt"]: event for event in launcher if event.kind == Kind.DISRUPTED}
    lost = losses if launcher else [attempt.number for attempt in attempts[:-1]]
    return tuple(_disruption(number, losses.get(number), attempts) for number in sorted(lost))


def _disruption(number: int, loss: Event | None, attempts: Sequence[_Attempt]) -> Disruption:
    own = [a for a in attempts if a.number == number]
    done = {step for a in attempts if a.number <= number for step, _ in a.steps}
    later = [pair for a in attempts if a.number > number for pair in a.steps]
    noticed_s = loss.at_s if loss else max(event.at_s for a in own for event in a.events)
    at_s = noticed_s - (loss.fields.get("detect_s", 0.0) if loss else 0.0)
    resumed_s = min((span.at_s for _, span in later), default=None)
    phases_s: dict[Phase, float] = {}
    if resumed_s is not None:
        again = next(a for a in attempts if a.number > number and a.steps)
        primary = [event for event in again.events if event.process == 0]
        phases_s = resume_phases(primary, lost_s=at_s, noticed_s=noticed_s, resumed_s=resumed_s)
    caught_up_s = min((span.at_s for step, span in later if step > max(done, default=-1)), default=None)
    fields = loss.fields if loss else {}
    return Disruption(
        attempt=number,
        process=fields.get("lost"),
        cause=fields.get("cause", "unknown"),
        wiped=tuple(fields.get("wiped", ())),
        lost_steps=_lost_steps(number, attempts),
        resume_s=None if resumed_s is None else resumed_s - at_s,
        caught_up_s=None if caught_up_s is None else caught_up_s - at_s,
        resume_phases_s=phases_s,
    )


def _lost_steps(number: int, attempts: Sequence[_Attempt]) -> int:
    """Steps that were done when attempt `number` was lost, and that the next one to take steps did again.

    The steps may be those of earlier attempts too; what an earlier loss had undone already is not lost again.
    """
    done: set[int] = set()
    last = None
    for attempt in (a for a in attempts if a.steps):
        first = min(step for step, _ in attempt.steps)
        if attempt.number > number:
            return sum(step >= first for step in done) if last == number else 0
        done = {step for step in done if step < first} | {step for step, _ in attempt.steps}
        last = attempt.number
    return 0


def _saves(attempts: Sequence[_Attempt]) -> Saves:
    stall_ms: dict[tuple[int, int | None], float] = defaultdict(float)
    commit_s: dict[str, list[float]] = defaultdict(list)
    for number, event in ((a.number, event) for a in attempts for event in a.events):
        if event.kind == Kind.STAGED:
            save = (number, event.step)
            stall_ms[save] = max(stall_ms[save], 1e3 * event.fields["stall_s"])
        elif event.kind == Kind.COMMITTED and event.tier is not None:
            commit_s[event.tier].append(event.fields["duration_s"])
    return Saves(
        saves=len(stall_ms),
        stall_ms_p50=_percentile(stall_ms.values(), 0.50),
        stall_ms_p99=_percentile(stall_ms.values(), 0.99),
        commit_s_p50={tier: median(seconds) for tier, seconds in sorted(commit_s.items())},
    )


def _percentile(values: Iterable[float], share: float) -> float | None:
    """Linear between the two nearest ranks (NumPy's default); None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = share * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (rank - math.floor(rank)) * (high - low)


def _restores(attempts: Sequence[_Attempt]) -> tuple[Restore, ...]:
    by_restore: dict[tuple[int, int | None], list[Event]] = defaultdict(list)
    for number, event in ((a.number, event) for a in attempts for event in a.events):
        if event.kind == Kind.RESTORED:
            by_restore[number, event.step].append(event)
    return tuple(_restore(*restore, events) for restore, events in by_restore.items())


def _restore(attempt: int, step: int | None, events: Sequence[Event]) -> Restore:
    source_bytes: dict[str, int] = defaultdict(int)
    for tier, size in chain.from_iterable(event.fields["sources"].items() for event in events):
        source_bytes[tier] += size
    return Restore(
        attempt=attempt,
        step=step,
        source_bytes=dict(sorted(source_bytes.items())),
        restore_s=max(event.fields["duration_s"] for event in events),
    )
