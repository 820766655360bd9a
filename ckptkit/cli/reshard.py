"""`ckptkit reshard`."""

from __future__ import annotations

from typing import Any

import click
import jax

from ckptkit.cli.exits import Exit
from ckptkit.cli.options import JSON, MEMORY, TIMEOUT, Parsed, size
from ckptkit.cli.progress import progress_bar
from ckptkit.cli.sources import keep_freed_memory, leased_sources
from ckptkit.cli.text import count_text, print_json, print_line, print_notes, print_table, shape_text, size_text
from ckptkit.conversion.destination import forget_finished
from ckptkit.conversion.resharding import (
    Amplification,
    Mesh,
    ReshardPlan,
    open_source,
    plan_reshard,
    read_spec_rules,
    specs_like,
)
from ckptkit.conversion.resharding import reshard as reshard_source
from ckptkit.conversion.resharding.meshes import spec_text
from ckptkit.job.coordination import make_coordinator
from ckptkit.model.boxes import CELL_BYTES

_PROCESSES_S = 3600.0  # the longest wait for another process, which writes its part first


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--mesh",
    "meshes",
    type=Parsed("mesh", Mesh.parse),
    multiple=True,
    required=True,
    metavar="AXIS=N,...",
    help="Mesh that will read DST; several get a layout that suits all, and the shardings of the first.",
)
@click.option("--rules", "rules_path", metavar="FILE", help="Which leaves are split over which axes (TOML).")
@click.option("--like", metavar="CHECKPOINT", help="Split the leaves over the axes as they are in this checkpoint.")
@size("--chunk-bytes", default=CELL_BYTES, help="About the most that a chunk has.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run of the same plan.")
@click.option(
    "--cluster",
    type=click.Choice(["none", "detect"]),
    default="none",
    show_default=True,
    help="detect: mpirun or srun started several processes, which share the work.",
)
@click.option("--coordinator", metavar="HOST:PORT", help="Address of process 0, if another tool started them.")
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Number of processes, with --coordinator.")
@click.option("--process", type=click.IntRange(min=0), metavar="N", help="Number of this process, with --coordinator.")
@JSON
@MEMORY
@TIMEOUT
def reshard(
    source: str,
    target: str,
    meshes: tuple[Mesh, ...],
    rules_path: str | None,
    like: str | None,
    chunk_bytes: int,
    dry_run: bool,
    resume: bool,
    cluster: str,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    as_json: bool,
    memory_bytes: int,
    timeout_s: float,
) -> int:
    """Write the Orbax checkpoint SRC as DST in chunks that a mesh reads whole, bit for bit.

    Without --rules and --like the largest dimension of each leaf that the mesh divides is split over it. DST appears
    complete, or not at all. The other items of a step are copied.
    """
    if rules_path is not None and like is not None:
        raise click.UsageError("--rules and --like both define how leaves are split; give one")
    keep_freed_memory()
    if not dry_run:
        forget_finished(target)
    jax.config.update("jax_platforms", "cpu")  # Orbax asks JAX for its process: no accelerator is to be taken for that
    _join(cluster, coordinator, processes, process)
    rules = [] if rules_path is None else read_spec_rules(rules_path)
    specs = None if like is None else specs_like(like, timeout_s=timeout_s)
    opened = open_source(source, timeout_s=timeout_s)
    limits: Any = {"memory_bytes": memory_bytes, "timeout_s": timeout_s}
    with opened.opened, leased_sources(opened.opened.sources, timeout_s):
        job = make_coordinator(_PROCESSES_S)
        plan = plan_reshard(opened, target, meshes, rules=rules, like=specs, chunk_bytes=chunk_bytes, **limits)
        if job.process == 0 and not as_json:
            _show(plan)
        if not dry_run:
            with progress_bar() as progress:
                reshard_source(
                    opened,
                    plan,
                    memory_bytes=memory_bytes,
                    resume=resume,
                    coordinator=job,
                    progress=progress,
                    timeout_s=timeout_s,
                )
    if job.process == 0 and as_json:
        print_json({**plan.to_json(), "written": not dry_run})
    elif job.process == 0:
        verb = "would be written" if dry_run else "written"
        leaves = count_text(len(plan.leaves), "leaf", "leaves")
        print_line(f"{plan.target}: {leaves}, {size_text(plan.written_bytes)} {verb}")
    return Exit.OK


def _join(cluster: str, coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Waits for the other processes, if there are any."""
    given = [value is not None for value in (coordinator, processes, process)]
    if any(given) and (not all(given) or cluster == "detect"):
        raise click.UsageError("--coordinator, --processes and --process belong together, without --cluster detect")
    try:
        if cluster == "detect":
            jax.distributed.initialize()
        elif coordinator is not None:
            jax.distributed.initialize(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(f"the processes did not reach the barrier: {error}") from error


def _show(plan: ReshardPlan) -> None:
    split = [f"spec on {mesh}" for mesh in plan.meshes]
    columns = [(title, False) for title in ("leaf", "dtype", "shape", "chunks", "new chunks", *split, "chosen by")]
    rows = [
        [
            f"{leaf.item}:{leaf.record.name}",
            leaf.record.dtype,
            shape_text(leaf.record.shape),
            shape_text(leaf.record.cell),
            shape_text(leaf.cell),
            *map(spec_text, leaf.specs),
            leaf.reasons[0],
        ]
        for leaf in plan.leaves
    ]
    print_table(columns, rows)
    print_line()
    print_table(
        [
            ("mesh", False),
            *((title, True) for title in ("devices", "needed", "read before", "read after", "worst process")),
        ],
        [
            [
                str(mesh),
                str(mesh.devices),
                size_text(before.needed_bytes),
                _read(before),
                _read(after),
                f"{before.worst:.2f}x -> {after.worst:.2f}x",
            ]
            for mesh, before, after in zip(plan.meshes, plan.before, plan.after, strict=True)
        ],
    )
    print_line()
    if plan.read_bytes > plan.written_bytes:
        print_line(f"  reads {size_text(plan.read_bytes)} of SRC to write {size_text(plan.written_bytes)}")
    print_notes(plan.notes)


def _read(found: Amplification) -> str:
    return f"{size_text(found.read_bytes)} ({found.mean:.2f}x)"
