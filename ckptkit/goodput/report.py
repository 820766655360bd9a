"""Where the time of a run went: a pure fold from the event logs of all processes and attempts to one report.

The kinds of time are ml-goodput-measurement's, in lower case. Process 0's spans partition the wall clock;
what they leave open is recovery (between two attempts), initialization (before the first) or `other`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import accumulate, chain, groupby, pairwise
from statistics import fmean, median
from typing import Any

from ckptkit.events import Event, Kind
from ckptkit.goodput.parts import PAUSES, Interval, Part, is_known, part_of, partition, sum_parts
from ckptkit.goodput.runs import (
    Attempt,
    StepsFrom,
    attempts_of,
    clock_of,
    intervals,
    lost_attempts,
    start_s,
    steps_from_of,
)

_NOT_TRAINING = (
    Part.INITIALIZATION,
    Part.TRAINING_PREP,
    Part.COMPILE,
    Part.CHECKPOINT_RESTORE,
    Part.WASTED,
    Part.WASTED_BY_SPIKE,
    Part.RECOVERY,
    Part.STOPPED,
    Part.CUSTOM,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput by three definitions, each a share of the wall clock; None where no log records steps.

    Reports lead with the first.

    `ml_goodput`: as Google's ml-goodput-measurement counts it. A kept step lasts until the next one begins, less
    the spans of badput in between. The first one of an attempt counts as the mean of the others, and the rest of its
    time is program start-up. (Google's calculator takes a restart that repeats no step for one long step. Here the
    step counts, and the gap does not.)
    `effective_training_time`: what is left without starting, restoring, recovering and repeating work (ETTR:
    A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025; time in
    a queue before the first event is not known here).
    `new_steps`: distinct steps whose work was kept x median step time / elapsed ("time computing useful new steps
    over the elapsed time", Gemini, 2023). Repetitions and the time above the median do not count.
    """

    ml_goodput: float | None
    effective_training_time: float | None
    new_steps: float | None
    distinct_steps: int
    step_s_p50: float


# The definitions in the order in which reports show them: field, name, formula.
DEFINITIONS = (
    (
        "ml_goodput",
        "Google's ML goodput",
        "time of kept steps, from start to start, less the spans in between (saves, data loading, ...), over the total",
    ),
    (
        "effective_training_time",
        "effective training time",
        "the total less starting, restoring, recovering, repeating and custom spans, over the total",
    ),
    ("new_steps", "new steps over elapsed", "distinct kept steps times the median step, over the total"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruption:
    """One loss: what it cost, and how long until steps came out again (None: they never did).

    `lost_steps` were done before the loss and are done again. `resume_s` runs from the loss to the end of the first
    step of a later attempt; `resume_parts_s` splits it. `caught_up_s` runs to the end of the first step that had not
    been done before. A loss of unknown moment counts from the moment at which the launcher noticed it.
    """

    attempt: int
    process: int | None
    cause: str
    wiped: tuple[str, ...]
    lost_steps: int
    resume_s: float | None
    caught_up_s: float | None
    resume_parts_s: Mapping[Part, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """Harm that `ckptkit chaos` did, `at_s` seconds after the run began: to `target`, in the words of `did`.

    `what`: the kind of fault number `fault`, or `wipe` or `flip` for the damage that it did to files.
    """

    at_s: float
    fault: int
    what: str
    target: str
    did: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Stall of the step loop per save (its slowest process counts) and commit time per tier."""

    saves: int
    stall_ms_p50: float | None
    stall_ms_p99: float | None
    commit_s_p50: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """One restore: bytes served by each tier, over all processes; the slowest process's seconds from the call to the
    placed items. `waited_s`: how long process 0's loop waited; less, where a restore ran in the background."""

    attempt: int
    step: int | None
    source_bytes: Mapping[str, int]
    restore_s: float
    waited_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """The account of a run. `parts_s` has every `Part` and adds up to `wall_s`.

    `steps_from`: whether the loop recorded its steps (`spans`), they are known from its calls of the manager (`calls`),
    or from neither (`nothing`: then no goodput is known). `custom_s`: seconds in spans of process 0 with a name that is
    not a kind of time, by name.
    """

    wall_s: float
    parts_s: Mapping[Part, float]
    goodput: Goodput
    disruptions: tuple[Disruption, ...]
    saves: Saves
    restores: tuple[Restore, ...]
    steps_from: StepsFrom
    custom_s: Mapping[str, float]
    injected: tuple[Injected, ...] = ()

    @property
    def mean_time_to_resume_s(self) -> dict[str, float]:
        """Seconds from a loss to the end of the first step after it, the mean over losses that were come back from:
        in all (`total`) and by part. Empty where there was none.
        """
        resumed = [loss for loss in self.disruptions if loss.resume_s is not None]
        if not resumed:
            return {}
        total_s = fmean(loss.resume_s or 0.0 for loss in resumed)
        return {"total": total_s} | {str(part): fmean(loss.resume_parts_s[part] for loss in resumed) for part in Part}

    def to_json(self) -> dict[str, Any]:
        """The report as plain values (docs/GOODPUT.md has the shape)."""
        plain = asdict(self)
        plain["parts_s"] = {str(part): seconds for part, seconds in self.parts_s.items()}
        for loss in plain["disruptions"]:
            loss["resume_parts_s"] = {str(part): seconds for part, seconds in loss["resume_parts_s"].items()}
        return {"format": "ckptkit.goodput/1", **plain, "mean_time_to_resume_s": self.mean_time_to_resume_s}


def goodput_report(logs: Sequence[Sequence[Event]]) -> GoodputReport:
    """The account of one run from the logs of its launcher (if any), processes and attempts, in any order.

    The wall clock runs from the first event to the last, a span counting from its start. Nested spans are
    counted once: inner time belongs to the inner kind. Cost: O(n log n) in the events.
    """
    attempts, launcher = attempts_of(logs)
    clock_s = clock_of(attempts, launcher)
    segments = partition(intervals(attempts, launcher, clock_s))
    parts_s = sum_parts(segments, *clock_s)
    return GoodputReport(
        wall_s=clock_s[1] - clock_s[0],
        parts_s=parts_s,
        goodput=_goodput(attempts, parts_s),
        disruptions=_disruptions(attempts, launcher, segments),
        saves=_saves(attempts),
        restores=_restores(attempts),
        steps_from=steps_from_of(attempts),
        custom_s=_custom_s(attempts),
        injected=_injected(launcher, clock_s[0]),
    )


def _injected(launcher: Sequence[Event], began_s: float) -> tuple[Injected, ...]:
    told = [(event.at_s, event.fields) for event in launcher if event.kind == Kind.INJECTED]
    return tuple(
        Injected(at_s=at_s - began_s, **{name: fields[name] for name in ("fault", "what", "target", "did")})
        for at_s, fields in sorted(told, key=lambda each: each[0])
    )


def _custom_s(attempts: Sequence[Attempt]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for span in chain.from_iterable(attempt.spans for attempt in attempts):
        if not is_known(span.fields["span"]):
            seconds[span.fields["span"]] += span.fields["duration_s"]
    return dict(sorted(seconds.items()))


def _goodput(attempts: Sequence[Attempt], parts_s: Mapping[Part, float]) -> Goodput:
    wall_s = math.fsum(parts_s.values())
    steps_s = [length_s for attempt in attempts for length_s in _lengths_s(attempt)]
    distinct_steps = len({step for a in attempts for step, span in a.steps if a.redone.keeps(step, span)})
    step_s_p50 = median(steps_s or [0.0])
    away_s = math.fsum(parts_s[part] for part in _NOT_TRAINING)
    if not steps_s:
        return Goodput(ml_goodput=None, effective_training_time=None, new_steps=None, distinct_steps=0, step_s_p50=0.0)
    return Goodput(
        ml_goodput=_ml_productive_s(attempts) / wall_s if wall_s > 0 else 0.0,
        effective_training_time=1.0 - away_s / wall_s if wall_s > 0 else 0.0,
        new_steps=distinct_steps * step_s_p50 / wall_s if wall_s > 0 else 0.0,
        distinct_steps=distinct_steps,
        step_s_p50=step_s_p50,
    )


def _lengths_s(attempt: Attempt) -> Iterable[float]:
    """How long each step was. Spans in a row with one number are the parts of one step: gradients are accumulated."""
    for _, parts in groupby(attempt.steps, key=lambda pair: (pair[0], attempt.redone.undone(*pair))):
        yield math.fsum(span.fields["duration_s"] for _, span in parts)


def _ml_productive_s(attempts: Sequence[Attempt]) -> float:
    productive_s = 0.0
    for attempt in attempts:
        pauses = _joined(e for e in attempt.spans if part_of(e.fields["span"]) in PAUSES or e.fields.get("failed"))
        kept = [
            (start_s(this), start_s(after))
            for (step, this), (following, after) in pairwise(attempt.steps)
            # One span may be many steps, or a part of a step.
            if attempt.redone.keeps(step, this) and following >= step
        ]
        lengths_s = _without(kept, pauses)
        usual_s = fmean(lengths_s[1:]) if len(lengths_s) > 1 else math.inf
        productive_s += math.fsum([*(min(usual_s, each) for each in lengths_s[:1]), *lengths_s[1:]])
        if attempt.steps and attempt.redone.keeps(*attempt.steps[-1]):  # no other step of the attempt began after it
            productive_s += math.fsum(_without([_ends(attempt.steps[-1][1])], pauses))
    return productive_s


def _ends(span: Event) -> tuple[float, float]:
    return start_s(span), span.at_s


def _joined(spans: Iterable[Event]) -> list[tuple[float, float]]:
    """The time that is in at least one of the spans, in order: a loop's own span may have the manager's inside."""
    joined: list[tuple[float, float]] = []
    for from_s, to_s in sorted(map(_ends, spans)):
        if joined and from_s <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], to_s)
        else:
            joined.append((from_s, to_s))
    return joined


def _without(stretches: Sequence[tuple[float, float]], pauses: Sequence[tuple[float, float]]) -> list[float]:
    """The length of each stretch less the pauses that begin in it; both in order. A pause is counted once."""
    lengths_s, next_pause = [], 0
    for from_s, to_s in stretches:
        length_s = to_s - from_s
        while next_pause < len(pauses) and pauses[next_pause][0] < to_s:
            begin_s, end_s = pauses[next_pause]
            length_s -= max(0.0, min(end_s, to_s) - begin_s) if begin_s >= from_s else 0.0
            next_pause += 1
        lengths_s.append(max(0.0, length_s))
    return lengths_s


def _disruptions(
    attempts: Sequence[Attempt], launcher: Sequence[Event], segments: Sequence[Interval]
) -> tuple[Disruption, ...]:
    losses = {event.fields["attempt"]: event for event in launcher if event.kind == Kind.DISRUPTED}
    numbers = [each.number for each in attempts]
    lost_steps, resumed_s, caught_up_s = _lost_steps(attempts), _resumed_s(attempts), _caught_up_s(attempts)
    found: list[Disruption] = []
    for number in lost_attempts(attempts, launcher):
        place, loss = bisect_right(numbers, number), losses.get(number)  # the attempts from `place` on came later
        own = attempts[place - 1] if place and numbers[place - 1] == number else None
        at_s = loss.at_s - loss.fields.get("detect_s", 0.0) if loss else attempts[place - 1].last_s
        fields = loss.fields if loss else {}
        preempted = own is not None and own.was_preempted
        found.append(
            Disruption(
                attempt=number,
                process=fields.get("lost"),
                cause=fields.get("cause", "preempted" if preempted else "unknown"),
                wiped=tuple(fields.get("wiped", ())),
                lost_steps=lost_steps.get(number, 0),
                resume_s=_since(at_s, resumed_s[place]),
                caught_up_s=_since(at_s, caught_up_s[place]),
                resume_parts_s={} if resumed_s[place] == math.inf else sum_parts(segments, at_s, resumed_s[place]),
            )
        )
    return tuple(found)


def _since(at_s: float, then_s: float) -> float | None:
    """None for what never was. Process 0 may have come back on a host whose clock is behind: no time is below 0."""
    return None if then_s == math.inf else max(0.0, then_s - at_s)


def _resumed_s(attempts: Sequence[Attempt]) -> list[float]:
    """For each place: when the first step of the attempts from there on had ended; `inf` if they have none."""
    ends_s = [min((span.at_s for _, span in attempt.steps), default=math.inf) for attempt in attempts]
    return list(accumulate([math.inf, *reversed(ends_s)], min))[::-1]


def _caught_up_s(attempts: Sequence[Attempt]) -> list[float]:
    """For each place: when the attempts from there on had first done a step above all those before; `inf` if never.

    The highest step so far only rises. So a step is new for all places up to a last one, which bisection finds.
    """
    lasts = [max((step for step, _ in attempt.steps), default=-1) for attempt in attempts]
    highest = list(accumulate([-1, *lasts], max))
    first_s = [math.inf] * len(highest)  # by the last place for which the step is new
    for number, attempt in enumerate(attempts):
        for step, span in attempt.steps:
            place = min(number, bisect_left(highest, step) - 1)
            if place >= 0:
                first_s[place] = min(first_s[place], span.at_s)
    return list(accumulate(reversed(first_s), min))[::-1]


def _lost_steps(attempts: Sequence[Attempt]) -> dict[int, int]:
    """By attempt: the steps that were done when it was lost, and that the next one to take steps did again.

    The steps may be those of earlier attempts too; what an earlier loss had undone already is not lost again.
    """
    lost: dict[int, int] = {}
    done: set[int] = set()
    downward: list[int] = []  # a heap of the same steps, negated: the highest first
    last = None
    for attempt in attempts:
        if not attempt.steps:
            continue
        first = min(step for step, _ in attempt.steps)
        count = len(done)
        while downward and -downward[0] >= first:
            done.remove(-heappop(downward))
        if last is not None:
            lost[last] = count - len(done)
        for step in {step for step, _ in attempt.steps}:  # all that are left are below
            done.add(step)
            heappush(downward, -step)
        last = attempt.number
    return lost


def _saves(attempts: Sequence[Attempt]) -> Saves:
    stall_ms: dict[tuple[int, int | None], float] = defaultdict(float)
    commit_s: dict[str, list[float]] = defaultdict(list)
    committed: set[tuple[int, int | None]] = set()
    for number, step, stall_s in stalls_of(attempts):
        stall_ms[number, step] = max(stall_ms[number, step], 1e3 * stall_s)
    for attempt in attempts:
        for event in attempt.events:
            if event.kind == Kind.COMMITTED and event.tier is not None:
                committed.add((attempt.number, event.step))
                commit_s[event.tier].append(event.fields["duration_s"])
    return Saves(
        saves=len(committed.union(stall_ms)),
        stall_ms_p50=_percentile(stall_ms.values(), 0.50),
        stall_ms_p99=_percentile(stall_ms.values(), 0.99),
        commit_s_p50={tier: median(seconds) for tier, seconds in sorted(commit_s.items())},
    )


def stalls_of(attempts: Sequence[Attempt]) -> list[tuple[int, int | None, float]]:
    """Attempt, step and seconds: how long each save held the step loop of each process.

    From the spans if no event of the run has it: an attempt that was lost before its first save has spans of calls that
    saved nothing.
    """
    staged = [(each.number, event) for each in attempts for event in each.events if event.kind == Kind.STAGED]
    if staged:
        return [(number, event.step, event.fields["stall_s"]) for number, event in staged]
    spans = [(each.number, span) for each in attempts for span in each.spans if span.step is not None]
    saves = [(number, span) for number, span in spans if part_of(span.fields["span"]) is Part.CHECKPOINT_SAVE]
    return [(number, span.step, span.fields["duration_s"]) for number, span in saves]


def _percentile(values: Iterable[float], share: float) -> float | None:
    """Linear between the two nearest ranks (NumPy's default); None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = share * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (rank - math.floor(rank)) * (high - low)


def _restores(attempts: Sequence[Attempt]) -> tuple[Restore, ...]:
    found: list[Restore] = []
    for attempt in attempts:
        by_step: dict[int | None, list[Event]] = defaultdict(list)
        for event in attempt.events:
            if event.kind == Kind.RESTORED:
                by_step[event.step].append(event)
        spans = [each for each in attempt.spans if part_of(each.fields["span"]) is Part.CHECKPOINT_RESTORE]
        done = [each for each in spans if not each.fields.get("failed")]
        waits = _joined(done)
        has_manager = any(event.kind == Kind.OPENED for event in attempt.events)
        if done and not by_step and not has_manager:  # a log of others has no more than that
            seconds = math.fsum(to_s - from_s for from_s, to_s in waits)
            step = done[-1].step
            found.append(
                Restore(attempt=attempt.number, step=step, source_bytes={}, restore_s=seconds, waited_s=seconds)
            )
        found += [_restore(attempt.number, step, events, waits) for step, events in by_step.items()]
    return tuple(found)


def _restore(attempt: int, step: int | None, events: Sequence[Event], waits: Sequence[tuple[float, float]]) -> Restore:
    restored_s = max((event.at_s for event in events if event.process == 0), default=math.inf)
    source_bytes: dict[str, int] = defaultdict(int)
    for tier, size in chain.from_iterable(event.fields["sources"].items() for event in events):
        source_bytes[tier] += size
    return Restore(
        attempt=attempt,
        step=step,
        source_bytes=dict(sorted(source_bytes.items())),
        restore_s=max(event.fields["duration_s"] for event in events),
        waited_s=next((to_s - from_s for from_s, to_s in waits if to_s >= restored_s), None),
    )
