"""The pictures of the report: one per benchmark that has somebody to compare with, and the one of the README."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from bench.rows import Row

_OURS, _PEER, _LIMIT = "#1f6f8b", "#b0b0b0", "#e8a33d"
_FRONT = (("stall", "stall_ms_per_save"), ("stall", "stall_idle_ms_per_save"), ("faults", "goodput"))


def draw(rows: Sequence[Row], results: Path, front: Path) -> list[Path]:
    """Writes `results/<benchmark>.png` and `front`; returns what was written."""
    written = []
    for benchmark, group in groupby(rows, key=lambda row: row.benchmark):
        compared = [row for row in group if row.peer is not None]
        if compared:
            written.append(_bars(compared, results / f"{benchmark}.png"))
    chosen = [row for key in _FRONT for row in rows if (row.benchmark, row.figure) == key]
    if chosen:
        written.append(_bars(chosen, front))
    return written


def _bars(rows: Sequence[Row], path: Path) -> Path:
    """One small chart for each row: the units differ."""
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * lines), layout="constrained")
    for number, row in enumerate(rows):
        axes = figure.add_subplot(lines, columns, number + 1)
        bars = [("ckptkit", row.ours, _OURS)]
        if row.peer is not None:
            bars.append((row.peer_name, row.peer, _PEER))
        if row.limit is not None:
            bars.append(("limit", row.limit, _LIMIT))
        axes.bar([name for name, _, _ in bars], [value for _, value, _ in bars], color=[color for _, _, color in bars])
        axes.set_title(f"{row.figure}\n{row.case}, n = {row.samples}", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same bytes for the same rows
    return path
