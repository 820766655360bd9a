"""What the time from a loss to the first step after it was spent on: a pure fold over event logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from ckptkit.events import Event, Kind
from ckptkit.intervals import Interval, partition, sum_parts


class Phase(StrEnum):
    """The phases of a resume, in the order in which it goes through them; they add up to the whole.

    A restore that runs while the step compiles costs only what outlasts the compilation.
    """

    DETECT = "detect"  # from the kill, where the launcher knows its moment, until the launcher noticed
    RELAUNCH = "relaunch"  # survivors end, backoff, processes start and import
    INITIALIZE = "initialize"  # the processes find each other, devices come up
    PREPARE = "prepare"  # data, model, manager
    COMPILE = "compile"
    PLAN = "plan"  # what exists is gathered, ranked and planned
    READ = "read"  # bytes are read, proven, voted on and placed
    BROADCAST = "broadcast"  # bytes come from another replica
    FIRST_STEP = "first_step"  # its data included
    OTHER = "other"


_OF_SPAN = {
    "initialization": Phase.INITIALIZE,
    "training_prep": Phase.PREPARE,
    "compile": Phase.COMPILE,
    "checkpoint_restore": Phase.READ,
    "broadcast": Phase.BROADCAST,
    "data_loading": Phase.FIRST_STEP,
    "step": Phase.FIRST_STEP,
}


def resume_phases(primary: Sequence[Event], *, lost_s: float, noticed_s: float, resumed_s: float) -> dict[Phase, float]:
    """The seconds of each phase between `lost_s` and `resumed_s`, wall clock; they add up to the difference.

    `primary`: the events of process 0 in the attempt that took the first step again; `noticed_s` is when the launcher
    noticed the loss.
    """
    claimed = _intervals(primary, lost_s, noticed_s, resumed_s)
    # Clocks of several hosts differ: what seems to be outside is cut.
    inside = (i._replace(start_s=max(i.start_s, lost_s), end_s=min(i.end_s, resumed_s)) for i in claimed)
    segments = partition(inside)
    return {Phase(part): seconds for part, seconds in sum_parts(segments, Phase, lost_s, resumed_s).items()}


def _intervals(primary: Sequence[Event], lost_s: float, noticed_s: float, resumed_s: float) -> Iterable[Interval]:
    yield Interval(lost_s, resumed_s, Phase.OTHER, 0)
    yield Interval(lost_s, noticed_s, Phase.DETECT, 1)
    starts = [event.at_s - event.fields["duration_s"] for event in primary if event.kind == Kind.SPAN]
    up_s = min([event.at_s for event in primary if event.kind != Kind.SPAN] + starts, default=resumed_s)
    yield Interval(noticed_s, up_s, Phase.RELAUNCH, 1)
    planned_s = [event.at_s for event in primary if event.kind == Kind.PLANNED]
    for span in (event for event in primary if event.kind == Kind.SPAN):
        phase = _OF_SPAN.get(span.fields["span"])
        start_s, end_s = span.at_s - span.fields["duration_s"], span.at_s
        if phase is None or start_s >= resumed_s:
            continue
        yield Interval(start_s, end_s, phase, 2)
        if phase is Phase.READ:  # what comes before the first plan is planning
            yield Interval(start_s, min([end_s, *planned_s]), Phase.PLAN, 2)
