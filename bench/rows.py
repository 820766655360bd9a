"""The stored results as rows of one table: our figure, the peer's, the limit, the ratio, the number of samples. Pure,
from JSON alone: every printed figure comes from here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.figures import FIGURES, OPTIONAL_CONTENDERS, STRATEGIES, median
from bench.readers import READERS
from bench.row import PEERS, Row, Source, ends_of, measured, spread_of

RESULTS = Path(__file__).parent / "results"
_OURS, _TORCH = "ckptkit", tuple(OPTIONAL_CONTENDERS)
# A save that copies while the step computes elsewhere can cost the loop nothing: one plain copy is not a bound there.
_OVERLAPPED = ("stall_idle_ms_per_save", "blocking_ms.ready")
_PLACES = ("disk_", "bucket_")  # of figures of `durable`, which can be measured one without the other


def newest_results(root: Path = RESULTS) -> list[dict[str, Any]]:
    """The stored results, oldest first: `root/<date>-<machine>/<name>.json`."""
    return [result for _, result in sorted(map(_dated, root.glob("*/*.json")), key=lambda each: each[0])]


def _dated(path: Path) -> tuple[tuple[str, str, str], dict[str, Any]]:
    """The result, and what it is sorted by. One that stores no date has that of its directory."""
    result, day = json.loads(path.read_text()), path.parent.name[:10]
    at = result.setdefault("environment", {}).setdefault("at", day)
    return (day, at, path.name), result


def by_figure_of(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """One row for each benchmark and figure: of several states the first, of several schedules of faults the newest."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        other = found.setdefault((row.benchmark, row.figure), row)
        if row.benchmark == "faults" and row.source.day > other.source.day:
            found[row.benchmark, row.figure] = row
    return found


def rows_of(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of all results. A benchmark that ran more than once has the rows of its last result alone: what this one
    does not measure any more is not taken from an older one."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for result in results:
        own: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        for row in READERS.get(result["benchmark"], _compared)(result):
            place = next((each for each in _PLACES if row.figure.startswith(each)), "")
            own[row.benchmark, row.case, place].append(replace(row, source=Source.of(result)))
        found |= own
    order = ["stall", "commit", "restore", "durable", *READERS, "gpu_on_cpu"]
    return sorted((row for rows in found.values() for row in rows), key=lambda row: order.index(row.benchmark))


def _compared(result: Mapping[str, Any]) -> Iterable[Row]:
    """Of `stall`, `commit`, `restore`, `durable`."""
    for case, state in result["states"].items():
        _check_strategies(state.get("details", {}))
        for figure, by_name in state["samples"].items():
            if figure in FIGURES:
                for suffix, samples in _ways(by_name):
                    yield _row_of(result["benchmark"], case, figure, suffix, {**by_name, _OURS: samples})


def _ways(by_name: Mapping[str, list[float]]) -> Iterator[tuple[str, list[float]]]:
    """Samples of ckptkit: as it stages by itself, then by each strategy that was forced.

    Results before 2026-11-24 have the former as `ckptkit_auto`: their `ckptkit` is the copy of a strategy.
    """
    if by_itself := by_name.get(f"{_OURS}_auto") or by_name.get(_OURS):
        yield "", by_itself
        for strategy in STRATEGIES:
            if samples := by_name.get(f"{_OURS}_{strategy}"):
                yield f".{strategy}", samples


def _check_strategies(details: Mapping[str, Any]) -> None:
    """Raises ValueError where a save that is labelled with a strategy was staged by another one."""
    for loop in details.values():
        for name, strategy in loop.get("strategies", {}).items() if isinstance(loop, Mapping) else ():
            if name not in (_OURS, f"{_OURS}_{strategy}"):
                raise ValueError(f"a save of {name} was staged by {strategy}")


def _row_of(benchmark: str, case: str, figure: str, suffix: str, by_name: Mapping[str, list[float]]) -> Row:
    def of(names: Iterable[str]) -> dict[str, float]:
        return {name: median(by_name[name]) or 0.0 for name in names if by_name.get(name)}

    better = max if figure.endswith("_gbps") else min
    peers, torch, all_of_them = of(PEERS), of(_TORCH), of((*PEERS, *_TORCH, _OURS))
    best = better(peers, key=lambda name: peers[name]) if peers else ""
    torch_best = better(torch, key=lambda name: torch[name]) if torch else ""
    fastest = better(all_of_them, key=lambda name: all_of_them[name])
    limit = 0.0 if figure in _OVERLAPPED and by_name.get("limit") else median(by_name.get("limit"))
    beaten = limit is not None and better(limit, all_of_them[fastest]) != limit
    return Row(
        benchmark=benchmark,
        case=case,
        figure=figure + suffix,
        meaning=FIGURES[figure] + (f", {STRATEGIES[suffix[1:]]}" if suffix else ""),
        **measured(by_name[_OURS]),
        peer=peers.get(best),
        peer_name=best,
        peer_spread=spread_of(by_name[best]) if best else None,
        peer_ends=ends_of(by_name[best]) if best else None,
        torch=torch.get(torch_best),
        torch_name=torch_best if len(torch) > 1 else "",
        limit=all_of_them[fastest] if beaten else limit,
        limit_name=fastest if beaten else "",
    )
