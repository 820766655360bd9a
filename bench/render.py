"""`python -m bench report`: `bench/REPORT.md`, its pictures and the table in README.md, from the stored results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import click

from bench.row import Range, Row, Source
from bench.rows import RESULTS, by_figure_of, newest_results, rows_of

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: `make figures` writes what is between these lines -->", "<!-- end of figures -->"
# The rows of the README, as sentences; the rest is in the report.
README_FIGURES = {
    ("gpu", "loss_s"): "A save delays a loop on a GPU",
    ("gpu", "committed_s"): "From `save` on a GPU to the commit on the ramdisk",
    ("gpu", "restore_s"): "Restore to a GPU from the ramdisk, every byte verified",
    ("faults", "goodput"): "Share of the time that trained the model, while faults were injected",
    ("faults", "resume_s"): "From a killed process to its next training step",
    ("faults", "wrong_runs"): "Trainings with injected bit flips that ended with wrong bits",
    ("stall", "stall_ms_per_save"): "A save delays a loop that keeps all cores busy, on CPU devices",
    ("stall", "stall_idle_ms_per_save"): "The same, step leaves cores idle",
    ("stall", "blocking_ms.in_flight"): "`save` holds its caller while the step that makes the state still runs",
    ("commit", "commit_gbps"): "From `save` to the commit on the ramdisk",
    ("restore", "restore_gbps"): "Restore from the ramdisk, every byte verified",
    ("hosts", "next_step_s"): "From a lost host to the next step, on a spare host",
    ("durable", "bucket_save_requests"): "Requests of a save to a bucket",
}
_STATES = {
    "125m@1": "1.5 GB, one process",
    "125m-cpu": "1.5 GB",
    "many@1": "4,000 arrays of 16 KB",
    "4 hosts + 1": "4 hosts and a spare",
}
_CONTENDERS = {
    "orbax_async": "Orbax",
    "orbax": "Orbax",
    "orbax_tuned": "Orbax, tuned",
    "orbax_v1": "Orbax, v1 API",
    "orbax_sync": "Orbax, synchronous",
    "orbax-sync": "Orbax, synchronous",
    "torch_dcp": "torch DCP",
}
_UNITS = {"_ms": "ms", "_gbps": "GB/s", "_s": "s", "_bytes": "MB", "cpu_s_per_gb": "s/GB"}
_BUSY = 3.0  # load at which a timing is only an indication


def readme_table(rows: Sequence[Row]) -> str:
    """The rows that the README shows, in words: units in the cells, and which side is better."""
    by_figure = by_figure_of(rows)
    shown: list[Row] = []
    lines = ["| what | state | ckptkit | best of stock Orbax | torch DCP | limit | against Orbax |", f"|{'---|' * 7}"]
    for key, sentence in README_FIGURES.items():
        if row := by_figure.get(key):
            shown.append(row)
            found = (
                _amount(row, row.ours, "", row.spread),
                _amount(row, row.peer, row.peer_name, row.peer_spread),
                _amount(row, row.torch, ""),
                _amount(row, row.limit, row.limit_name),
            )
            lines.append(f"| {' | '.join((sentence, _state_in_words(row), *found, _verdict(row)))} |")
    return "\n".join([*lines, "", _when(shown)]) + "\n"


def _state_in_words(row: Row) -> str:
    if row.benchmark != "faults":
        return _STATES.get(row.case, row.case)
    state, _, gap = row.case.partition(", ")
    runs = f", {row.samples} trainings" if row.figure.endswith("_runs") else ""
    return f"{_STATES.get(state, state)}, a fault every {gap}{runs}"


def _amount(row: Row, value: float | None, contender: str, spread: Range | None = None) -> str:
    if value is None:
        return "-"

    def number(each: float) -> str:
        return f"{each:.0%}" if row.figure == "goodput" else _number(row, each)

    only, name = "only " * contender.startswith("only "), contender.removeprefix("only ")
    who = f"{only}{_CONTENDERS.get(name, name)}"
    ends = f"{number(spread[0])} to {number(spread[1])}" if spread and spread[0] != spread[1] else ""
    notes = "; ".join(filter(None, (who, ends)))
    text = f"{number(value)} {_unit(row.figure)}".strip()
    return f"{text} ({notes})" if notes else text


def _verdict(row: Row) -> str:
    if not row.ratio:
        return "-"
    more_is_better = row.figure == "goodput" or row.figure.endswith("_gbps")
    times = row.ratio if more_is_better else 1 / row.ratio
    return f"{times:.2g}x better" if times >= 1 else f"{1 / times:.2g}x worse"


def _when(rows: Iterable[Row]) -> str:
    """How far apart the rows of one table are in time and in commits: they are seldom from one run."""
    sources = {row.source for row in rows}
    days = sorted({source.day for source in sources})
    when = " to ".join(dict.fromkeys(days[:1] + days[-1:]))
    commits = {source.commit.rstrip("+") for source in sources if source.commit}
    inexact = sum(not source.exact for source in sources)
    text = f"Measured {when}; runs: {len(sources)}, commits: {len(commits)}"
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
