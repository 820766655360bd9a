"""`python -m bench simulate`: what a simulation of a large job takes, as a user starts it, with every policy."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench.bars import SIMULATE_S
from bench.environment import environment, store_result
from bench.measure import whole_process


@click.command(context_settings={"max_content_width": 120})
@click.option("--hosts", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--days", type=click.FloatRange(min=0.01), default=90.0, show_default=True)
@click.option("--runs", type=click.IntRange(min=2), default=1000, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(hosts: int, days: float, runs: int, repeats: int, json_path: Path | None) -> None:
    """Times `ckptkit simulate`, whole processes one after the other, with all its policies and the oracle's search."""
    words = ["simulate", "--hosts", str(hosts), "--days", f"{days:g}", "--runs", str(runs), "--json"]
    home = tempfile.gettempdir()
    result: dict[str, Any] = {
        "benchmark": "simulate",
        "environment": environment(home, home),
        "hosts": hosts,
        "days": days,
        "runs": runs,
        "samples": [],
    }
    for _ in range(repeats):
        out, took = whole_process(["-m", "ckptkit.cli", *words])
        told = json.loads(out)["policies"]
        result["samples"].append({**took, "policies": len(told), "failures": told[0]["failures"]})
    samples = result["samples"]
    wall_s, cpu_s = (median(each[name] for each in samples) for name in ("wall_s", "cpu_s"))
    Console(width=120).print(
        f"{hosts:,} hosts x {days:g} days x {runs:,} runs, {samples[0]['failures']:,.0f} failures each, "
        f"{samples[0]['policies']} policies: {wall_s:.2f} s (median of {repeats}; bar {SIMULATE_S:g}), "
        f"{cpu_s:.2f} s of processor time",
        markup=False,
        highlight=False,
    )
    store_result(result, json_path)
