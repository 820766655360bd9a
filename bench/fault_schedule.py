"""The faults of every contender: when processes die, what is lost with them, and the result of a free checkpoint.
Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptkit.diagnosis.simulation import Failure, draw, read_trace, replay
from ckptkit.launch.faults import Fault

RAMDISK, NEWEST = "ramdisk", "newest step"  # in a schedule, for the directories of a run


def plan_faults(
    *, seed: int, mtbf_s: float, horizon_s: float, processes: int, trace: Path | None = None, system: str | None = None
) -> tuple[Fault, ...]:
    """The faults of a seed in order: moments drawn from an exponential distribution, or played from a recorded trace
    that is compressed to a mean of `mtbf_s`. Every second one wipes a ramdisk, every third flips a bit; where that
    begins is the seed's.
    """
    shares: Mapping[Failure, float] = {"process": 1.0}
    if trace is None:
        moments = draw(runs=1, horizon_s=horizon_s, mtbf_s=mtbf_s, shares=shares, seed=seed)
    else:
        recorded = read_trace(trace, system=system)
        scale = mtbf_s / recorded.mtbf_s
        moments = replay(recorded, runs=1, horizon_s=horizon_s, shares=shares, scale=scale, seed=seed)
    chance = random.Random(f"faults {seed}")
    first_wipe, first_flip = chance.randrange(2), chance.randrange(3)
    return tuple(
        Fault(
            number=number,
            after_s=float(at_s),
            since="launch",
            kind="kill",
            victims=(chance.randrange(processes),),
            wipes=(RAMDISK,) if number % 2 == first_wipe else (),
            flips=(NEWEST,) if number % 3 == first_flip else (),
        )
        for number, at_s in enumerate(moments.at_s[0])
        if math.isfinite(at_s)
    )


def text_of(fault: Fault) -> str:
    """In words: `8.5 s: process 0, ramdisk wiped`. A flip: of a bit in the newest checkpoint that is left."""
    also = (", ramdisk wiped" if fault.wipes else "") + (", a bit flipped" if fault.flips else "")
    return f"{fault.after_s:.1f} s: process {fault.victims[0]}{also}"


def ceiling_s(faults: Sequence[Fault], *, steps: int, start_s: float, step_s: float) -> float:
    """The time of `steps` steps under these faults if saves and restores cost nothing and every finished step is kept.
    Only starting again (`start_s`, from a launch to its first step) and the interrupted step are lost.
    """
    now_s, done = start_s, 0
    for fault in faults:
        whole = max(0, math.floor((fault.after_s - now_s) / step_s))
        if done + whole >= steps:
            break
        done += whole
        now_s = fault.after_s + start_s
    return now_s + (steps - done) * step_s


def gap_closed(ours: float, peer: float, ceiling: float) -> float | None:
    """Which share of what `peer` leaves to the ceiling is ours: 1 reaches it, 0 is the peer's, below 0 is worse."""
    return (ours - peer) / (ceiling - peer) if ceiling > peer else None
