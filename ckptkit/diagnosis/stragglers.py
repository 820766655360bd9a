"""Rules that name a process which is persistently slower than the others: pure functions of the facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from ckptkit.diagnosis.records import Advice, Facts
from ckptkit.events import Kind
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.util.clock import time_text

# A process is slow below this score, the time of the others by its own: the default of NeMo's callback for straggler
# detection (gpu_relative_perf_threshold).
SCORE_MIN = 0.7
SAMPLES_MIN = 8
PERSISTENT_SHARE = 0.75  # of the samples of a process: below, it was slow at times
DIFFERENCE_S_MIN = 0.02  # below, nobody would notice
_OWN_PART_ENDS = {SSD: "copied", DURABLE: "written", PEER: "committed_here"}  # what follows waits for others


def slow_processes(facts: Facts) -> list[Advice]:
    """One process takes longer than the others for its part of a save, or for a span that the loop measures.

    Each process's times are of its own clock, and of work that waits for no other process.
    """
    found = []
    for what, times in sorted(_own_times(facts).items()):
        for process, (own_s, others_s) in _slow(times).items():
            text = f"process {process} takes {time_text(own_s)} for {what}, the others {time_text(others_s)} (p50 of "
            text += f"{len(times[process])})"
            advice = "look at its host: disk, memory, clock rate of the processors, other jobs"
            found.append(Advice(rule="slow_processes", kind="slow", what=text, advice=advice))
    return found


def late_process(facts: Facts) -> list[Advice]:
    """At saves, the others wait longer for their step than one process does: its host reaches the step last.

    A step with collectives ends on all devices at the same time, so the one that waits least came last.
    """
    waits: defaultdict[int, list[float]] = defaultdict(list)
    for event in facts.of(Kind.STAGED):
        waits[event.process].append(float(event.fields.get("computing_s", 0.0)))
    known = {process: median(each) for process, each in waits.items() if len(each) >= SAMPLES_MIN}
    if len(known) < 2:
        return []
    process = min(known, key=lambda each: known[each])
    others_s = min(each for other, each in known.items() if other != process)
    early = [each for each in waits[process] if each < SCORE_MIN * others_s]
    is_persistent = len(early) >= PERSISTENT_SHARE * len(waits[process])
    if not is_persistent or others_s - known[process] < DIFFERENCE_S_MIN:
        return []
    text = f"process {process} is the last to start its steps: at saves the others wait {time_text(others_s)} or more "
    text += f"for the devices, and it waits {time_text(known[process])}"
    advice = "look at what its host does between steps: loading data, logging, garbage collection"
    return [Advice(rule="late_process", kind="slow", what=text, advice=advice)]


def _own_times(facts: Facts) -> Mapping[str, Mapping[int, list[float]]]:
    """Seconds by what was done and by process, of work that every process does by itself."""
    found: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    begun: dict[tuple[int, int | None, str | None], float] = {}
    computing: dict[tuple[int, int | None], float] = {}
    for event in facts.events:
        process, step, tier = event.process, event.step, event.tier
        phase = event.fields.get("phase") if event.kind == Kind.PHASE else None
        if event.kind == Kind.SPAN and event.fields.get("span", "step") != "step":
            found[f"`{event.fields['span']}`"][process].append(float(event.fields.get("duration_s", 0.0)))
        elif event.kind == Kind.STAGED:
            computing[process, step] = float(event.fields.get("computing_s", 0.0))
        elif phase == "begun":
            begun[process, step, tier] = event.at_s
        elif phase == "staged":
            if (start_s := begun.pop((process, step, None), None)) is not None:
                own_s = event.at_s - start_s - computing.pop((process, step), 0.0)
                found[f"its part of a save to {tier}"][process].append(max(0.0, own_s))
        elif phase is not None and phase == _OWN_PART_ENDS.get(str(tier)) and (process, step, tier) in begun:
            found[f"its part of a save to {tier}"][process].append(event.at_s - begun.pop((process, step, tier)))
    return found


def _slow(times: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, float]]:
    """The slow processes: their median, and that of the others."""
    known = {process: median(each) for process, each in times.items() if len(each) >= SAMPLES_MIN}
    found = {}
    for process, own_s in known.items():
        others = [each for other, each in known.items() if other != process]
        if not others or own_s - (others_s := median(others)) < DIFFERENCE_S_MIN:
            continue
        slow = [each for each in times[process] if each * SCORE_MIN > others_s]
        if len(slow) >= PERSISTENT_SHARE * len(times[process]):
            found[process] = (own_s, others_s)
    return found
