"""`ckptkit convert`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

import click
import jax

from ckptkit.cli.exits import Exit
from ckptkit.cli.memory import keep_freed_memory
from ckptkit.cli.options import JSON, MAP, MEMORY, TIMEOUT, size
from ckptkit.cli.parsed import Parsed
from ckptkit.cli.progress import progress_bar
from ckptkit.cli.sources import leased_sources
from ckptkit.cli.text import count_text, group_of, print_json, print_line, print_top, shape_text, size_text
from ckptkit.conversion import ConvertPlan, Quantization, plan_convert, read_rules
from ckptkit.conversion import convert as convert_tensors
from ckptkit.conversion.converting import SHARD_BYTES, TargetFormat
from ckptkit.formats import open_checkpoint
from ckptkit.model.quantization import LeafError

_ERRORS_SHOWN = 10  # of the leaves that are quantised

TO = click.option("--to", type=click.Choice(get_args(TargetFormat)), required=True, help="Format of DST.")
SHARD_SIZE = size("--shard-size", "shard_bytes", default=SHARD_BYTES, help="Of each file of hf.")


def _cast(text: str) -> tuple[str, str]:
    """Pattern and dtype, from `PATTERN=DTYPE`."""
    pattern, equals, dtype = text.rpartition("=")
    if not equals or not pattern or not dtype:
        raise ValueError(f"{text!r} is not PATTERN=DTYPE, such as '**=bfloat16'")
    return pattern, dtype


CASTS = click.option(
    "--dtype",
    "casts",
    type=Parsed("cast", _cast),
    multiple=True,
    metavar="PATTERN=DTYPE",
    help="Cast floats; repeatable.",
)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@TO
@MAP
@CASTS
@click.option(
    "--quantize",
    type=Parsed("quantize", Quantization.of_words),
    metavar="[PATTERN=]TO",
    help="Weights as int8 or fp8, with a scale for each output channel (fp8:128x128: each block); none undoes it.",
)
@SHARD_SIZE
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run of the same conversion.")
@JSON
@MEMORY
@TIMEOUT
def convert(
    source: str,
    target: str,
    to: Any,
    map_path: str | None,
    casts: tuple[tuple[str, str], ...],
    quantize: Quantization | None,
    shard_bytes: int,
    dry_run: bool,
    resume: bool,
    as_json: bool,
    memory_bytes: int,
    timeout_s: float,
) -> int:
    """Write the tensors of SRC, of any format, as DST in another, bit for bit.

    DST appears complete, by one rename, or not at all.
    """
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")  # Orbax asks JAX for its process: no accelerator is to be taken for that
    rules = [] if map_path is None else read_rules(map_path)
    limits: Any = {"memory_bytes": memory_bytes, "timeout_s": timeout_s}
    work: Any = {"rules": rules, "casts": casts, "quantize": quantize, "shard_bytes": shard_bytes}
    errors: Mapping[str, LeafError | None] = {}
    with open_checkpoint(source, timeout_s=timeout_s) as opened, leased_sources(opened.sources, timeout_s):
        plan = plan_convert(opened, target, to, **work, **limits)
        if not dry_run:
            with progress_bar() as progress:
                errors = convert_tensors(opened, plan, resume=resume, progress=progress, **limits)
    if as_json:
        shown = {name: None if error is None else asdict(error) for name, error in errors.items()}
        print_json({**plan.to_json(), "written": not dry_run, "errors": shown})
    else:
        show_plan(plan, dry_run)
        _show_errors(errors)
    return Exit.OK


def _show_errors(errors: Mapping[str, LeafError | None]) -> None:
    """The quantised leaves, those with the largest error first."""
    if not errors:
        return
    known = sorted(errors.items(), key=lambda each: math.inf if each[1] is None else each[1].relative_rms, reverse=True)
    rows = [
        [name, *(("?", "?") if error is None else (f"{error.max_abs:.3g}", f"{error.relative_rms:.2%}"))]
        for name, error in known
    ]
    print_line()
    print_top([("quantised leaf", False), ("max abs error", True), ("relative RMS", True)], rows, _ERRORS_SHOWN)


def show_plan(plan: ConvertPlan, dry_run: bool, top: int | None = None, depth: int | None = None) -> None:
    """Prints what was, or would be, written; with `top` the largest leaves, or groups of leaves, first."""
    if dry_run and depth is None:
        tensors = sorted(plan.tensors.items(), key=lambda each: 0 if top is None else -each[1].nbytes)
        rows = [[name, one.dtype.name, shape_text(one.shape), size_text(one.nbytes)] for name, one in tensors]
        print_top([("leaf", False), ("dtype", False), ("shape", False), ("bytes", True)], rows, top)
        print_line()
    elif dry_run:
        sizes: dict[str, list[int]] = {}
        for name, tensor in plan.tensors.items():
            sizes.setdefault(group_of(name, depth or 1), []).append(tensor.nbytes)
        groups = sorted(sizes.items(), key=lambda each: 0 if top is None else -sum(each[1]))
        rows = [[name, str(len(each)), size_text(sum(each))] for name, each in groups]
        print_top([("group", False), ("leaves", True), ("bytes", True)], rows, top)
        print_line()
    files = f" in {count_text(len(plan.files), 'file')}" if plan.to == "hf" else ""
    leaves = count_text(len(plan.tensors), "leaf", "leaves")
    verb = "would be written" if dry_run else "written"
    print_line(f"{plan.target}: {leaves}, {size_text(plan.written_bytes)}{files} {verb} as {plan.to}")
    for note in plan.notes:
        print_line(f"  {note}")
