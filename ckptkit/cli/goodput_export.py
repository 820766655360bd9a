"""A goodput report for other programs: Prometheus' textfile collector, TensorBoard, a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptkit.cli.outputs import needed, write_figure
from ckptkit.goodput import GoodputReport, Timeline
from ckptkit.util.clock import time_text

_HELP = {
    "ckptkit_run_seconds": "Wall clock of the run, by kind of time; the kinds add up to the whole.",
    "ckptkit_goodput_ratio": "Goodput by definition, a share of the wall clock.",
    "ckptkit_steps_kept": "Distinct steps whose work was kept.",
    "ckptkit_steps_lost": "Steps that were done again after a loss.",
    "ckptkit_disruptions": "Losses of a process or host.",
    "ckptkit_resume_seconds": "Mean time from a loss to the end of the first step after it, by phase.",
    "ckptkit_save_stall_seconds": "What a save held the step loop for, by quantile.",
    "ckptkit_commit_seconds": "Median time until a save was committed, by tier.",
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
    for definition in ("ml_goodput", "effective_training_time", "new_steps"):
        yield "ckptkit_goodput_ratio", {"definition": definition}, getattr(goodput, definition)
    yield "ckptkit_steps_kept", {}, goodput.distinct_steps
    yield "ckptkit_steps_lost", {}, sum(loss.lost_steps for loss in report.disruptions)
    yield "ckptkit_disruptions", {}, len(report.disruptions)
    for phase, seconds in report.mean_time_to_resume_s.items():
        yield "ckptkit_resume_seconds", {"phase": phase}, seconds
    for quantile, stall_ms in (("0.5", saves.stall_ms_p50), ("0.99", saves.stall_ms_p99)):
        if stall_ms is not None:
            yield "ckptkit_save_stall_seconds", {"quantile": quantile}, stall_ms / 1e3
    for tier, seconds in saves.commit_s_p50.items():
        yield "ckptkit_commit_seconds", {"tier": tier}, seconds
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


def write_picture(path: Path, report: GoodputReport) -> None:
    """A PNG of the time by kind. Needs matplotlib."""
    needed("matplotlib", "plot")
    from matplotlib.figure import Figure

    rows = [(str(part).replace("_", " "), seconds) for part, seconds in report.parts_s.items() if seconds > 0]
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#009E73" if name == "productive" else "#0072B2" for name, _ in rows]
    bars = axes.barh([name for name, _ in rows], [seconds for _, seconds in rows], color=colours)
    axes.bar_label(bars, labels=[f" {time_text(seconds)} ({seconds / report.wall_s:.2%})" for _, seconds in rows])
    axes.set_xlim(0, max((seconds for _, seconds in rows), default=1.0) * 1.25)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"goodput {report.goodput.ml_goodput:.1%} (Google's ML goodput) of {time_text(report.wall_s)}")
    write_figure(path, figure)
