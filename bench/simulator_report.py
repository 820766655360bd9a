"""The simulator's comparison with reality as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.simulator_fit import DISTURBED
from ckptkit.util.package import install_command

BAR_POINTS = 2.0


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints the costs, every run and the verdict."""
    costs = result["costs"]
    by_tier = ", ".join(
        f"{tier}: stall {1e3 * costs['stall_s'][tier]:.0f} ms, committed in {1e3 * costs['persist_s'][tier]:.0f} ms, "
        f"back in {costs['resume_s'][tier]:.1f} s"
        for tier in costs["stall_s"]
    )
    console.print(
        f"fitted: start {costs['startup_s']:.1f} s, a step every {1e3 * costs['cycle_s']:.0f} ms, {by_tier}",
        markup=False,
    )
    table = Table(
        "run",
        "failures",
        "measured",
        "predicted",
        "points apart",
        "steps lost, measured",
        "predicted",
        "ms a step",
        "start",
    )
    for row in result["rows"]:
        table.add_row(
            f"{row['run']}{' (fitted)' if row['fitted'] else ''}",
            str(row["failures"]),
            f"{row['measured']:.1%}",
            f"{row['predicted']:.1%}",
            f"{row['difference_points']:+.2f}",
            str(row["lost_steps_measured"]),
            f"{row['lost_steps_predicted']:.0f}",
            f"{1e3 * row['cycle_s']:.0f}",
            f"{row['startup_s']:.1f} s",
        )
    console.print(table)
    if result["disturbed"]:
        runs = ", ".join(map(str, result["disturbed"]))
        console.print(
            f"run {runs}: steps or the start took {DISTURBED:g} times the median of all runs or more: something else "
            "had the processors, and no cost fitted elsewhere can know it",
            markup=False,
        )
    apart, guess = result["difference_points_mean"], result["guess_points_mean"]
    console.print(
        f"not fitted: {apart:.2f} points apart on average (bar {BAR_POINTS:g}), at most "
        f"{result['difference_points_max']:.2f}; bias {result['bias_points']:+.2f}; the mean of the fitted runs would "
        f"be {guess:.2f} apart",
        markup=False,
    )


def plot(path: Path, result: Mapping[str, Any]) -> None:
    """Measured over predicted goodput, a mark per run. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.UsageError(f"--plot needs matplotlib: {install_command('plot')}") from error
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    rows = result["rows"]
    ends = [100 * row[name] for row in rows for name in ("measured", "predicted")]
    low, high = min(ends) - 5, max(ends) + 5
    axes.fill_between(
        [low, high],
        [low - BAR_POINTS, high - BAR_POINTS],
        [low + BAR_POINTS, high + BAR_POINTS],
        color="#999999",
        alpha=0.3,
        label=f"{BAR_POINTS:g} points apart",
    )
    axes.plot([low, high], [low, high], color="#999999", linewidth=1)
    # Okabe and Ito's palette, and a shape of its own for each.
    for is_fitted, marker, colour, label in ((True, "s", "#E69F00", "fitted"), (False, "o", "#0072B2", "predicted")):
        chosen = [row for row in rows if row["fitted"] == is_fitted]
        x, y = ([100 * row[name] for row in chosen] for name in ("predicted", "measured"))
        axes.plot(x, y, marker, color=colour, markeredgecolor="#1b1f23", label=f"{label} runs")
        for row, px, py in zip(chosen, x, y, strict=True):
            axes.annotate(str(row["failures"]), (px, py), xytext=(6, -3), textcoords="offset points", fontsize=8)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    axes.set_xlabel("predicted goodput (%)")
    axes.set_ylabel("goodput of the run (%)")
    axes.set_title(f"{result['difference_points_mean']:.2f} points apart on average; numbers: failures", fontsize=10)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
