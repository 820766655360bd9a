"""The figures of a run, in one fixed JSON shape: every key and every contender, present or null."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CONTENDERS = ("ckptkit", "orbax_async", "orbax_tuned", "orbax_v1", "orbax_sync", "limit")
OPTIONAL_CONTENDERS = {"torch_dcp": "torch", "torch_checkpointing": "torch_checkpointing"}  # and the package it needs
BLOCKING_PARTS = ("ready", "in_flight")  # the state at rest, and a long step that still computes it

FIGURES: Mapping[str, str] = {
    "blocking_ms.ready": "time that save holds the caller, state at rest",
    "blocking_ms.in_flight": "time that save holds the caller while the step that makes the state still runs",
    "stall_ms_per_save": "a loop that keeps all cores busy, with a save minus without",
    "stall_idle_ms_per_save": "a loop whose steps only wait, with a save minus without",
    "cpu_s_per_gb": "processor time (user and system) of a save until it is committed",
    "commit_gbps": "state bytes / time from save to committed",
    "restore_gbps": "state bytes / time from restore to arrays that are ready",
    "peak_extra_bytes": "anonymous memory above what was there before the save",
    "ssd_commit_gbps": "as commit_gbps, durable on a disk",
    "disk_commit_gbps": "durable tier on a disk: state bytes / time from save to committed",
    "disk_restore_gbps": "the same step back to arrays that are ready",
    "disk_save_cpu_s_per_gb": "processor time of such a save",
    "disk_peak_extra_bytes": "its anonymous memory, above what was there before",
    "disk_files": "files of a step",
    "disk_bytes": "bytes that they take",
    "bucket_commit_gbps": "durable tier in a bucket with 20 ms for each answer",
    "bucket_restore_gbps": "the same step back to arrays that are ready",
    "bucket_save_cpu_s_per_gb": "processor time of such a save, without the bucket's own",
    "bucket_peak_extra_bytes": "its anonymous memory, above what was there before",
    "bucket_save_requests": "requests of a save",
    "bucket_restore_requests": "requests of a restore",
}
# Strategies of staging that `stall` forces, each with figures of its own (`blocking_ms.ready.device_copy`). A figure
# that names none is of what ckptkit chooses by itself: `slot_copy` on CPU devices.
STRATEGIES: Mapping[str, str] = {
    "device_copy": "staged by a copy on the device, as accelerators stage by default",
}
# Of `gpu`, by their words: the samples of a contender, and what they are multiplied with.
GPU_FIGURES = {
    "first save blocks, ms": ("first_ready_s", 1e3),
    "save blocks, state ready, ms": ("ready_s", 1e3),
    "save blocks, step in flight, ms": ("in_flight_s", 1e3),
    "step, ms": ("step_s", 1e3),
    "lost by a save and its steps, ms": ("loss_s", 1e3),
    "step after a save, longer by, ms": ("inflation_s", 1e3),
    "committed to the ramdisk, s": ("committed_s", 1.0),
    "restore, s": ("restore_s", 1.0),
    "compiled in the first save, s": ("first_compiled_s", 1.0),
    "host memory above, GB": ("host_bytes", 1e-9),
    "device memory above that of steps, GB": ("device_extra_bytes", 1e-9),
}

KEYS = tuple(dict.fromkeys(figure.partition(".")[0] for figure in FIGURES))

Samples = dict[str, dict[str, list[float]]]  # figure -> contender (or a variant of one) -> samples


def available() -> tuple[str, ...]:
    """The contenders of this installation, in the order in which they take turns."""
    installed = [name for name, package in OPTIONAL_CONTENDERS.items() if importlib.util.find_spec(package) is not None]
    return (*CONTENDERS, *installed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of one state on one number of devices: samples in order, and notes.

    `samples` holds contenders by name; limits of other kinds are next to `limit` (`limit_1_thread`).
    """

    samples: Samples
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, contenders: Iterable[str]) -> dict[str, Any]:
        """Medians under the fixed keys, then every sample."""
        return {
            **medians(self.samples, tuple(contenders)),
            "spread": spreads(self.samples),
            "samples": self.samples,
            "details": dict(self.details),
        }


def median(samples: Sequence[float] | None) -> float | None:
    """The median; None where nothing was measured."""
    return statistics.median(samples) if samples else None


def medians(samples: Samples, contenders: Sequence[str]) -> dict[str, Any]:
    """Key -> contender -> median. `blocking_ms` has `ready` and `in_flight` inside each contender."""

    def of(figure: str, contender: str) -> float | None:
        return median(samples.get(figure, {}).get(contender))

    found: dict[str, Any] = {}
    for key in KEYS:
        if key == "blocking_ms":
            found[key] = {c: {part: of(f"{key}.{part}", c) for part in BLOCKING_PARTS} for c in contenders}
        else:
            found[key] = {c: of(key, c) for c in contenders}
    return found


def spreads(samples: Samples) -> dict[str, dict[str, list[float]]]:
    """Figure -> contender -> [least, greatest]."""
    return {
        figure: {name: [min(each), max(each)] for name, each in by_name.items() if each}
        for figure, by_name in samples.items()
    }


class Recorder:
    """Collects samples by figure and contender."""

    def __init__(self) -> None:
        self.samples: Samples = {}

    def add(self, figure: str, contender: str, value: float) -> None:
        """One more sample; figures outside FIGURES are extra ones, kept in the samples alone."""
        self.samples.setdefault(figure, {}).setdefault(contender, []).append(value)
