"""A result as tables: every figure by contender, then ours against the bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import FIGURES, median

_WIDTH = 150  # of the table if the output is not a terminal


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints a whole result."""
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(f"[bold]bench {result['benchmark']}[/bold], {_where(result['environment'])}")
    for name, state in result["states"].items():
        forced = dict.fromkeys(who for each in state["samples"].values() for who in each if who.startswith("ckptkit_"))
        console.print(_figures(name, state, [*result["contenders"], *forced]))
        console.print(_bars(state["ratios"]))
        for loop, found in state["details"].items():
            if isinstance(found, Mapping) and "steps_per_save" in found:
                step_ms = median([ms for segment in found["step_ms"] for ms in segment])
                staged = ", ".join(f"{name} by {strategy}" for name, strategy in found.get("strategies", {}).items())
                every = f"a save every {found['steps_per_save']} steps of {step_ms:.0f} ms"
                console.print(f"loop {loop}: {every}; staged: {staged or 'not stored'}")
        if "arena_bytes" in state["details"]:
            console.print(f"arena: {state['details']['arena_bytes'] / 1e6:.0f} MB on the ramdisk, not counted above")


def _where(environment: Mapping[str, Any]) -> str:
    packages = environment["packages"]
    return (
        f"{environment['cpu']}, {environment['cores']} cores, load {environment['load'][0]:.1f}, "
        f"orbax {packages['orbax-checkpoint']}, jax {packages['jax']}, commit {environment['commit']}"
    )


def _figures(name: str, state: Mapping[str, Any], contenders: list[str]) -> Table:
    table = Table(
        title=f"{name}: {state['state_bytes'] / 1e6:.0f} MB in {state['leaves']} leaves; median (least, most)"
    )
    table.add_column("figure")
    for contender in contenders:
        table.add_column(contender, justify="right")
    known = [figure for figure in FIGURES if figure in state["samples"]]
    extra = [figure for figure in state["samples"] if figure not in FIGURES]
    for figure in (*known, *extra):
        by_name = state["samples"][figure]
        label = figure.replace("_bytes", "_MB")
        table.add_row(label, *(_cell(figure, by_name.get(contender)) for contender in contenders))
    return table


def _cell(figure: str, samples: list[float] | None) -> str:
    middle = median(samples)
    if middle is None or not samples:
        return "-"
    return f"{_number(figure, middle)} ({_number(figure, min(samples))}, {_number(figure, max(samples))})"


def _number(figure: str, value: float) -> str:
    if figure.endswith("_bytes"):
        return f"{value / 1e6:.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _bars(ratios: list[Mapping[str, Any]]) -> Table:
    table = Table(title="ckptkit against the bars")
    for column in ("figure", "of", "against", "ours", "theirs", "ratio", "bar", ""):
        table.add_column(column, justify="left" if column in ("figure", "of", "against", "") else "right")
    for each in ratios:
        ratio = "-" if each["ratio"] is None else f"{each['ratio']:.3g}"
        verdict = {True: "met", False: "[red]not met[/red]", None: "no ratio"}[each["met"]]
        ours, theirs = (_number(each["figure"], each[who]) for who in ("ours", "theirs"))
        table.add_row(
            each["figure"],
            each["contender"],
            each["against"],
            ours,
            theirs,
            ratio,
            f"{each['bound']} {each['bar']:.3g}",
            verdict,
        )
    return table
