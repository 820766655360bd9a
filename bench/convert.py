"""`python -m bench convert`: conversions and a reshard within a memory budget, compared with `cp` and the obvious
way."""

from __future__ import annotations

import json
import os
import shlex
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

from bench.bars import CONVERT_OF_COPY, CONVERT_PEAK_BYTES
from bench.convert_worker import make_source, remove
from bench.environment import environment, store_result
from ckptkit.cli.options import SIZE
from ckptkit.cli.text import size_text

_ROOT = Path(__file__).parent.parent

# what, way, source, target, argument; targets that are sources later are kept
_JOBS = (
    ("safetensors to Orbax", "convert", "source.safetensors", "orbax", "orbax"),
    ("Orbax to safetensors", "convert", "orbax", "a.safetensors", "safetensors"),
    ("reshard to x=8", "reshard", "orbax", "striped", "x=8"),
    ("reshard (8,) to (2,4)", "reshard", "striped", "meshed", "data=2,model=4"),
    ("reshard rows to rows and columns", "reshard-both", "striped", "both", "data=2,model=4"),
    ("Orbax to hf", "convert", "orbax", "hf", "hf"),
    ("Orbax to npz", "convert", "orbax", "a.npz", "npz"),
    ("Orbax to torch", "convert", "orbax", "a.pt", "torch"),
    ("obvious: Orbax to safetensors", "obvious-convert", "orbax", "b.safetensors", "safetensors"),
    ("obvious: reshard (8,) to (2,4)", "obvious-reshard", "striped", "again", "data=2,model=4"),
)
_KEPT = frozenset({"orbax", "striped"})


@click.command()
@click.option("--size", type=SIZE, default=1 << 30, show_default="1 GiB", help="Of the checkpoint.")
@click.option("--memory", type=SIZE, default=512 << 20, show_default="512 MiB", help="The budget.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--obvious-repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Of the obvious way.")
@click.option("--job", "asked", multiple=True, help="Only what has this in its name, and what it needs; repeatable.")
@click.option("--disk", default=tempfile.gettempdir(), show_default=True, help="A directory on a disk.")
@click.option("--wrap", default="", help="Words before each measuring process, such as 'nice' or a lock.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
def main(
    size: int,
    memory: int,
    repeats: int,
    obvious_repeats: int,
    asked: tuple[str, ...],
    disk: str,
    wrap: str,
    json_path: Path | None,
) -> None:
    """Times conversions under a memory budget, each next to `cp` and fsync of the same source in the same process."""
    home = Path(tempfile.mkdtemp(prefix="ckptkit-bench-", dir=disk))
    result: dict[str, Any] = {
        "benchmark": "convert",
        "environment": environment(disk, disk),
        "size_bytes": size,
        "memory_bytes": memory,
        "jobs": {},
    }
    try:
        make_source(home / "source.safetensors", size)
        for what, way, source, target, argument in _JOBS:
            wanted = not asked or any(word in what for word in asked)
            if not wanted and target not in _KEPT:
                continue
            samples = []
            times = obvious_repeats if way.startswith("obvious") else repeats
            for _ in range(times if wanted else 1):
                remove(home / target)
                command = [sys.executable, "-m", "bench.convert_worker", way, str(home / source), str(home / target)]
                samples.append(_measured([*shlex.split(wrap), *command, argument, str(memory)]))
            if target not in _KEPT:
                remove(home / target)
            if wanted:
                result["jobs"][what] = samples
                _say(what, samples)
                store_result(result, json_path)  # after each job: a run of an hour may be ended before
    finally:
        shutil.rmtree(home, ignore_errors=True)
    _show(result)


def _measured(command: list[str]) -> dict[str, float]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    done = subprocess.run(command, cwd=_ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise click.ClickException(f"measuring ended with code {done.returncode}; its output is above")
    return json.loads(done.stdout.splitlines()[-1])


def _say(what: str, samples: list[dict[str, float]]) -> None:
    sys.stderr.write(f"{what}: {ratio(samples):.2f} of cp, peak {size_text(int(peak(samples)))}\n")


def ratio(samples: list[dict[str, float]]) -> float:
    """The rate of the work over that of the copy next to it: the median of the samples."""
    return median(sample["copy_s"] / sample["work_s"] for sample in samples)


def peak(samples: list[dict[str, float]]) -> float:
    """The most memory of any sample, with imports."""
    return max(sample["peak"] for sample in samples)


def _show(result: dict[str, Any]) -> None:
    memory = size_text(result["memory_bytes"])
    table = Table(
        title=f"{size_text(result['size_bytes'])} within {memory}: rate against cp + fsync next to it, medians"
    )
    for title in ("job", "cp s", "work s", "rate / cp", "bar", "peak RSS", "imports", "bar "):
        table.add_column(title, justify="left" if title == "job" else "right")
    for what, samples in result["jobs"].items():
        ours = not what.startswith("obvious")
        row = [what, *(f"{median(sample[key] for sample in samples):.2f}" for key in ("copy_s", "work_s"))]
        row += [
            f"{ratio(samples):.2f}",
            ("reached" if ratio(samples) >= CONVERT_OF_COPY else "NOT reached") if ours else "",
        ]
        row += [size_text(int(peak(samples))), size_text(int(samples[0]["imports"]))]
        row += [("reached" if peak(samples) <= CONVERT_PEAK_BYTES else "NOT reached") if ours else ""]
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 130)
    console.print(table)


if __name__ == "__main__":
    main()
