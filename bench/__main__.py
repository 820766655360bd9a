"""`python -m bench stall|commit|restore|durable`: ckptkit, stock Orbax and the machine's limits, side by side.

The others, which `--help` lists, have options of their own. `all` runs everything but `exporters` and `gpu`, and
renders `bench/REPORT.md`; `report` renders it again.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.cases import ALL_CASES, DEFAULT_CASE, CaseName
from bench.environment import environment, store_result
from bench.figures import available
from bench.report import show
from bench.rows import newest_results
from bench.slower import compared

_ROOT = Path(__file__).parent.parent


_NAMES = (
    *("broadcast", "convert", "corruption", "crashpoints", "exporters", "faults", "first", "gather", "gpu", "herd"),
    *("hosts", "inspect", "kill", "leaf", "policy", "proof", "simulate", "simulator", "unchanged"),
)
_MODULES = {"all": "everything", "report": "render"} | {name: name for name in (*_NAMES, "slower")}
_CAMPAIGNS: dict[str, click.Command] = {
    name: importlib.import_module(f"bench.{module}").main for name, module in _MODULES.items()
}


class CaseType(click.ParamType):
    """`125m@8` on the command line."""

    name = "state"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> CaseName:
        """The case, or click's message with the choices."""
        try:
            return value if isinstance(value, CaseName) else CaseName.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _others() -> str:
    """The campaigns, with the first sentence of each one's help; `\\b` keeps click from joining the lines."""
    lines = [f"  {name:12}{campaign.get_short_help_str(95)}" for name, campaign in sorted(_CAMPAIGNS.items())]
    return "\n".join(["\b", "Others, with options of their own (python -m bench NAME --help):", *lines])


@click.command(context_settings={"max_content_width": 120}, epilog=_others())
@click.argument("benchmark", type=click.Choice(["stall", "commit", "restore", "durable"]))
@click.option("--full", is_flag=True, help="Every state, on 1 and on 8 devices; without it 125m on 1.")
@click.option("--state", "cases", type=CaseType(), multiple=True, help="A state such as many@8, instead; repeatable.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds after the warm-up.")
@click.option("--contender", "asked", multiple=True, help="Only these, instead of all; repeatable.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Every sample, as JSON.")
@click.option("--ramdisk", default="/dev/shm", show_default=True, help="A memory-backed mount, for everybody.")
@click.option("--disk", default=tempfile.gettempdir(), show_default=True, help="On a disk, for `commit`, `durable`.")
@click.option("--place", type=click.Choice(["disk", "bucket"]), help="`durable` there alone, instead of both.")
@click.option("--scale", type=float, default=1.0, hidden=True, help="Shrinks states and loops: for tests.")
def main(
    benchmark: str,
    full: bool,
    cases: tuple[CaseName, ...],
    repeats: int,
    asked: tuple[str, ...],
    json_path: Path | None,
    ramdisk: str,
    disk: str,
    place: str | None,
    scale: float,
) -> None:
    """Measures ckptkit, stock Orbax and the machine's limits on the same state, taking turns, in the same run."""
    if full and cases:
        raise click.UsageError("--full is every state; leave --state out")
    unknown = sorted(set(asked) - set(available()))
    if unknown:
        raise click.UsageError(f"--contender {unknown[0]}: choose among {', '.join(available())}")
    chosen = ALL_CASES if full else cases or (DEFAULT_CASE,)
    result: dict[str, Any] = {
        "benchmark": benchmark,
        "environment": environment(ramdisk, disk),
        "repeats": repeats,
        "scale": scale,
        "contenders": list(available()),
        "states": {},
    }
    for case in chosen:
        options = ["--repeats", str(repeats), "--scale", str(scale), "--contenders", ",".join(asked or available())]
        options += ["--place", place] if place else []
        result["states"][str(case)] = measure_apart(benchmark, case, options, ramdisk, disk)
    show(result, Console())
    if scale == 1.0:
        click.echo("\n".join(compared(result, newest_results())))
    store_result(result, json_path)


def measure_apart(benchmark: str, case: CaseName, options: list[str], ramdisk: str, disk: str) -> dict[str, Any]:
    """One case in a process of its own, whose directories are deleted however it ends."""
    directories = [tempfile.mkdtemp(prefix="ckptkit-bench-", dir=root) for root in (ramdisk, disk)]
    command = [sys.executable, "-m", "bench.worker", benchmark, "--state", str(case), *options]
    command += ["--ramdisk", directories[0], "--disk", directories[1]]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={case.devices}"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    try:
        done = subprocess.run(command, cwd=_ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
    if done.returncode:
        raise click.ClickException(f"measuring {case} ended with code {done.returncode}; its output is above")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    for name, campaign in _CAMPAIGNS.items():
        if sys.argv[1:2] == [name]:  # each has its own options
            campaign(sys.argv[2:], prog_name=f"python -m bench {name}")
    main()
