"""`python -m bench gpu`: saves and restores on the local accelerators, every strategy against stock Orbax."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from bench.environment import environment, store_result
from bench.figures import GPU_FIGURES
from bench.gpu_worker import LIMITS, OURS, PEERS
from bench.measure import now_s
from bench.rows import rows_of

_ROOT = Path(__file__).parent.parent
_CONTENDERS = (*OURS, *PEERS)
_END_S = 5.0  # for the tables and the picture
_COLUMNS = 3  # of a table, which then fits a terminal


@click.command()
@click.option("--platform", type=click.Choice(["gpu", "tpu", "cpu"]), default="gpu", show_default=True)
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Virtual ones, with cpu.")
@click.option("--gb", "sizes", default="16", show_default=True, help="States, in GB, such as 1,4,16,32.")
@click.option("--weights", type=click.Choice(["float32", "bfloat16"]), multiple=True, default=["float32"])
@click.option("--contender", "asked", type=click.Choice(_CONTENDERS), multiple=True, help="Only these; repeatable.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Saves after the first.")
@click.option("--minutes", type=float, default=8.5, show_default=True, help="All ends within these.")
@click.option("--ramdisk", default="/dev/shm", show_default=True, help="A memory-backed mount.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Every sample, as JSON, and a picture next to it.",
)
def main(
    platform: str,
    devices: int,
    sizes: str,
    weights: tuple[str, ...],
    asked: tuple[str, ...],
    repeats: int,
    minutes: float,
    ramdisk: str,
    json_path: Path | None,
) -> None:
    """Measures saves and restores of a transformer with Adam on all local devices of one process.

    Each contender has a process of its own and an equal part of the time that is left. One that needs more is ended,
    and keeps the samples that it has. The loop donates its state and spends 0.2 s a step in products of matrices. The
    first save of a contender is reported apart. With `cpu` the strategies are forced on virtual devices and steps are
    shorter: these are not figures of a GPU.
    """
    ends_s = now_s() + 60 * minutes - _END_S
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "environment": {**environment(ramdisk, ramdisk), "pcie": _pcie()},
        "platform": platform,
        "repeats": repeats,
        "states": {},
    }
    try:
        parsed = [float(each) for each in sizes.split(",")]
    except ValueError:
        raise click.UsageError(f"--gb {sizes}: give numbers, such as 1,4,16,32") from None
    states = {f"{size:g} GB, {each}": (int(size * 1e9), each) for size in parsed for each in weights}
    left = len(states) * (1 + len(asked or _CONTENDERS))
    for name, (nbytes, dtype) in states.items():
        state = result["states"][name] = {"contenders": {}, "ended": {}}
        for who in (LIMITS, *(asked or _CONTENDERS)):
            seconds = max(0.0, ends_s - now_s()) / left
            left -= 1
            options = ["--bytes", str(nbytes), "--weights", dtype, "--repeats", str(repeats), "--contender", who]
            found, ended = _measured(options, seconds, platform, devices, ramdisk)
            state |= found if who == LIMITS else {}
            if who != LIMITS and found:
                state["contenders"][who] = found
            if ended:
                state["ended"][who] = ended
    show(result, Console())
    store_result(result, json_path)
    if json_path is not None and (rows := rows_of([result])):
        from bench.plots import draw_rows  # half a second that the other benchmarks do not pay

        draw_rows(rows, json_path.with_suffix(".png"))


def show(result: dict[str, Any], console: Console) -> None:
    """For each state the median of each figure and its 99th percentile, and the limits of one large buffer."""
    for name, state in result["states"].items():
        if "device" in state:
            device, nbytes = state["device"], state["state_bytes"]
            name = f"{name} ({nbytes / 1e9:.2f} GB, {state['leaves']} leaves) on {device['count']} x {device['kind']}"
        console.rule(name)
        figures = list(GPU_FIGURES.items())
        for several in (figures[first : first + _COLUMNS] for first in range(0, len(figures), _COLUMNS)):
            table = Table(
                Column("p50, p99", min_width=19),
                *(Column(figure, justify="right") for figure, _ in several),
                box=SIMPLE,
            )
            for who, found in state["contenders"].items():
                table.add_row(who, *(_percentiles(found.get(samples, []), unit) for _, (samples, unit) in several))
            console.print(table)
        if "limits" in state:
            rates = {what: float(np.median(each)) for what, each in state["limits"].items()}
            whole_s = state["state_bytes"] / max(rate for what, rate in rates.items() if what.startswith("d2h"))
            told = ", ".join(f"{what} {rate / 1e9:.2f} GB/s" for what, rate in rates.items())
            console.print(f"one large buffer: {told}; so the whole state takes {whole_s:.3g} s to the host")
            console.print(f"an empty save blocks {_percentiles(state['empty_save_s'], 1e3)} ms")
        for who, why in state["ended"].items():
            console.print(f"{who}: {why}")


def _percentiles(samples: list[float], unit: float) -> str:
    if not samples:
        return "-"
    middle, high = (_number(value) for value in np.percentile(samples, [50, 99]) * unit)
    return middle if len(samples) == 1 else f"{middle}, {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 0.001 else "0"


def _measured(
    options: list[str], seconds: float, platform: str, devices: int, ramdisk: str
) -> tuple[dict[str, Any], str | None]:
    """The report of a process of its own within `seconds`, and why it reported no more. Its files are deleted."""
    directory = tempfile.mkdtemp(prefix="ckptkit-bench-", dir=ramdisk)
    environ = {**os.environ, "JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform)}
    if platform == "cpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environ["XLA_FLAGS"] = flags.strip()
    # No turn is begun in the last third: the process is not ended in it, unless a turn takes that long.
    words = ["-m", "bench.gpu_worker", *options, "--ramdisk", directory, "--seconds", str(seconds * 2 / 3)]
    with subprocess.Popen(
        [sys.executable, *words], cwd=_ROOT, env=environ, stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            output, _ = worker.communicate(timeout=seconds)
            ended = f"ended with code {worker.returncode}; its output is above" if worker.returncode else None
        except subprocess.TimeoutExpired:
            worker.kill()
            output, _ = worker.communicate()
            ended = f"ended after its {seconds:.0f} s"
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    told = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    return json.loads(told[-1]) if told else {}, ended


def _pcie() -> str | None:
    """The driver's description of it; None without NVIDIA's tool."""
    asked = "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max"
    try:
        done = subprocess.run(["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
