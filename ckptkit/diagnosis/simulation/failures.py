"""When a simulated job fails: drawn from a distribution, or replayed from a trace.

A batch holds every run's failures: times from the run's start, the kind, and how long the missing machine stays away.
"""

from __future__ import annotations

import csv
import datetime
import json
import lzma
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptkit.diagnosis.simulation.cluster import FAILURES, Failure

_TRACE_BYTES_MAX = 64 << 20
_FAILURES_MAX = 20_000_000  # of all runs together: 340 MB
_DATE = "%m/%d/%Y %H:%M"


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of `runs` runs. `at_s` float (runs, n), sorted, infinity where there is none any more; `kind` int8
    (runs, n), index into `FAILURES`; `outage_s` float (runs, n): until the machines are there again.
    """

    at_s: np.ndarray
    kind: np.ndarray
    outage_s: np.ndarray


@dataclass(frozen=True, slots=True)
class FailureTrace:
    """A recorded trace: seconds between failures, and the outage after each. Replayed as a ring."""

    name: str
    gaps_s: np.ndarray
    outages_s: np.ndarray

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures."""
        return float(self.gaps_s.mean())


def draw(
    *,
    runs: int,
    horizon_s: float,
    mtbf_s: float,
    shares: Mapping[Failure, float],
    shape: float = 1.0,
    outage_s: float = 0.0,
    seed: int = 0,
) -> Failures:
    """Independent gaps from a Weibull distribution with mean `mtbf_s` (of the whole job) and `shape`.

    1 is exponential; below 1 failures come in clusters (0.7 to 0.8 on real machines: B. Schroeder, G. Gibson,
    "A large-scale study of failures in high-performance computing systems", DSN 2006). A lost machine is replaced after
    `outage_s`.
    Raises ValueError for what cannot be drawn.
    """
    if not (mtbf_s > 0 and horizon_s > 0 and runs > 0 and 0.1 <= shape <= 10):
        raise ValueError(
            f"mtbf_s={mtbf_s}, horizon_s={horizon_s}, runs={runs}, shape={shape}: "
            "give positive numbers, and a shape from 0.1 to 10"
        )
    rng = np.random.default_rng(seed)
    scale_s = mtbf_s / math.gamma(1.0 + 1.0 / shape)
    expected = horizon_s / mtbf_s
    count = int(expected + 6.0 * np.sqrt(expected) * max(1.0, 1.0 / shape) + 8)
    _check_size(runs, count)
    at_s = np.cumsum(scale_s * rng.weibull(shape, (runs, count)), axis=1)
    while at_s[:, -1].min() < horizon_s:
        more = at_s[:, -1:] + np.cumsum(scale_s * rng.weibull(shape, (runs, count // 4 + 8)), axis=1)
        at_s = np.concatenate([at_s, more], axis=1)
        _check_size(*at_s.shape)
    return _cut(at_s, np.full_like(at_s, outage_s), horizon_s, shares, rng)


def replay(
    trace: FailureTrace,
    *,
    runs: int,
    horizon_s: float,
    shares: Mapping[Failure, float],
    scale: float = 1.0,
    seed: int = 0,
) -> Failures:
    """Every run plays the trace from a failure chosen at random, round and round, every time multiplied by `scale`."""
    rng = np.random.default_rng(seed)
    gaps_s, outages_s = trace.gaps_s * scale, trace.outages_s
    cycle_s = float(gaps_s.sum())
    if not cycle_s > 0:
        raise ValueError(f"trace {trace.name}: all failures at the same time")
    count = int(np.ceil(horizon_s / cycle_s)) * len(gaps_s) + len(gaps_s)
    _check_size(runs, count)
    order = (rng.integers(len(gaps_s), size=(runs, 1)) + np.arange(count)) % len(gaps_s)
    return _cut(np.cumsum(gaps_s[order], axis=1), outages_s[order], horizon_s, shares, rng)


def _cut(
    at_s: np.ndarray, outage_s: np.ndarray, horizon_s: float, shares: Mapping[Failure, float], rng: np.random.Generator
) -> Failures:
    at_s = np.where(at_s < horizon_s, at_s, np.inf)
    count = int(np.isfinite(at_s).sum(axis=1).max()) + 1  # the last column is infinity everywhere
    at_s, outage_s = at_s[:, :count], outage_s[:, :count]
    weights = np.array([shares.get(kind, 0.0) for kind in FAILURES])
    kinds = rng.choice(len(FAILURES), size=at_s.shape, p=weights / weights.sum()).astype(np.int8)
    return Failures(at_s, kinds, outage_s)


def _check_size(runs: int, count: int) -> None:
    if runs * count > _FAILURES_MAX:
        raise ValueError(
            f"{runs} runs with about {count} failures each are more than {_FAILURES_MAX:,} in all: "
            "ask for fewer runs or days"
        )


def read_trace(path: str | os.PathLike[str], *, system: str | None = None, need: int | None = None) -> FailureTrace:
    """The trace in a file: a failure log as Los Alamos published it (CSV, or .csv.xz), or spot availability (JSON).

    `system` chooses a system of the log (default: the one with most failures). Of an availability file, a failure is
    when fewer than `need` machines (default: as many as there ever were) are left, and it lasts until they are back.
    Raises ValueError for a file of neither shape, or with fewer than 3 gaps between failures; at most 64 MiB are read.
    """
    name = Path(path).name
    try:
        text = _text(path)
    except (lzma.LZMAError, UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"trace {path} cannot be read: {error}") from error
    if len(text) > _TRACE_BYTES_MAX:
        raise ValueError(f"trace {path} has more than {_TRACE_BYTES_MAX >> 20} MiB")
    trace = _availability(name, text, need) if text.lstrip().startswith("{") else _failure_log(name, text, system)
    if len(trace.gaps_s) < 3:
        raise ValueError(f"trace {path} has {len(trace.gaps_s)} gaps between failures: 3 at least are needed")
    return trace


def _text(path: str | os.PathLike[str]) -> str:
    if str(path).endswith(".xz"):
        with lzma.open(path, "rt") as file:
            return file.read(_TRACE_BYTES_MAX + 1)
    with open(path) as file:
        return file.read(_TRACE_BYTES_MAX + 1)


def _failure_log(name: str, text: str, system: str | None) -> FailureTrace:
    by_system: dict[str, list[tuple[float, float]]] = {}
    rows = csv.DictReader(text.splitlines())
    if not {"System", "Prob Started", "Down Time"} <= set(rows.fieldnames or ()):
        raise ValueError(f"trace {name}: neither JSON nor a table with the columns System, Prob Started and Down Time")
    for row in rows:
        try:
            began = datetime.datetime.strptime(row["Prob Started"].strip(), _DATE).replace(tzinfo=datetime.UTC)
            down_s = 60.0 * max(0.0, float(row["Down Time"] or 0.0))
        except (ValueError, AttributeError):
            continue  # a line without a date has no time
        by_system.setdefault(row["System"].strip(), []).append((began.timestamp(), down_s))
    chosen = system or max(by_system, key=lambda each: len(by_system[each]), default="")
    if chosen not in by_system:
        raise ValueError(f"trace {name} has no system {chosen!r}; it has {', '.join(sorted(by_system))}")
    log = np.array(sorted(by_system[chosen]))
    # Another node that fails in the same minute is the same disruption to a job that spans them all.
    first = np.concatenate([[True], np.diff(log[:, 0]) > 0])
    at_s, down_s = log[first, 0], log[first, 1]
    return FailureTrace(f"{name}, system {chosen}", np.diff(at_s), down_s[1:])


def _availability(name: str, text: str, need: int | None) -> FailureTrace:
    try:
        record = json.loads(text)
        gap_s, counts = float(record["metadata"]["gap_seconds"]), np.asarray(record["data"], float)
        if not (0 < gap_s < float("inf") and counts.ndim == 1 and np.isfinite(counts).all() and len(counts)):
            raise ValueError("gap_seconds or data are out of range")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f'trace {name} is not {{"metadata": {{"gap_seconds": G}}, "data": [n, ...]}}: {error}'
        ) from error
    enough = counts >= (counts.max() if need is None else need)
    falls = np.flatnonzero(enough[:-1] & ~enough[1:]) + 1
    rises = np.flatnonzero(~enough[:-1] & enough[1:]) + 1
    back = np.append(rises, len(counts))[np.searchsorted(rises, falls)]  # never back: until the end of the record
    return FailureTrace(name, np.diff(falls) * gap_s, (back - falls)[1:] * gap_s)
