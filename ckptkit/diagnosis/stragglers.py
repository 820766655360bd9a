"""Rules that name a process which is persistently slower than the others, by its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ckptkit.diagnosis.records import Advice, Facts
from ckptkit.events import Kind
from ckptkit.model.tiers import DURABLE, PEER, SSD
from ckptkit.util.clock import time_text
from ckptkit.util.stragglers import late, slow

_OWN_PART_ENDS = {SSD: "copied", DURABLE: "written", PEER: "committed_here"}  # what follows waits for others


def slow_processes(facts: Facts) -> list[Advice]:
    """One process takes longer than the others for its part of a save, or for a span that the loop measures.

    Each process's times are of its own clock, and of work that waits for no other process.
    """
    found = []
    for what, times in sorted(_own_times(facts).items()):
        for each in slow(times):
            text = f"process {each.process} takes {time_text(each.own_s)} for {what}, the others "
            text += f"{time_text(each.others_s)} (p50 of {len(times[each.process])})"
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
    if (found := late(waits)) is None:
        return []
    text = f"process {found.process} is the last to start its steps: at saves the others wait "
    text += f"{time_text(found.others_s)} or more for the devices, and it waits {time_text(found.own_s)}"
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
