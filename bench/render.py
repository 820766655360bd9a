"""`python -m bench report`: `bench/REPORT.md`, its pictures and the table in README.md, from the stored results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import click

from bench.row import Range, Row, Source
from bench.rows import RESULTS, by_figure_of, newest_results, rows_of
from ckptkit.util.words import count_text

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: `make figures` writes what is between these lines -->", "<!-- end of figures -->"
# The rows of the README, as sentences; the rest is in the report. One of them is a row in which ckptkit loses.
README_FIGURES = {
    ("gpu", "loss_s"): "A save delays a loop on a GPU",
    ("gpu", "restore_s"): "Restore to a GPU from the ramdisk, every byte verified",
    ("faults", "wrong_runs"): "Trainings with injected bit flips that ended with wrong bits",
    ("faults", "resume_s"): "From a killed process to its next training step",
    ("commit", "commit_gbps"): "Commit on the ramdisk, CPU devices",
    ("first", "first_both_s"): "The first `save` of a process with the step after it, CPU devices",
    ("stall", "blocking_ms.in_flight"): "`save` holds its caller while a step still runs, CPU devices",
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
    lines = ["| what | state | ckptkit | best of stock Orbax | against Orbax |", f"|{'---|' * 5}"]
    for key, sentence in README_FIGURES.items():
        if row := by_figure.get(key):
            shown.append(row)
            found = (
                _amount(row, row.ours, "", row.spread),
                _amount(row, row.peer, row.peer_name, row.peer_spread),
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
    text = f"Measured {when}; in {count_text(len(sources), 'run')} of {count_text(len(commits), 'commit')}"
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
        "Written by `make figures` from `bench/results`; no figure is typed by hand. Values are medians, "
        "unless the legend names another kind. "
        '"Stock Orbax" is the fastest way of stock Orbax that was measured ("only": the only one). The ratio is '
        "ckptkit over it: below 1 is better, for `_gbps` and goodput above 1. It is left out where the samples of the "
        "two overlap, one of ckptkit's is below 0, or Orbax's median is not above 0. "
        '"Torch DCP" is `torch.distributed.checkpoint`. "Limit" is one plain copy on this machine, 0 where it can '
        "run while the step computes elsewhere, and for `faults` a checkpoint that costs nothing. A contender that was "
        'faster than the plain copy is the limit, with its name. "n" is the number of samples of ckptkit. In '
        "parentheses is the range of samples that are few or scattered. "
        '"Busy": other work ran, so times are an indication. '
        "[Methods](../docs/BENCHMARKS.md), [history and negative results](LOG.md).\n",
    ]
    for benchmark, group in groupby(rows, key=lambda row: row.benchmark):
        own = list(group)
        parts.append(f"## {benchmark}\n")
        parts.append(_sources(own))
        parts += _meanings(own)
        parts.append(_table(own))
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
        busy = ", busy" if (source.load or 0.0) >= _BUSY else ""
        of = f" ({_some(list(states))})" if len(cases) > 1 else f" ({'; '.join(states)})" if len(states) == 1 else ""
        told.append(f"Measured {source}{busy}{of}.")
    return "\n".join(told if len(told) == 1 else (f"- {line}" for line in told)) + "\n"


def _some(states: list[str]) -> str:
    """The states of a result; of many the first."""
    return "; ".join(states) if len(states) <= 3 else f"{states[0]} and {len(states) - 1} more"


def _meanings(rows: Sequence[Row]) -> list[str]:
    """The meaning of the figures of a section, each once, in the order of the rows."""
    told: dict[str, str] = {}
    for row in rows:
        base = told.get(row.figure.rpartition(".")[0], "").rpartition(",")[0]
        meaning = row.meaning.removeprefix("ckptkit: ")
        own = meaning.removeprefix(f"{base}, ") if base else f"{meaning}{_with_comma(_unit(row.figure))}"
        told.setdefault(row.figure, own)
    figures: dict[str, list[str]] = {}
    for figure, meaning in told.items():
        figures.setdefault(meaning, []).append(f"`{figure}`")
    return ["\n".join(f"- {', '.join(named)}: {meaning}" for meaning, named in figures.items()) + "\n"]


def _with_comma(unit: str) -> str:
    return f", {unit}" if unit else ""


def _table(rows: Sequence[Row]) -> str:
    """A row for each figure and state; a column in which every cell is empty is left out."""
    found: list[tuple[str, list[str]]] = [
        ("figure", [f"`{row.figure}`" for row in rows]),
        ("state", [row.case for row in rows]),
        ("ckptkit", [_cell(row, row.ours, "", row.spread) for row in rows]),
        ("stock Orbax", [_cell(row, row.peer, row.peer_name, row.peer_spread) for row in rows]),
        ("torch DCP", [_cell(row, row.torch, row.torch_name, None) for row in rows]),
        ("limit", [_cell(row, row.limit, row.limit_name, None) for row in rows]),
        ("ratio", ["-" if row.ratio is None else f"{row.ratio:.2g}" for row in rows]),
        ("n", [str(row.samples) for row in rows]),
    ]
    alone = len({row.case for row in rows}) == 1  # then the line above the table has the state
    columns = [(name, cells) for name, cells in found if set(cells) != {"-"} and not (alone and name == "state")]
    lines = [f"|{'|'.join(name for name, _ in columns)}|", f"|{'---|' * len(columns)}"]
    lines += [f"|{'|'.join(cells)}|" for cells in zip(*(cells for _, cells in columns), strict=True)]
    return "\n".join(lines) + "\n"


def _cell(row: Row, value: float | None, name: str, spread: Range | None) -> str:
    if value is None:
        return "-"
    least, most = map(partial(_number, row), spread or (value, value))
    notes = "; ".join(filter(None, (name, "" if least == most else f"{least} to {most}")))
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
