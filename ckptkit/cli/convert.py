"""`ckptkit convert`, `extract` and `merge`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import PurePath
from typing import Any, get_args

import click
import jax

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import DEPTH, DRY_RUN, JSON, MAP, MEMORY, TIMEOUT, TOP, Parsed, size
from ckptkit.cli.progress import progress_bar
from ckptkit.cli.sources import keep_freed_memory, leased_sources
from ckptkit.cli.text import count_text, group_of, print_json, print_line, print_notes, print_top, shape_text, size_text
from ckptkit.conversion import (
    ConvertPlan,
    MapRule,
    Quantization,
    averaged,
    combined,
    extracted,
    lora_merged,
    not_read,
    plan_convert,
    read_rules,
    state_of,
)
from ckptkit.conversion import convert as convert_tensors
from ckptkit.conversion.converting import SHARD_BYTES, TargetFormat
from ckptkit.conversion.destination import forget_finished
from ckptkit.conversion.quantized_values import LeafError
from ckptkit.formats import open_checkpoint
from ckptkit.formats.tensors import Checkpoint

_ERRORS_SHOWN = 10  # of the leaves that are quantised

_FORMAT_OF = {".safetensors": "safetensors", ".npz": "npz", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
TO = click.option(
    "--to", type=click.Choice(get_args(TargetFormat)), help="Format of DST [default: by its suffix, as .safetensors]."
)
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
def convert(source: str, target: str, map_path: str | None, **flags: Any) -> int:
    """Write the tensors of SRC, of any format, as DST in another, bit for bit.

    DST appears complete, by one rename, or not at all.
    """
    rules = [] if map_path is None else read_rules(map_path)
    return _write([source], target, lambda opened: opened[0], rules, None, top=None, depth=None, **flags)


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


def _show_plan(plan: ConvertPlan, dry_run: bool, top: int | None, depth: int | None) -> None:
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
    print_notes([*plan.notes, *plan.measured.notes])


_WRITING = [
    TO,
    CASTS,
    SHARD_SIZE,
    DRY_RUN,
    TOP,
    DEPTH,
    click.option("--resume", is_flag=True, help="Continue an interrupted run of the same command."),
    JSON,
    MEMORY,
    TIMEOUT,
]


def _writing(command: Any) -> Any:
    for option in reversed(_WRITING):
        command = option(command)
    return command


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--only", multiple=True, metavar="NAME", help="A leaf or sub-tree, or a pattern; repeatable.")
@click.option("--without", multiple=True, metavar="NAME", help="A part to leave out; repeatable.")
@MAP
@_writing
def extract(
    source: str, target: str, only: tuple[str, ...], without: tuple[str, ...], map_path: str | None, **flags: Any
) -> int:
    """Write parts of SRC, of any format, as DST: `--only params` takes one sub-tree out.

    The rules of --map are applied after. DST appears complete, by one rename, or not at all.
    """
    if not only and not without:
        raise click.UsageError("name the parts: --only or --without")
    rules = [] if map_path is None else read_rules(map_path)
    return _write([source], target, lambda opened: extracted(opened[0], only, without), rules, "extract", **flags)


@click.command()
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.argument("target", metavar="DST")
@click.option("--average", is_flag=True, help="The mean of several with the same leaves.")
@click.option("--lora", is_flag=True, help="Add the second, a LoRA adapter (PEFT's or NNX's), to the first.")
@click.option("--lora-alpha", type=float, metavar="X", help="Its alpha [default: of the adapter's config].")
@MAP
@_writing
def merge(
    sources: tuple[str, ...],
    target: str,
    average: bool,
    lora: bool,
    lora_alpha: float | None,
    map_path: str | None,
    **flags: Any,
) -> int:
    """Put the checkpoints SRC..., of any formats, together as DST: all their leaves, which must have different names.

    With --average their mean, with --lora a base with its adapter folded in. The rules of --map are applied to each
    (with --average and --lora, to the result). DST appears complete, by one rename, or not at all.
    """
    if average and lora:
        raise click.UsageError("--average and --lora exclude each other")
    if lora and len(sources) != 2:
        raise click.UsageError("--lora takes two: the base, then the adapter")
    if len(sources) < 2:
        raise click.UsageError("name at least two checkpoints and the target")
    if lora_alpha is not None and not lora:
        raise click.UsageError("--lora-alpha belongs to --lora")
    rules = [] if map_path is None else read_rules(map_path)

    def make(opened: Sequence[Checkpoint]) -> Checkpoint:
        if average:
            return averaged(opened, memory_bytes=flags["memory_bytes"])
        return lora_merged(*opened, alpha=lora_alpha) if lora else combined(opened, rules)

    how = "average" if average else f"lora, alpha {lora_alpha}" if lora else f"combine by {rules}"
    return _write(sources, target, make, rules if average or lora else [], how, **flags)


def _write(
    sources: Sequence[str],
    target: str,
    make: Callable[[Sequence[Checkpoint]], Checkpoint],
    rules: Sequence[MapRule],
    how: str | None,
    *,
    to: Any,
    casts: Sequence[tuple[str, str]],
    quantize: Quantization | None = None,
    shard_bytes: int,
    dry_run: bool,
    top: int | None,
    depth: int | None,
    resume: bool,
    as_json: bool,
    memory_bytes: int,
    timeout_s: float,
) -> int:
    if to is None and (to := _FORMAT_OF.get(PurePath(target).suffix)) is None:
        raise click.UsageError(f"--to is missing: its value is one of {', '.join(get_args(TargetFormat))}")
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")  # Orbax asks JAX for its process: no accelerator is to be taken for that
    errors: Mapping[str, LeafError | None] = {}
    if not dry_run:
        forget_finished(target)
    with ExitStack() as files:
        opened = [files.enter_context(open_checkpoint(source, timeout_s=timeout_s)) for source in sources]
        files.enter_context(leased_sources([path for each in opened for path in each.sources], timeout_s))
        made = make(opened)
        limits: Any = {"memory_bytes": memory_bytes, "timeout_s": timeout_s}
        work: Any = {"rules": rules, "casts": casts, "quantize": quantize, "shard_bytes": shard_bytes}
        plan = plan_convert(made, target, to, **work, **limits)
        if how is not None:  # work that is resumed must come from the same files in the same way
            plan = replace(plan, made_by=f"{how} of {state_of(opened)}: {plan.made_by}")
        if not dry_run:
            with progress_bar() as progress:
                errors = convert_tensors(made, plan, resume=resume, progress=progress, **limits)
    if as_json:
        shown = {name: None if error is None else asdict(error) for name, error in errors.items()}
        found: dict[str, Any] = {"notes": [*plan.notes, *plan.measured.notes], "written": not dry_run}
        found["problems"] = list(made.facts.problems)
        print_json({**plan.to_json(), **found, **({"errors": shown} if how is None else {})})
    else:
        _show_plan(plan, dry_run, top, depth)
        _show_errors(errors)
    return exit_with(made.facts.problems, unread=not_read(opened) if how is None else ())
