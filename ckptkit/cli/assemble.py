"""`ckptkit extract` and `ckptkit merge`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click
import jax

from ckptkit.cli.convert import CASTS, SHARD_SIZE, TO, show_plan
from ckptkit.cli.exits import Exit
from ckptkit.cli.memory import keep_freed_memory
from ckptkit.cli.options import DEPTH, DRY_RUN, JSON, MAP, MEMORY, TIMEOUT, TOP
from ckptkit.cli.progress import progress_bar
from ckptkit.cli.sources import leased_sources
from ckptkit.cli.text import print_json
from ckptkit.conversion import (
    MapRule,
    averaged,
    combined,
    convert,
    extracted,
    lora_merged,
    plan_convert,
    read_rules,
    state_of,
)
from ckptkit.formats import open_checkpoint
from ckptkit.formats.tensors import Checkpoint

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
    how: str,
    *,
    to: Any,
    casts: Sequence[tuple[str, str]],
    shard_bytes: int,
    dry_run: bool,
    top: int | None,
    depth: int | None,
    resume: bool,
    as_json: bool,
    memory_bytes: int,
    timeout_s: float,
) -> int:
    keep_freed_memory()
    jax.config.update("jax_platforms", "cpu")  # Orbax asks JAX for its process: no accelerator is to be taken for that
    with ExitStack() as files:
        opened = [files.enter_context(open_checkpoint(source, timeout_s=timeout_s)) for source in sources]
        files.enter_context(leased_sources([path for each in opened for path in each.sources], timeout_s))
        made = make(opened)
        limits: Any = {"memory_bytes": memory_bytes, "timeout_s": timeout_s}
        plan = plan_convert(made, target, to, rules=rules, casts=casts, shard_bytes=shard_bytes, **limits)
        # Work that is resumed must come from the same files in the same way.
        plan = replace(plan, made_by=f"{how} of {state_of(opened)}: {plan.made_by}")
        if not dry_run:
            with progress_bar() as progress:
                convert(made, plan, resume=resume, progress=progress, **limits)
    if as_json:
        print_json({**plan.to_json(), "written": not dry_run})
    else:
        show_plan(plan, dry_run, top, depth)
    return Exit.OK
