"""Which of several processes is persistently slower than the others: pure functions of their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# A process is slow below this score, the time of the others by its own: the default of NeMo's callback for straggler
# detection (gpu_relative_perf_threshold).
SCORE_MIN = 0.7
SAMPLES_MIN = 8
PERSISTENT_SHARE = 0.75  # of the samples of a process: below, it was slow at times
DIFFERENCE_S_MIN = 0.02  # below, nobody would notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A process, its seconds, and those of the others: medians."""

    process: int
    own_s: float
    others_s: float


def slow(times: Mapping[int, Sequence[float]]) -> list[Straggler]:
    """The processes that take longer than the others for the same work, of which each does its part by itself."""
    known = _medians(times)
    found = []
    for process, own_s in known.items():
        others = [each for other, each in known.items() if other != process]
        if not others or own_s - (others_s := median(others)) < DIFFERENCE_S_MIN:
            continue
        samples = [each for each in times[process] if each * SCORE_MIN > others_s]
        if len(samples) >= PERSISTENT_SHARE * len(times[process]):
            found.append(Straggler(process=process, own_s=own_s, others_s=others_s))
    return found


def late(waits: Mapping[int, Sequence[float]]) -> Straggler | None:
    """The process that waits less than each of the others for what all of them wait for: it comes last."""
    known = _medians(waits)
    if len(known) < 2:
        return None
    process = min(known, key=lambda each: known[each])
    others_s = min(each for other, each in known.items() if other != process)
    early = [each for each in waits[process] if each < SCORE_MIN * others_s]
    is_persistent = len(early) >= PERSISTENT_SHARE * len(waits[process])
    if not is_persistent or others_s - known[process] < DIFFERENCE_S_MIN:
        return None
    return Straggler(process=process, own_s=known[process], others_s=others_s)


def _medians(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {process: median(each) for process, each in times.items() if len(each) >= SAMPLES_MIN}
