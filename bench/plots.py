"""The pictures of the report: one per benchmark that has somebody to compare with, and the one of docs/index.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from bench.row import Row
from bench.rows import by_figure_of

_OURS, _PEER, _TORCH, _LIMIT = "#1f6f8b", "#b0b0b0", "#808080", "#e8a33d"
# The picture of docs/index.md: what is compared, in words, and what the limit is.
_FRONT = {
    ("stall", "stall_ms_per_save"): (
        "a save takes from a loop that keeps\nall cores busy, ms: less is better",
        "one plain copy",
    ),
    ("stall", "stall_idle_ms_per_save.device_copy"): (
        "from one whose step runs elsewhere, staged\nas on accelerators, ms: less is better",
        "",
    ),
    ("faults", "goodput"): ("goodput with injected failures:\nmore is better", "saves for free"),
    ("faults", "lost_work_s"): ("work done again in such a run, s:\nless is better", ""),
}


def draw(rows: Sequence[Row], results: Path, front: Path) -> list[Path]:
    """Writes `results/<benchmark>.png` and `front`; returns what was written."""
    written = []
    for benchmark, group in groupby(rows, key=lambda row: row.benchmark):
        compared = [row for row in group if row.peer is not None]
        if compared:
            written.append(draw_rows(compared, results / f"{benchmark}.png"))
    found = by_figure_of(rows)
    chosen = [(found[key], *_FRONT[key]) for key in _FRONT if key in found]
    if chosen:
        titles, limits = [title for _, title, _ in chosen], [limit for _, _, limit in chosen]
        written.append(_bars([row for row, _, _ in chosen], titles, limits, front))
    return written


def draw_rows(rows: Sequence[Row], path: Path) -> Path:
    """Writes one picture of these rows to `path`, and returns it."""
    titles = [f"{row.figure}\n{row.case}, n = {row.samples}" for row in rows]
    return _bars(rows, titles, ["limit"] * len(titles), path)


def _bars(rows: Sequence[Row], titles: Sequence[str], limits: Sequence[str], path: Path) -> Path:
    """One small chart for each row: the units differ."""
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * lines), layout="constrained")
    for number, (row, title, limit) in enumerate(zip(rows, titles, limits, strict=True)):
        axes = figure.add_subplot(lines, columns, number + 1)
        bars = [("ckptkit", row.ours, _OURS, row.spread)]
        if row.peer is not None:
            bars.append((row.peer_name, row.peer, _PEER, row.peer_spread))
        if row.torch is not None:
            bars.append((row.torch_name or "torch_dcp", row.torch, _TORCH, None))
        if row.limit and limit:
            bars.append((limit, row.limit, _LIMIT, None))
        for name, value, color, spread in bars:
            axes.bar(name, value, color=color)
            least, most = spread or (value, value)
            if spread:
                axes.errorbar(name, value, [[value - least], [most - value]], color="black", capsize=3, lw=1)
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            axes.annotate(text, (name, most), (0, 1), textcoords="offset points", ha="center", va="bottom", fontsize=7)
        axes.margins(y=0.12)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same bytes for the same rows
    return path
