"""The stored results as rows of one table: our figure, the peer's, the limit, the ratio, the number of samples. Pure,
from JSON alone: every printed figure comes from here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.figures import FIGURES, median
from bench.readers import READERS
from bench.row import PEERS, Row, load_of

RESULTS = Path(__file__).parent / "results"
_TORCH = "torch_dcp"
# A save that copies while the step computes elsewhere can cost the loop nothing: one plain copy is not a bound there.
_OVERLAPPED = ("stall_idle_ms_per_save", "blocking_ms.ready")


def newest_results(root: Path = RESULTS) -> list[dict[str, Any]]:
    """The stored results, oldest first: `root/<date>-<machine>/<name>.json`."""
    return [json.loads(path.read_text()) for path in sorted(root.glob("*/*.json"), key=lambda each: _age(each))]


def _age(path: Path) -> tuple[str, str, str]:
    told = json.loads(path.read_text()).get("environment", {}).get("at", "")
    return path.parent.name[:10], told, path.name


def rows_of(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of all results; of a figure that was measured more than once, the last one."""
    found: dict[tuple[str, str, str], Row] = {}
    for result in results:
        read = READERS.get(result["benchmark"], _compared)
        for row in read(result):
            found[row.benchmark, row.case, row.figure] = row
    order = ["stall", "commit", "restore", "durable", *READERS, "gpu_on_cpu"]
    return sorted(found.values(), key=lambda row: order.index(row.benchmark))


def _compared(result: Mapping[str, Any]) -> Iterable[Row]:
    """Of `stall`, `commit`, `restore`, `durable`."""
    for case, state in result["states"].items():
        named = state.get("details", {}).get("strategies", {})
        for figure, by_name in state["samples"].items():
            if figure not in FIGURES or not by_name.get("ckptkit"):
                continue
            row = _row_of(result, case, figure, by_name)
            yield row
            if named.get(figure, "auto") != "auto" and by_name.get("ckptkit_auto"):
                ours = median(by_name["ckptkit_auto"]) or 0.0
                meaning = f"{row.meaning}, with the strategy of the CPU backend"
                yield replace(row, figure=f"{figure}.cpu", meaning=meaning, ours=ours)


def _row_of(result: Mapping[str, Any], case: str, figure: str, by_name: Mapping[str, list[float]]) -> Row:
    def of(names: Iterable[str]) -> dict[str, float]:
        return {name: median(by_name[name]) or 0.0 for name in names if by_name.get(name)}

    better = max if figure.endswith("_gbps") else min
    peers, all_of_them = of(PEERS), of((*PEERS, _TORCH, "ckptkit"))
    best = better(peers, key=lambda name: peers[name]) if peers else ""
    fastest = better(all_of_them, key=lambda name: all_of_them[name])
    limit = 0.0 if figure in _OVERLAPPED and by_name.get("limit") else median(by_name.get("limit"))
    beaten = limit is not None and better(limit, all_of_them[fastest]) != limit
    return Row(
        benchmark=result["benchmark"],
        case=case,
        figure=figure,
        meaning=FIGURES[figure],
        ours=all_of_them["ckptkit"],
        peer=peers.get(best),
        peer_name=best,
        torch=all_of_them.get(_TORCH),
        limit=all_of_them[fastest] if beaten else limit,
        limit_name=fastest if beaten else "",
        samples=len(by_name["ckptkit"]),
        load=load_of(result),
    )
