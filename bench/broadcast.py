"""`python -m bench broadcast`: replicas that read the durable tier for each other, against each for itself and Orbax.

All processes read through one token bucket of the fake bucket: what a job shares is the storage, not a cable of each.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.broadcast_worker import PROGRESS
from bench.durable import FakeBucket
from bench.environment import environment, store_result
from ckptkit.launch import ExitCode, Hooks, Launcher, RestartPolicy, Workers

RATIO_MAX = 1.10  # of the faster side's time: what the choice of `auto` may cost
BYTES_MAX = 1.005  # of the state: 1.00 to two digits
_WIDTH = 150
_COLUMNS = ("read", "broadcast", "auto", "orbax", "orbax_broadcast")


@click.command(context_settings={"max_content_width": 120})
@click.option("--replicas", type=click.IntRange(min=2), multiple=True, default=(2, 4), show_default=True)
@click.option("--megabytes", type=float, default=128.0, show_default=True, help="Of the state.")
@click.option(
    "--rate", "rates", type=float, multiple=True, default=(25.0, 100.0, 400.0), show_default=True, help="MB/s."
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="After one to warm up.")
@click.option(
    "--place", default=tempfile.gettempdir(), show_default=True, help="Where the fake bucket keeps its files."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(
    replicas: tuple[int, ...],
    megabytes: float,
    rates: tuple[float, ...],
    repeats: int,
    place: str,
    json_path: Path | None,
) -> None:
    """Bytes, dtypes and seconds of restores with data replicas, side by side; one process for each replica."""
    found: dict[str, Any] = {
        "benchmark": "broadcast",
        "environment": environment(place, place),
        "megabytes": megabytes,
        "repeats": repeats,
        "replicas": {},
    }
    for count in replicas:
        result = measure(count, megabytes, rates, repeats, place)
        result["bars"] = judge(result, count)
        found["replicas"][str(count)] = result
        show(result, count, Console())
    store_result(found, json_path)


def measure(replicas: int, megabytes: float, rates: tuple[float, ...], repeats: int, place: str) -> dict[str, Any]:
    """Runs one job of so many processes against a bucket of its own."""
    home = Path(tempfile.mkdtemp(prefix="ckptkit-broadcast-", dir=place))
    output: list[str] = []
    bucket = FakeBucket(home / "bucket")

    def heard(process: int, line: str) -> None:
        output.append(f"{process}: {line}")
        if line.startswith(PROGRESS):
            print(f"{replicas} replicas: {line.removeprefix(PROGRESS)}", file=sys.stderr, flush=True)

    try:
        command = [
            sys.executable,
            "-m",
            "bench.broadcast_worker",
            "--process",
            "{process}",
            "--replicas",
            str(replicas),
        ]
        command += ["--coordinator", "{coordinator}", "--root", bucket.root, "--out", str(home / "found.json")]
        command += ["--megabytes", str(megabytes), "--repeats", str(repeats), "--rates", *map(str, rates)]
        launcher = Launcher(
            Workers(command, processes=replicas, devices_per_process=1, env=bucket.env()),
            policy=RestartPolicy(restarts=0),
            hooks=Hooks(on_output=heard, say=output.append),
        )
        if launcher.run() != ExitCode.OK:
            raise click.ClickException("the job failed:\n" + "\n".join(output[-60:]))
        return json.loads((home / "found.json").read_text())
    finally:
        bucket.close()
        shutil.rmtree(home, ignore_errors=True)


def judge(result: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """The bars: bytes of the storage, dtypes, and the choice of `auto` at each rate."""
    size, bars = result["state_bytes"], dict[str, Any]()
    every = list(result["samples"].values())
    for name in _COLUMNS:
        if name == "auto":
            continue
        bars[f"{name}_bytes"] = max(sample["bytes_read"] for by_name in every for sample in by_name[name]) / size
    bars["bytes_met"] = bars["broadcast_bytes"] < BYTES_MAX
    bars["exact_met"] = set(result["matrix"]["broadcast"].values()) == {"exact"}
    bars["replicas"] = replicas
    for rate, by_name in result["samples"].items():
        seconds = {name: statistics.median(sample["s"] for sample in by_name[name]) for name in by_name}
        chosen = ["broadcast" if sample["broadcast"] else "read" for sample in by_name["auto"]]
        faster_s = min(seconds["read"], seconds["broadcast"])
        worst = max(seconds[side] for side in chosen) / faster_s
        bars[f"choice_at_{rate}"] = {
            "chosen": chosen,
            "ratio": worst,
            "met": worst <= RATIO_MAX,
            "auto_ratio": seconds["auto"] / faster_s,  # as it ran: no bar
        }
    return bars


def show(result: Mapping[str, Any], replicas: int, console: Console) -> None:
    """Prints one job's tables."""
    if not console.is_terminal:
        console.width = _WIDTH
    bars = result["bars"]
    title = f"{replicas} replicas, {result['state_bytes'] / 1e6:.0f} MB: seconds, median (least, most)"
    table = Table("MB/s", *_COLUMNS, "chosen", "of the faster", "", "auto", title=title)
    for rate, by_name in result["samples"].items():
        choice = bars[f"choice_at_{rate}"]
        cells = []
        for name in _COLUMNS:
            seconds = [sample["s"] for sample in by_name[name]]
            cells.append(f"{statistics.median(seconds):.2f} ({min(seconds):.2f}, {max(seconds):.2f})")
        chosen, verdict = ", ".join(sorted(set(choice["chosen"]))), "met" if choice["met"] else "NOT met"
        table.add_row(
            rate, *cells, chosen, f"{choice['ratio']:.2f} <= {RATIO_MAX}", verdict, f"{choice['auto_ratio']:.2f}"
        )
    console.print(table)
    read = ", ".join(
        f"{name} {bars[f'{name}_bytes']:.3f}" for name in ("broadcast", "read", "orbax", "orbax_broadcast")
    )
    console.print(f"bytes read from storage, of the state: {read}: {'met' if bars['bytes_met'] else 'NOT met'}")
    for name, leaves in result["matrix"].items():
        changed = [f"{leaf[2:-2]} {what}" for leaf, what in leaves.items() if what != "exact"]
        console.print(
            f"dtypes, {name}: {len(leaves) - len(changed)} of {len(leaves)} exact; {', '.join(changed) or '-'}"
        )
    console.print(f"dtypes of broadcast exact: {'met' if bars['exact_met'] else 'NOT met'}")
