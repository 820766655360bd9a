"""`python -m bench report`: `bench/REPORT.md`, its pictures and the table in README.md, from the stored results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import click

from bench.row import Range, Row, Source
from bench.rows import RESULTS, newest_results, rows_of

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: `make figures` writes what is between these lines -->", "<!-- end of figures -->"
# The rows of the README, with their labels; the rest is in the report.
README_FIGURES = {
    ("faults", "goodput"): "goodput of a training with injected faults",
    ("faults", "lost_work_s"): "work that a training repeated after injected faults",
    ("faults", "wrong_runs"): "trainings with injected faults and bit flips that ended with wrong bits",
    ("faults", "resume_s"): "from an injected kill of such a training to its next step",
    ("stall", "stall_ms_per_save"): "stall of a save while the step keeps all cores busy",
    (
        "stall",
        "stall_idle_ms_per_save.device_copy",
    ): "stall of a save while the step runs elsewhere, as accelerators stage",
    ("stall", "stall_idle_ms_per_save"): "the same, as the CPU backend stages by default",
    ("commit", "commit_gbps"): "from `save` to the commit on the ramdisk",
    ("commit", "cpu_s_per_gb"): "processor time of a save",
    ("restore", "restore_gbps"): "restore from the ramdisk, every byte verified",
    ("durable", "disk_bytes"): "bytes of a durable step on a disk",
    ("gpu", "ready_s"): "a save on a GPU or TPU blocks, state ready",
    ("gpu", "in_flight_s"): "a save on a GPU or TPU blocks, step in flight",
    ("gpu", "restore_s"): "restore to a GPU or TPU from the ramdisk",
    ("durable", "bucket_save_requests"): "requests of a save to a bucket",
    ("durable", "bucket_restore_requests"): "requests of a restore from a bucket",
    ("corruption", "restored_wrong"): "damaged files (injected) restored as something else, without an error",
    ("kill", "recovered"): "kills (injected) after which the newest surviving save was restored",
    ("kill", "resume_s"): "from a kill (injected) of one process to the next step of the job",
    ("hosts", "next_step_s"): "from the loss (injected) of a host to the next step of the job, on a spare host",
}
_UNITS = {"_ms": "ms", "_gbps": "GB/s", "_s": "s", "_bytes": "MB", "cpu_s_per_gb": "s/GB"}
_BUSY = 3.0  # load at which a timing is only an indication


def readme_table(rows: Sequence[Row]) -> str:
    """The rows that the README shows, and when they were measured."""
    by_figure = {(row.benchmark, row.figure): row for row in reversed(rows)}  # of several states the first
    shown = {label: by_figure[key] for key, label in README_FIGURES.items() if key in by_figure}
    return f"{_table(shown.items())}\n{_when(shown.values())}\n"


def _when(rows: Iterable[Row]) -> str:
    """How far apart the rows of one table are in time and in commits: they are seldom from one run."""
    sources = {row.source for row in rows}
    days = sorted({source.day for source in sources})
    when = " to ".join(dict.fromkeys(days[:1] + days[-1:]))
    commits = {source.commit.rstrip("+") for source in sources if source.commit}
    inexact = sum(not source.exact for source in sources)
    text = f"Measured {when}; results: {len(sources)}, commits: {len(commits)}"
    if inexact:
        text += f", results whose commit is dirty or was not stored: {inexact}"
    return f"{text}. [Date and commit of each row](bench/REPORT.md)."


def with_table(readme: str, rows: Sequence[Row]) -> str:
    """The README with the table of these rows. Raises ValueError where the two marks are not there, once each."""
    before, found, rest = readme.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended or BEGIN in after:
        raise ValueError(f"README.md must have {BEGIN!r} and then {END!r}, once each")
    return f"{before}{BEGIN}\n\n{readme_table(rows)}\n{END}{after}"


def report(rows: Sequence[Row]) -> str:
    """The whole report as Markdown."""
    parts = [
        "# Results of the benchmarks\n",
        "Written by `make figures` from `bench/results`; no figure is typed by hand. All values are medians. "
        '"Stock Orbax" is the fastest way of stock Orbax that was measured, and the ratio is over it. "Torch DCP" is '
        '`torch.distributed.checkpoint`. "Limit" is one plain copy on this machine (for `faults`: a checkpoint that '
        "costs nothing). It is 0 where the copy can run while the step computes elsewhere. Where a contender was "
        'faster than the plain copy, it is that contender, with its name. "n" is the number of samples of ckptkit. '
        "In parentheses: the least to the greatest sample, where there are fewer than five, or where they lie further "
        'apart than the median is large. "only" before a name: no other way of stock Orbax was measured there. The '
        "sections are from different days and commits. "
        "Methods and negative results: "
        "[LOG.md](LOG.md).\n",
    ]
    for benchmark, group in groupby(rows, key=lambda row: row.benchmark):
        own = list(group)
        parts.append(f"## {benchmark}\n")
        parts.append(_sources(own))
        parts.append(_table((f"`{row.figure}`: {row.meaning}", row) for row in own))
        if (RESULTS / f"{benchmark}.png").exists():
            parts.append(f"![{benchmark}](results/{benchmark}.png)\n")
    return "\n".join(parts)


def _sources(rows: Sequence[Row]) -> str:
    """Date, commit and load of each result that a section is from, with its states where there are several."""
    cases: dict[Source, dict[str, None]] = {}
    for row in rows:
        cases.setdefault(row.source, {})[row.case] = None
    told = []
    for source, states in cases.items():
        busy = ": other work ran, times are an indication" if (source.load or 0.0) >= _BUSY else ""
        of = f" ({'; '.join(states)})" if len(cases) > 1 else ""
        told.append(f"Measured {source}{busy}{of}.")
    return "\n".join(told if len(told) == 1 else (f"- {line}" for line in told)) + "\n"


def _table(rows: Iterable[tuple[str, Row]]) -> str:
    lines = ["| what | state | ckptkit | stock Orbax | torch DCP | limit | ratio | n |", f"|{'---|' * 8}"]
    for label, row in rows:
        ours, peer, torch, limit = (
            _cell(row, value, name, spread)
            for value, name, spread in (
                (row.ours, "", row.spread),
                (row.peer, row.peer_name, row.peer_spread),
                (row.torch, row.torch_name, None),
                (row.limit, row.limit_name, None),
            )
        )
        ratio = "-" if row.ratio is None else f"{row.ratio:.2g}"
        told = f"{label}, {unit}" if (unit := _unit(row.figure)) else label
        cells = (told, row.case, ours, peer, torch, limit, ratio, str(row.samples))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row, value: float | None, name: str, spread: Range | None) -> str:
    if value is None:
        return "-"
    ends = f"{_number(row, spread[0])} to {_number(row, spread[1])}" if spread else ""
    notes = "; ".join(filter(None, (name, ends)))
    return f"{_number(row, value)} ({notes})" if notes else _number(row, value)


def _unit(figure: str) -> str:
    name = figure.partition(".")[0]
    if name.endswith("cpu_s_per_gb"):
        return "s/GB"
    if "_ms" in name:
        return "ms"
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")


def _number(row: Row, value: float) -> str:
    value = value / 1e6 if _unit(row.figure) == "MB" else value
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write(*, pictures: bool) -> list[Path]:
    """Writes report, README table and, with matplotlib, the pictures; returns the files that it wrote."""
    results = newest_results()
    rows = rows_of(results)
    written = []
    if pictures:
        from bench.plots import draw  # matplotlib: only here
        from bench.simulator_report import plot

        written += draw(rows, RESULTS, ROOT / "docs" / "side-by-side.png")
        for result in [each for each in results if each["benchmark"] == "simulator"][-1:]:
            plot(RESULTS / "simulator.png", result)
            written.append(RESULTS / "simulator.png")
    readme, told = ROOT / "README.md", ROOT / "bench" / "REPORT.md"
    readme.write_text(with_table(readme.read_text(), rows))
    told.write_text(report(rows))
    return [*written, readme, told]


@click.command()
@click.option("--pictures/--no-pictures", default=True, show_default=True, help="PNG plots (needs matplotlib).")
def main(pictures: bool) -> None:
    """Renders the newest stored results of every benchmark."""
    for path in write(pictures=pictures):
        click.echo(path.relative_to(ROOT))
