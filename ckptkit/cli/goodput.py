"""`ckptkit goodput`: the account of a run, as a table, a page or metrics; once, or while the run continues."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckptkit.cli.exits import Exit
from ckptkit.cli.interrupts import Interrupts
from ckptkit.cli.options import OutputFile, needed
from ckptkit.cli.prices import PRICE, job_price, price_of_hosts, processes_of
from ckptkit.cli.text import count_text, print_json, print_line, print_part
from ckptkit.errors import CorruptCheckpointError
from ckptkit.events import Event, Kind
from ckptkit.goodput import (
    DEFINITIONS,
    GoodputReport,
    RunLogs,
    Timeline,
    caveats,
    goodput_page,
    goodput_report,
    headline,
    read_run,
    timeline_of,
)
from ckptkit.goodput.better_interval import BetterInterval, better_interval
from ckptkit.goodput.prices import Bill, Price, bill_of
from ckptkit.util.clock import monotonic_s, time_text
from ckptkit.util.whole_file import write_whole

_FILE = OutputFile()
_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_NUMBERS = frozenset({
    "time", "share", "attempt", "process", "took", "loop waited", "steps lost", "first step after", "caught up after",
    "committed after (p50)", "restored step", "goodput", "cost", "fault", "at",
})  # fmt: skip
_LOSSES = ("attempt", "process", "steps lost", "first step after", "caught up after", "wiped", "lost to")
_REFRESH_MIN_S = 1.0
_REFRESH_SHARE = 10.0  # a look costs at most a tenth of a core, however long the logs are


@click.command()
@click.argument("run_dir")
@click.option("--html", type=_FILE, help="One self-contained page: timeline, badput, stalls, what each loss cost.")
@click.option("--prometheus", type=_FILE, help="Metrics for the node exporter's textfile collector (name it *.prom).")
@click.option("--tensorboard", type=_DIRECTORY, help="Scalars in this directory (needs tensorboardX).")
@PRICE
@price_of_hosts("one for each process of the logs")
@click.option("--follow", is_flag=True, help="Show the account while the run continues, until it ends or Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout (docs/GOODPUT.md has its shape).")
def goodput(
    run_dir: str,
    html: Path | None,
    prometheus: Path | None,
    tensorboard: Path | None,
    price: Price | None,
    hosts: int | None,
    follow: bool,
    as_json: bool,
) -> int:
    """Show where the time of a run went, and what each loss cost. RUN_DIR holds the run's event logs.

    Reads launcher.jsonl and attempt-<a>-process-<p>.jsonl; a log that is being written is read up to its last
    complete line.
    """
    if follow and as_json:
        raise click.UsageError("--follow is for a terminal: leave --json out, or leave --follow out")
    if tensorboard:
        needed("tensorboardX", "tensorboard")
    directory = Path(run_dir)
    job_price(price, hosts, processes=1)  # a wrong pair of flags is refused before any work
    if follow:
        _follow(directory)
    logs, notes = _load(directory)
    report = _report(directory, logs)
    costs = _costs(report, logs, price, hosts)
    name = directory.resolve().name
    if name in ("events", "logs"):  # only named for what it holds
        name = directory.resolve().parent.name
    if html:
        write_whole(html, _page(report, timeline_of(logs), f"Goodput of {name}", costs))
    if prometheus:
        write_whole(prometheus, prometheus_text(report, run=name))
    if tensorboard:
        write_tensorboard(tensorboard, report, timeline_of(logs))
    if as_json:
        print_json({**report.to_json(), "notes": notes} | ({} if costs is None else {"cost": costs.to_json()}))
    elif not follow:
        _show(report, costs, notes)
    sys.stdout.flush()
    return Exit.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """The cost of a run, and the interval of saves that would have cost less."""

    bill: Bill
    better: BetterInterval | None

    @property
    def saved(self) -> float:
        """The part of this run's cost that the better interval would have saved."""
        return 0.0 if self.better is None else self.better.gain * self.bill.total

    def to_json(self) -> dict[str, Any]:
        better = None if self.better is None else {**self.better.to_json(), "saved": self.saved}
        return {**self.bill.to_json(), "better_interval": better}


def _costs(
    report: GoodputReport, logs: Sequence[Sequence[Event]], price: Price | None, hosts: int | None
) -> _Costs | None:
    events = list(chain.from_iterable(logs))
    of_job = job_price(price, hosts, processes=processes_of(events))
    if of_job is None:
        return None
    return _Costs(bill=bill_of(report, of_job), better=better_interval(report, events))


def _page(report: GoodputReport, run: Timeline, title: str, costs: _Costs | None) -> str:
    if costs is None:
        return goodput_page(report, run, title=title)
    return goodput_page(report, run, title=title, bill=costs.bill, arithmetic=list(_cost_lines(report, costs)))


def _cost_lines(report: GoodputReport, costs: _Costs | None) -> Iterable[str]:
    """The cost of the run, and the setting that would have saved most of it, with the arithmetic."""
    if costs is None:
        return
    bill, text = costs.bill, costs.bill.price.host_h.text
    yield (
        f"cost {text(bill.total)}: {time_text(report.wall_s)} at {bill.price.rate_text}; "
        f"{text(bill.badput)} of it was not productive"
    )
    if costs.better is not None and costs.saved > 0:
        better = costs.better
        yield (
            f"{better.tier} every {time_text(better.best_s)} instead of every {time_text(better.every_s)} would have "
            f"saved {better.gain:.2%} of {text(bill.total)} = {text(costs.saved)}"
        )
        yield f"  {better.arithmetic}"


def _load(run_dir: Path) -> RunLogs:
    try:
        return read_run(run_dir)
    except ValueError as error:
        raise CorruptCheckpointError(str(error), path=str(run_dir)) from error


def _report(run_dir: Path, logs: Sequence[Sequence[Event]]) -> GoodputReport:
    try:
        return goodput_report(logs)
    except ValueError as error:
        raise click.ClickException(f"{run_dir}: {error}") from error


def _follow(run_dir: Path) -> None:
    """Refreshes until the launcher reports the end of the run, or the user interrupts it."""
    with Live(Text("waiting for the first event"), console=Console(), refresh_per_second=4) as live:
        try:
            while True:
                started_s = monotonic_s()
                try:
                    logs, notes = read_run(run_dir)
                    live.update(Group(*_tables(goodput_report(logs), notes)))
                    launcher = [event for log in logs for event in log if event.process < 0]
                    if launcher and launcher[-1].kind == Kind.FINISHED:  # an earlier launch may have ended too
                        return
                except (FileNotFoundError, ValueError) as error:
                    live.update(Text(f"waiting: {error}"))
                time.sleep(max(_REFRESH_MIN_S, _REFRESH_SHARE * (monotonic_s() - started_s)))
        except KeyboardInterrupt:  # the last account stays on the screen
            if (interrupts := click.get_current_context().find_object(Interrupts)) is not None:
                interrupts.handled()


def _rows(report: GoodputReport, costs: _Costs | None = None) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """The account as tables: titles of columns, and rows. With a price the first two have a column of costs."""
    kinds: list[tuple[str, ...]] = [
        (str(part), time_text(seconds), f"{seconds / report.wall_s:.2%}" if report.wall_s else "-")
        for part, seconds in report.parts_s.items()
        if seconds > 0
    ]
    losses: list[tuple[str, ...]] = [
        (
            str(loss.attempt),
            "-" if loss.process is None else str(loss.process),
            f"{loss.lost_steps:,}",
            "never" if loss.resume_s is None else time_text(loss.resume_s),
            "never" if loss.caught_up_s is None else time_text(loss.caught_up_s),
            ", ".join(loss.wiped) or "-",
            loss.cause,
        )
        for loss in report.disruptions
    ]
    priced: tuple[str, ...] = ()
    if costs is not None:
        priced, text = ("cost",), costs.bill.price.host_h.text
        shown = [cost for part, cost in costs.bill.parts.items() if report.parts_s[part] > 0]
        kinds = [(*row, text(cost)) for row, cost in zip(kinds, shown, strict=True)]
        lost = ["never" if cost is None else text(cost) for cost in costs.bill.losses]
        losses = [(*row, cost) for row, cost in zip(losses, lost, strict=True)]
    means = [(phase, time_text(seconds)) for phase, seconds in report.mean_time_to_resume_s.items() if seconds > 0]
    tiers = [(tier, time_text(seconds)) for tier, seconds in report.saves.commit_s_p50.items()]
    restores = [
        (
            str(each.attempt),
            "-" if each.step is None else str(each.step),
            time_text(each.restore_s),
            "-" if each.waited_s is None else time_text(each.waited_s),
            _sources(each.source_bytes.items()),
        )
        for each in report.restores
    ]
    return {
        ("kind of time", "time", "share", *priced): kinds,
        (*_LOSSES, *priced): losses,
        ("fault", "at", "what it did"): [(str(e.fault), time_text(e.at_s), e.did) for e in report.injected],
        ("mean time to resume", "time"): means,
        ("tier", "committed after (p50)"): tiers,
        ("attempt", "restored step", "took", "loop waited", "served by"): restores,
        ("definition", "goodput", "formula"): _definitions(report),
    }


def _definitions(report: GoodputReport) -> list[tuple[str, ...]]:
    if report.goodput.ml_goodput is None:
        return []
    return [(name, f"{getattr(report.goodput, field):.2%}", formula) for field, name, formula in DEFINITIONS]


def _sources(sizes: Iterable[tuple[str, int]]) -> str:
    found = [(tier, size) for tier, size in sizes if size]
    total = sum(size for _, size in found)
    return ", ".join(f"{tier} {size / total:.0%}" for tier, size in found) or "-"


def _head(report: GoodputReport) -> list[str]:
    goodput, saves = report.goodput, report.saves
    stall = count_text(saves.saves, "save") if saves.saves else "no saves"
    if saves.stall_ms_p50 is not None:
        stall = f"stall p50 {saves.stall_ms_p50:.1f} ms, p99 {saves.stall_ms_p99:.1f} ms"
        stall = f"{count_text(saves.saves, 'save')}, {stall}"
    return [
        f"{time_text(report.wall_s)} in all",
        headline(report),
        f"{count_text(goodput.distinct_steps, 'step')} kept, "
        f"{count_text(len(report.disruptions), 'loss', 'losses')}; {stall}",
        *caveats(report),
    ]


def _show(report: GoodputReport, costs: _Costs | None, notes: Sequence[str]) -> None:
    for line in [*_head(report), *notes, *_cost_lines(report, costs)]:
        print_line(line)
    for titles, rows in _rows(report, costs).items():
        print_part([(title, title in _NUMBERS) for title in titles], rows)


def _tables(report: GoodputReport, notes: Sequence[str]) -> Iterable[Text | Table]:
    yield Text("\n".join([*_head(report), *notes]))
    for titles, rows in _rows(report).items():
        if rows:
            table = Table(*titles, box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for row in rows[-20:]:  # a screen's worth: the newest
                table.add_row(*map(Text, row))
            yield Text("")
            yield table


_HELP = {
    "ckptkit_run_seconds": "Wall clock of the run, by kind of time; the kinds add up to the whole.",
    "ckptkit_goodput_ratio": "Goodput by definition, a share of the wall clock.",
    "ckptkit_steps_kept": "Distinct steps whose work was kept.",
    "ckptkit_steps_lost": "Steps that were done again after a loss.",
    "ckptkit_disruptions": "Losses of a process or host.",
    "ckptkit_resume_seconds": "Mean time from a loss to the end of the first step after it, by phase.",
    "ckptkit_run_save_stall_seconds": "Time that a save blocked the step loop, by quantile.",
    "ckptkit_run_commit_seconds": "Median time until a save was committed, by tier.",
    "ckptkit_restored_bytes": "Bytes that restores took, by tier.",
}
_Sample = tuple[str, dict[str, str], float]


def prometheus_text(report: GoodputReport, *, run: str) -> str:
    """The report in Prometheus' text format, every sample labelled with the run; all are gauges."""
    lines: list[str] = []
    told: set[str] = set()
    for name, labels, value in _samples(report):
        if name not in told:
            told.add(name)
            lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge"]
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"run": run, **labels}.items())
        lines.append(f"{name}{{{inside}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _samples(report: GoodputReport) -> Iterable[_Sample]:
    goodput, saves = report.goodput, report.saves
    for part, seconds in report.parts_s.items():
        yield "ckptkit_run_seconds", {"kind": str(part)}, seconds
    for definition, *_ in DEFINITIONS if goodput.ml_goodput is not None else ():
        yield "ckptkit_goodput_ratio", {"definition": definition}, getattr(goodput, definition)
    yield "ckptkit_steps_kept", {}, goodput.distinct_steps
    yield "ckptkit_steps_lost", {}, sum(loss.lost_steps for loss in report.disruptions)
    yield "ckptkit_disruptions", {}, len(report.disruptions)
    for phase, seconds in report.mean_time_to_resume_s.items():
        yield "ckptkit_resume_seconds", {"phase": phase}, seconds
    for quantile, stall_ms in (("0.5", saves.stall_ms_p50), ("0.99", saves.stall_ms_p99)):
        if stall_ms is not None:
            yield "ckptkit_run_save_stall_seconds", {"quantile": quantile}, stall_ms / 1e3
    for tier, seconds in saves.commit_s_p50.items():
        yield "ckptkit_run_commit_seconds", {"tier": tier}, seconds
    served: dict[str, int] = {}
    for restore in report.restores:
        for tier, size in restore.source_bytes.items():
            served[tier] = served.get(tier, 0) + size
    for tier, size in sorted(served.items()):
        yield "ckptkit_restored_bytes", {"tier": tier}, size


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_tensorboard(directory: Path, report: GoodputReport, run: Timeline) -> None:
    """Scalars in `directory`: the report's at the last step, each commit at its own. Needs tensorboardX."""
    writer: Any = needed("tensorboardX", "tensorboard").SummaryWriter(str(directory))
    last = report.goodput.distinct_steps
    ended_s = run.origin_s + run.wall_s
    for name, labels, value in _samples(report):
        tag = "/".join([name.removeprefix("ckptkit_"), *labels.values()])
        writer.add_scalar(f"ckptkit/{tag}", value, last, walltime=ended_s)
    for mark in run.saves:
        if mark.problem is None and mark.step is not None:
            tag = f"ckptkit/commit_seconds_of_save/{mark.tier}"
            writer.add_scalar(tag, mark.end_s - mark.start_s, mark.step, walltime=run.origin_s + mark.end_s)
    writer.close()
