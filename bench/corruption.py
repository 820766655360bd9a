"""`python -m bench corruption`: files are damaged by a seed, one at a time, and the newest step is asked for.

A restore may return the right bits, or raise an error; it may never return wrong ones. Every fault is asked about
twice of ckptkit: with the damaged tier alone, and with all tiers, where another copy exists.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.environment import environment, store_result
from ckptkit.testing.damage import DAMAGE_KINDS, DamageKind, inflict

FULL = 1000
SHORT = 51  # each kind once in each place
PLACES = (
    ("ram", "data"),
    ("ram", "manifest"),
    ("ssd", "data"),
    ("ssd", "manifest"),
    ("durable", "data"),
    ("durable", "manifest"),
    ("durable", "metadata"),
    ("durable", "epochs"),
)
STOCK_PLACES = ("data", "metadata")
_IN_WORKER = "CKPTKIT_BENCH_WORKER"


@click.command(context_settings={"max_content_width": 120})
@click.option("--full", is_flag=True, help=f"{FULL} faults for each.")
@click.option("--faults", type=click.IntRange(min=1), default=SHORT, show_default=True, help="How many for each.")
@click.option("--seed", type=int, default=0, show_default=True, help="Repeats kinds and places.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Counts and misses.")
def main(full: bool, faults: int, seed: int, json_path: Path | None) -> None:
    """Damages checkpoints of ckptkit and of stock Orbax, and counts the results of their restores."""
    count = FULL if full else faults
    if _IN_WORKER not in os.environ:
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", _IN_WORKER: "1"}
        command = [sys.executable, "-m", "bench", "corruption", "--faults", str(count), "--seed", str(seed)]
        if json_path is not None:
            command += ["--json", str(json_path.absolute())]
        raise SystemExit(subprocess.run(command, env=environ, cwd=Path(__file__).parent.parent).returncode)
    logging.disable(logging.CRITICAL)  # every fault is an error to those who log
    sys.unraisablehook = lambda _: None  # stock Orbax leaves coroutines behind that raise when nobody waits
    with tempfile.TemporaryDirectory(prefix="ckptkit-corruption-") as home:
        result = {"benchmark": "corruption", "environment": environment(), "seed": seed, "faults": count}
        result |= campaign(Path(home), count, seed)
    show(result, Console())
    store_result(result, json_path)
    raise SystemExit(0 if held(result) else 1)


def campaign(home: Path, count: int, seed: int) -> dict[str, Any]:
    """`count` faults in ckptkit's files and as many in stock Orbax's; the result of each restore, by place."""
    from bench.victims import NEWEST, Ours, Stock

    ours, stock = Ours(home / "ours"), Stock(home / "stock")
    ours.save()
    stock.save()
    rows: dict[str, Counter[str]] = {}
    misses: list[dict[str, Any]] = []
    for number, ((tier, what), kind, fault_seed) in enumerate(plan(PLACES, count, seed)):
        ours.put_back()
        how = _damage(ours.files(tier, what, NEWEST), ours.files(tier, what, NEWEST - 1), kind, fault_seed)
        found = ours.corrupt(tier)
        all_tiers = ours.restore()
        ours.put_back()
        _damage(ours.files(tier, what, NEWEST), ours.files(tier, what, NEWEST - 1), kind, fault_seed)
        ours.only(tier)
        alone = ours.restore()
        outcome = _outcome(alone, all_tiers, found, NEWEST)
        recovered = all_tiers.step == NEWEST and all_tiers.right
        row = rows.setdefault(f"{tier} {what}", Counter())
        row.update(["faults", outcome] + ["recovered"] * recovered)
        unclear = [answer.error for answer in (alone, all_tiers) if answer.error.startswith("unclear")]
        if outcome in ("wrong", "older") or unclear or not recovered:
            misses.append({"who": "ckptkit", "fault": how, "seed": fault_seed, "outcome": outcome, "error": unclear})
        _say(number, count, "ckptkit")
    stock_rows: dict[str, Counter[str]] = {}
    for number, (what, kind, fault_seed) in enumerate(plan(STOCK_PLACES, count, seed)):
        stock.put_back()
        _damage(stock.files(what, NEWEST), stock.files(what, NEWEST - 1), kind, fault_seed)
        answer = stock.restore()
        outcome = "wrong" if not answer.right else "detected" if answer.noticed else "harmless"
        if outcome == "harmless" and answer.step != NEWEST:
            outcome = "older"
        stock_rows.setdefault(f"durable {what}", Counter()).update(["faults", outcome])
        _say(number, count, "stock Orbax")
    return {
        "ckptkit": {name: dict(row) for name, row in sorted(rows.items())},
        "orbax": {name: dict(row) for name, row in sorted(stock_rows.items())},
        "misses": misses,
    }


def plan(places: Sequence[Any], count: int, seed: int) -> list[tuple[Any, DamageKind, int]]:
    """Every kind in every place, again and again until there are `count`, each with a seed of its own."""
    pairs: list[tuple[Any, DamageKind]] = [
        (place, kind) for place in places for kind in DAMAGE_KINDS if _fits(place, kind)
    ]
    chance = random.Random(seed)
    chosen = (pairs[number % len(pairs)] for number in range(count))
    return [(place, kind, chance.randrange(1 << 30)) for place, kind in chosen]


def _fits(place: Any, kind: DamageKind) -> bool:
    what = place if isinstance(place, str) else place[1]
    if what == "epochs":  # one file, written once: no older one exists
        return kind not in ("stale file", "swapped files")
    return kind != "garbage" or what != "data"


def _damage(files: Sequence[Path], older: Sequence[Path], kind: DamageKind, seed: int) -> str:
    return inflict(kind, files, [path for path in older if path not in files], seed)


def _outcome(alone: Any, all_tiers: Any, found: bool, newest: int) -> str:
    """`older`: the newest step is missing in this tier, and nothing in it shows that it existed."""
    if not alone.right or not all_tiers.right:
        return "wrong"
    if found or alone.noticed:
        return "detected"
    return "harmless" if alone.step == newest else "older"


def held(result: dict[str, Any]) -> bool:
    """Whether the bars are met: nothing wrong, nothing lost unnoticed, everything recovered from another copy."""
    return not result["misses"] and not any(row.get("wrong") for row in result["ckptkit"].values())


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the table."""
    if not console.is_terminal:
        console.width = 150
    table = Table(title=f"one damaged file at a time, {result['faults']} faults for each, seed {result['seed']}")
    table.add_column("where", no_wrap=True)
    columns = ("faults", "detected", "harmless", "older", "wrong", "recovered")
    for who, names in (("ckptkit", columns), ("Orbax", columns[:-1])):
        for name in names:
            table.add_column(f"{who}\n{name}", justify="right")
    ours, stock = result["ckptkit"], result["orbax"]
    for where in sorted({*ours, *stock}):
        table.add_row(where, *_cells(ours.get(where), columns), *_cells(stock.get(where), columns[:-1]))
    table.add_section()
    table.add_row("all", *_cells(_sum(ours), columns), *_cells(_sum(stock), columns[:-1]))
    console.print(table)
    console.print(
        "detected: by verify, an error or a rejected candidate. harmless: the newest step, right, from the "
        "damaged tier alone.\n"
        "older: the damaged tier alone gives the step before, and nothing shows the newer one.\n"
        "wrong: other bits than were saved, silently. recovered: the newest step, right, with all tiers."
    )
    for miss in result["misses"]:
        console.print(f"[red]miss[/red]: {miss}")


def _cells(row: dict[str, int] | None, names: Sequence[str]) -> list[str]:
    return ["" if row is None else str(row.get(name, 0)) for name in names]


def _sum(rows: dict[str, dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for row in rows.values():
        total.update(row)
    return dict(total)


def _say(number: int, count: int, who: str) -> None:
    if (number + 1) % 50 == 0 or number + 1 == count:
        print(f"{who}: {number + 1} of {count}", file=sys.stderr)
