"""The steps of a loop that records none: from its calls of the manager, one sign for each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from ckptkit.events import Event, Kind

_GAP_STEPS_MAX = 10_000  # between two calls; numbers further apart count something else, samples or tokens


class Stride(NamedTuple):
    """Steps `last - steps + 1` to `last`, done one after the other; `first`: no other of the attempt came before."""

    start_s: float
    end_s: float
    last: int
    steps: int
    first: bool

    @property
    def step_s(self) -> float:
        """The mean length of a step."""
        return (self.end_s - self.start_s) / self.steps


class _Call(NamedTuple):
    """Calls of the manager that overlap, as one: the loop waits from the begin of the first to the end of the last."""

    begin_s: float
    end_s: float
    events: list[Event]

    @property
    def saved(self) -> int | None:
        """The step that the loop called for."""
        return next((e.step for e in self.events if e.step is not None and not is_restore(e)), None)

    @property
    def restored(self) -> int | None:
        """The step that was restored."""
        return next((e.step for e in self.events if e.step is not None and is_restore(e)), None)


def is_restore(event: Event) -> bool:
    """Whether it is the end of a restore."""
    return event.kind == Kind.RESTORED or event.fields.get("span") == "checkpoint_restore"


def strides_of(events: Iterable[Event]) -> list[Stride]:
    """The strides between calls of the manager, from the events of one process in one attempt.

    A call about step n ends the steps up to n. They began after the call before, or when the manager was ready. A call
    about an earlier step than the last counts only after a restore, or with a new manager. Otherwise it is not about a
    step of the loop: a second manager counts epochs, or a trainer saves its end as step 0.
    """
    found: list[Stride] = []
    from_s: float | None = None  # when the loop went on
    step: int | None = None  # the last one that was done
    reopened = False  # a manager was made since
    for call in _calls(_without_announced(list(events))):
        named, restored = call.saved, call.restored
        if restored is None and named is not None and step is not None and named < step and not reopened:
            continue
        if restored is None and named is not None and named != step and from_s is not None:
            ahead = named - (step or 0)
            count = ahead if 1 <= ahead <= _GAP_STEPS_MAX else 1
            found.append(Stride(from_s, call.begin_s, named, count, not found))
        reopened |= any(event.kind == Kind.OPENED for event in call.events)
        if found and all(event.kind == Kind.OPENED for event in call.events):
            continue  # another manager, in the middle of a run
        reopened &= named is None
        from_s, step = call.end_s, next((each for each in (restored, named) if each is not None), step)
    return found


def _without_announced(events: list[Event]) -> Iterator[Event]:
    """A call of `save` is recorded when it begins. Where its span was recorded too, the span alone counts."""
    spans = {e.step for e in events if e.kind == Kind.SPAN and e.fields["span"] == "checkpoint_save"}
    return (e for e in events if e.kind != Kind.CALLED or e.fields["call"] != "save" or e.step not in spans)


def _calls(events: Iterable[Event]) -> Iterator[_Call]:
    """The calls that a loop waits for, in order."""
    last: _Call | None = None
    for begin_s, end_s, event in sorted(_ends(events), key=lambda each: each[:2]):
        if last is not None and begin_s <= last.end_s:
            last = _Call(last.begin_s, max(last.end_s, end_s), [*last.events, event])
            continue
        if last is not None:
            yield last
        last = _Call(begin_s, end_s, [event])
    if last is not None:
        yield last


def _ends(events: Iterable[Event]) -> Iterator[tuple[float, float, Event]]:
    for event in events:
        if event.kind == Kind.SPAN and event.fields["span"] in ("checkpoint_save", "checkpoint_restore"):
            yield event.at_s - event.fields["duration_s"], event.at_s, event
        elif event.kind in (Kind.CALLED, Kind.OPENED, Kind.RESTORED):
            yield event.at_s, event.at_s, event


def usual_step_s(strides: Iterable[Stride]) -> float | None:
    """The median length of a step. First strides compile, so they are left out. None if nothing is left."""
    lengths_s = [each.step_s for each in strides if not each.first]
    return median(lengths_s) if lengths_s else None


def spans_of(strides: Sequence[Stride], usual_s: float | None, process: int) -> Iterator[Event]:
    """The strides as spans. The time by which the first one is longer than usual is `compile`."""
    for stride in strides:
        start_s, step_s = stride.start_s, stride.step_s
        if stride.first and usual_s is not None and step_s > usual_s:
            start_s, step_s = stride.end_s - stride.steps * usual_s, usual_s
            yield Event.span("compile", start_s=stride.start_s, end_s=start_s, process=process)
        for place in range(stride.steps):
            begin_s = start_s + place * step_s
            number = stride.last - stride.steps + 1 + place
            yield Event.span("step", start_s=begin_s, end_s=begin_s + step_s, process=process, step=number)
