"""Names each second of a run, and settles overlapping claims to it: a partition of the wall clock."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple


class Part(StrEnum):
    """The use of a second of the run; everything but `productive` is badput."""

    PRODUCTIVE = "productive"
    INITIALIZATION = "initialization"
    TRAINING_PREP = "training_prep"
    COMPILE = "compile"
    DATA_LOADING = "data_loading"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_RESTORE = "checkpoint_restore"
    WASTED = "wasted_progress_from_disruption"
    WASTED_BY_SPIKE = "wasted_progress_from_spike"
    RECOVERY = "infrastructure_recovery_from_disruption"
    STOPPED = "stopped"  # from the normal end of one start to the next
    CUSTOM = "custom"  # in spans whose names are none of these kinds
    OTHER = "other"  # the loop's own lines, which no span covers


# Names that others give to the same kinds: the members of ml-goodput-measurement's BadputType in lower case, and ours.
_ALIASES: dict[str, Part | None] = {
    "step": Part.PRODUCTIVE,
    "step_tail": Part.PRODUCTIVE,
    "broadcast": Part.CHECKPOINT_RESTORE,  # inside a restore
    "program_startup": Part.INITIALIZATION,
    "tpu_initialization": Part.INITIALIZATION,
    "data_loading_sync": Part.DATA_LOADING,
    "data_loading_async": None,  # while steps run: it claims no time
    "unproductive_checkpoint_save_time": Part.CHECKPOINT_SAVE,
    "unproductive_checkpoint_restore_time": Part.CHECKPOINT_RESTORE,
    "elastic_slice_down": Part.RECOVERY,
    "elastic_scale_up": Part.RECOVERY,
    "elastic_reinitialization": Part.RECOVERY,
    "custom_badput_events": Part.CUSTOM,
}
_OF_NAME: dict[str, Part | None] = {**{part.value: part for part in Part}, **_ALIASES}


# As ml-goodput-measurement writes them itself. No name for training is among them.
_OF_NAME |= {name.upper(): part for name, part in _OF_NAME.items() if part is not Part.PRODUCTIVE}
PAUSES = frozenset(Part) - {Part.PRODUCTIVE, Part.OTHER}  # between two steps, and of neither


def part_of(name: str) -> Part | None:
    """The kind of time in a span of this name: `CUSTOM` for an unknown name, None for a span that claims no time."""
    return _OF_NAME.get(name, Part.CUSTOM)


def is_known(name: str) -> bool:
    """Whether `name` is a kind of time."""
    return name in _OF_NAME


class Interval(NamedTuple):
    """`part` claims this time. A higher layer wins; within one the shorter interval: an inner span always is.

    Not the later start: that is the wall clock at the end less a monotonic duration. A preemption between the two
    readings moves it past the start of a contained span.
    """

    start_s: float
    end_s: float
    part: Any  # a `Part`; the benchmarks have their own
    layer: int


def partition(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, gapless intervals in order, each with the part that wins there; the base layer covers all."""
    todo = sorted((i for i in intervals if i.end_s > i.start_s), reverse=True)
    edges = sorted({edge for i in todo for edge in (i.start_s, i.end_s)})
    active: list[tuple[int, float, Interval]] = []
    segments = []
    for left_s, right_s in pairwise(edges):
        while todo and todo[-1].start_s <= left_s:
            interval = todo.pop()
            heapq.heappush(active, (-interval.layer, interval.end_s - interval.start_s, interval))
        while active[0][2].end_s <= left_s:
            heapq.heappop(active)
        segments.append(Interval(left_s, right_s, active[0][2].part, active[0][2].layer))
    return segments


def sum_parts(
    segments: Sequence[Interval], from_s: float, to_s: float, parts: Iterable[Any] = Part
) -> dict[Any, float]:
    """Seconds of each of the `parts` between two moments.

    `segments` are disjoint and in order, as `partition` makes them. Cost: those between the two moments, and a
    bisection.
    """
    pieces: dict[Any, list[float]] = {part: [] for part in parts}
    first = bisect_right(segments, from_s, key=lambda segment: segment.end_s)
    for place in range(first, bisect_left(segments, to_s, key=lambda segment: segment.start_s)):
        segment = segments[place]
        pieces[segment.part].append(max(0.0, min(segment.end_s, to_s) - max(segment.start_s, from_s)))
    return {part: math.fsum(seconds) for part, seconds in pieces.items()}
