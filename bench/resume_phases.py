"""Divides the time from a loss to the first step after it: a pure fold over event logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptkit.events import Event, Kind
from ckptkit.goodput.parts import Interval, partition, sum_parts
from ckptkit.goodput.runs import attempts_of


class Phase(StrEnum):
    """The phases of a resume, in their order; they add up to the whole.

    A restore that runs while the step compiles costs only what outlasts the compilation.
    """

    DETECT = "detect"  # from the kill, where the launcher knows its moment, until the launcher noticed
    RELAUNCH = "relaunch"  # survivors end, backoff, processes start and import
    INITIALIZE = "initialize"  # the processes find each other, devices come up
    PREPARE = "prepare"  # data, model, manager
    COMPILE = "compile"
    PLAN = "plan"  # what exists is gathered, ranked and planned
    READ = "read"  # bytes are read, verified, voted on and placed
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """One loss that the run came back from. `attempt` was lost. `phases_s` has every `Phase` and adds up to `total_s`,
    from the loss (or its detection, if its moment is unknown) to the end of the first step after it."""

    attempt: int
    total_s: float
    phases_s: Mapping[Phase, float]


def resumes(logs: Sequence[Sequence[Event]]) -> list[Resume]:
    """The resumes of a run with a launcher, from its logs (`load_run`), in order."""
    attempts, launcher = attempts_of(logs)
    found = []
    for loss in (event for event in launcher if event.kind == Kind.DISRUPTED):
        number = loss.fields["attempt"]
        again = next((a for a in attempts if a.number > number and a.steps), None)
        if again is not None:
            lost_s = loss.at_s - loss.fields.get("detect_s", 0.0)
            resumed_s = min(span.at_s for _, span in again.steps)
            primary = [event for event in again.events if event.process == 0]
            phases_s = _phases(primary, lost_s, loss.at_s, resumed_s)
            found.append(Resume(attempt=number, total_s=resumed_s - lost_s, phases_s=phases_s))
    return found


def _phases(primary: Sequence[Event], lost_s: float, noticed_s: float, resumed_s: float) -> dict[Phase, float]:
    """Seconds by phase; `primary` are the events of process 0 in the attempt that took a step again."""
    claimed = _intervals(primary, lost_s, noticed_s, resumed_s)
    # Clocks of several hosts differ: what seems to be outside is cut.
    inside = (i._replace(start_s=max(i.start_s, lost_s), end_s=min(i.end_s, resumed_s)) for i in claimed)
    return sum_parts(partition(inside), lost_s, resumed_s, Phase)


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
