"""`python -m bench gpu`: saves and restores on the local accelerators, every strategy against stock Orbax."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.environment import environment, store_result
from bench.figures import GPU_FIGURES
from bench.gpu_worker import OURS, PEERS
from bench.measure import now_s
from bench.rows import rows_of

_ROOT = Path(__file__).parent.parent
_CONTENDERS = (*OURS, *PEERS)


@click.command()
@click.option("--platform", type=click.Choice(["gpu", "tpu", "cpu"]), default="gpu", show_default=True)
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Virtual ones, with cpu.")
@click.option("--gb", "sizes", default="1,4", show_default=True, help="States, in GB, such as 1,4,16,32.")
@click.option("--weights", type=click.Choice(["float32", "bfloat16"]), multiple=True, help="Both by default.")
@click.option("--contender", "asked", type=click.Choice(_CONTENDERS), multiple=True, help="Only these; repeatable.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Saves after the first.")
@click.option("--minutes", type=float, default=8.5, show_default=True, help="Nothing more is begun after these.")
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

    The loop donates its state and spends 0.2 s a step in products of matrices. The first save of a contender is
    reported apart. With `cpu` the strategies are forced on virtual devices and steps are shorter: these are
    not figures of a GPU.
    """
    ends_s = now_s() + 60 * minutes
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
    for size in parsed:
        for each in weights or ("float32", "bfloat16"):
            if now_s() > ends_s:
                break
            options = ["--bytes", str(int(size * 1e9)), "--weights", each, "--repeats", str(repeats)]
            options += ["--contenders", ",".join(asked or _CONTENDERS), "--seconds", str(ends_s - now_s())]
            result["states"][f"{size:g} GB, {each}"] = _measured(options, platform, devices, ramdisk)
    show(result, Console())
    store_result(result, json_path)
    if json_path is not None and (rows := rows_of([result])):
        from bench.plots import draw_rows  # half a second that the other benchmarks do not pay

        draw_rows(rows, json_path.with_suffix(".png"))


def show(result: dict[str, Any], console: Console) -> None:
    """A table for each state: medians, and the limits of one large buffer."""
    for name, state in result["states"].items():
        device = state["device"]
        size = f"{state['state_bytes'] / 1e9:.2f} GB, {state['leaves']} leaves"
        title = f"{name} ({size}) on {device['count']} x {device['kind']}"
        table = Table(title=title)
        table.add_column("figure (median)")
        for who in state["contenders"]:
            table.add_column(who, justify="right")
        for figure, (samples, unit) in GPU_FIGURES.items():
            cells = [_median(found.get(samples, []), unit) for found in state["contenders"].values()]
            table.add_row(figure, *cells)
        console.print(table)
        rates = ", ".join(f"{what} {median(found) / 1e9:.2f} GB/s" for what, found in state["limits"].items())
        console.print(f"one large buffer: {rates}; an empty save blocks {_median(state['empty_save_s'], 1e3)} ms")
        if state["skipped"]:
            console.print(f"no time for {', '.join(state['skipped'])}")


def _median(samples: list[float | None], unit: float) -> str:
    known = [each for each in samples if each is not None]
    return f"{median(known) * unit:.3g}" if known else "-"


def _measured(options: list[str], platform: str, devices: int, ramdisk: str) -> dict[str, Any]:
    """One state in a process of its own, whose files are deleted however it ends."""
    directory = tempfile.mkdtemp(prefix="ckptkit-bench-", dir=ramdisk)
    environ = {**os.environ, "JAX_PLATFORMS": {"gpu": "cuda"}.get(platform, platform)}
    if platform == "cpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environ["XLA_FLAGS"] = flags.strip()
    command = [sys.executable, "-m", "bench.gpu_worker", *options, "--ramdisk", directory]
    try:
        done = subprocess.run(command, cwd=_ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if done.returncode:
        raise click.ClickException(f"measuring ended with code {done.returncode}; its output is above")
    return json.loads(done.stdout.splitlines()[-1])


def _pcie() -> str | None:
    """The driver's description of it; None without NVIDIA's tool."""
    asked = "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max"
    try:
        done = subprocess.run(["nvidia-smi", asked, "--format=csv,noheader"], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
