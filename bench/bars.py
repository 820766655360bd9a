"""The bars that the project sets itself, and whether a run reaches them: pure, from the samples of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bench.cases import CaseName
from bench.figures import Samples, median

OURS = "ckptkit"

# Of `bench inspect`: the whole command on 100,000 leaves.
INSPECT_OCDBT_S = 8.0  # a step without our sidecars
INSPECT_OF_ORBAX = 4.0  # times as fast as Orbax's own metadata call
INSPECT_S = 2.0  # safetensors, and steps with our sidecars
# Of `bench convert`: formats without compression, within 512 MiB.
CONVERT_OF_COPY = 0.5  # of the rate of `cp` and fsync next to it
CONVERT_PEAK_BYTES = 900 << 20  # resident, with imports
# Of `bench simulate`: 10,000 hosts x 90 days x 1,000 runs, the whole command.
SIMULATE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The figure of `ours` divided by `against`'s must be at most, or at least, `value`."""

    figure: str
    against: str  # a contender; `step` (a step without a save), `state` (its bytes) or `one` (1)
    bound: Literal["at most", "at least"]
    value: float
    ours: str = OURS


def at_most(figure: str, against: str, value: float) -> Bar:
    """A bar that a cost must not exceed. While a step runs elsewhere, a save is staged as accelerators do it."""
    ours = f"{OURS}_device_copy" if figure.startswith(("stall_idle", "blocking")) else OURS
    return Bar(figure=figure, against=against, bound="at most", value=value, ours=ours)


def at_least(figure: str, against: str, value: float) -> Bar:
    """A bar that a speed must reach."""
    return Bar(figure=figure, against=against, bound="at least", value=value)


def bars_of(case: CaseName) -> tuple[Bar, ...]:
    """The bars for a state; `one` is measured against those of `125m`."""
    if case.state == "many":
        return (
            at_most("blocking_ms.ready", "orbax_async", 1 / 10),
            at_least("commit_gbps", "orbax_async", 30),
            at_least("restore_gbps", "orbax_async", 30),
            at_least("disk_commit_gbps", "orbax_async", 8),
            at_least("disk_restore_gbps", "orbax_async", 8),
            at_least("bucket_commit_gbps", "orbax_async", 8),
            at_least("bucket_restore_gbps", "orbax_async", 8),
            at_most("bucket_save_requests", "one", 40),
        )
    return (
        at_most("stall_ms_per_save", "orbax_tuned", 1 / 4),
        at_most("stall_ms_per_save", "orbax_async", 1 / 10),
        at_most("stall_ms_per_save", "limit", 1.5),
        at_most("stall_idle_ms_per_save", "orbax_async", 1 / 4),
        at_most("stall_idle_ms_per_save", "orbax_v1", 1 / 2),
        at_most("blocking_ms.ready", "orbax_async", 1 / 5 if case.devices == 1 else 1 / 2),
        at_most("blocking_ms.in_flight", "step", 1 / 10),
        at_most("cpu_s_per_gb", "orbax_async", 1 / 6),
        at_least("commit_gbps", "orbax_tuned", 4),
        at_least("commit_gbps", "orbax_async", 7),
        at_least("commit_gbps", "limit", 0.7),
        at_least("ssd_commit_gbps", "limit", 0.8),
        at_least("restore_gbps", "orbax_async", 4),
        at_least("restore_gbps", "limit", 0.8),
        at_most("peak_extra_bytes", "state", 1.15),
        at_least("disk_commit_gbps", "orbax_async", 1.6),
        at_least("disk_commit_gbps", "orbax_tuned", 1.1),
        at_least("disk_restore_gbps", "orbax_async", 2),
        at_most("disk_peak_extra_bytes", "state", 0.5),
        at_most("bucket_peak_extra_bytes", "state", 0.5),
        at_most("bucket_save_requests", "one", 40),
    )


def ratios(case: CaseName, samples: Samples) -> list[dict[str, Any]]:
    """Every bar that was measured: median of ours over median of theirs.

    A stall below zero, ours or theirs, is noise: it gives no ratio, and no bar is met by it.
    """
    found = []
    for bar in bars_of(case):
        ours = median(samples.get(bar.figure, {}).get(bar.ours))
        theirs = median(samples.get(bar.figure, {}).get(bar.against))
        if ours is None or theirs is None:
            continue
        ratio = ours / theirs if ours >= 0 and theirs > 0 else None
        met = None if ratio is None else (ratio <= bar.value if bar.bound == "at most" else ratio >= bar.value)
        found.append(
            {
                "figure": bar.figure,
                "contender": bar.ours,
                "against": bar.against,
                "ours": ours,
                "theirs": theirs,
                "ratio": ratio,
                "bound": bar.bound,
                "bar": bar.value,
                "met": met,
            }
        )
    return found
