"""`ckptkit inspect`."""

from __future__ import annotations

from dataclasses import replace

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import JSON, MEMORY, TIMEOUT
from ckptkit.cli.show_inspection import matching, show_inspection
from ckptkit.cli.show_sharding import show_sharding
from ckptkit.cli.text import print_json
from ckptkit.formats import inspect as inspect_path
from ckptkit.inspection import Inspection
from ckptkit.util.gc_pause import collection_paused


@click.command()
@click.argument("path")
@JSON
@click.option("--depth", type=click.IntRange(min=1), help="Group leaves by the first N parts of their names.")
@click.option("--match", "pattern", metavar="GLOB", help="Only leaves whose name, or item:name, matches.")
@click.option("--sort", type=click.Choice(["name", "bytes"]), help="Order of the leaves [default: as they were saved].")
@click.option(
    "--stats", is_flag=True, help="Read every byte: min, max, mean, std, norm, NaN and Inf counts of each leaf."
)
@click.option("--sharding", is_flag=True, help="Bytes per device, and leaves and axes that lie badly.")
@click.option(
    "--mesh", metavar="AXES", help="For --sharding: another mesh, like data=2,fsdp=4 [default: the saved one]."
)
@MEMORY
@TIMEOUT
def inspect(
    path: str,
    as_json: bool,
    depth: int | None,
    pattern: str | None,
    sort: str | None,
    stats: bool,
    sharding: bool,
    mesh: str | None,
    memory_bytes: int,
    timeout_s: float,
) -> int:
    """Show what PATH holds: a step directory (ckptkit's or Orbax's), an item in one, a root with steps, a slot, or a
    checkpoint in another format (safetensors, npz, torch's zip, Flax's msgpack).

    Without --stats only metadata is read. PATH is local, file://, gs:// or s3://.
    """
    if stats and sharding:
        raise click.UsageError("--stats and --sharding exclude each other")
    if mesh is not None and not sharding:
        raise click.UsageError("--mesh belongs to --sharding")
    with collection_paused():  # a collection looks at every leaf, and frees none
        found = matching(inspect_path(path, timeout_s=timeout_s), pattern, sort)
        if sharding:
            show_sharding(found, mesh, as_json=as_json)
        elif not stats and as_json:
            print_json(found.to_json(depth=depth or 1))
        elif not stats:
            show_inspection(found, depth)
    if stats:
        found = _with_statistics(found, depth, as_json, memory_bytes, timeout_s)
    return exit_with(found.problems)


def _with_statistics(
    found: Inspection, depth: int | None, as_json: bool, memory_bytes: int, timeout_s: float
) -> Inspection:
    """Prints it with its statistics; gives it with what was found damaged while the arrays were read."""
    from ckptkit.cli.progress import reading_bar
    from ckptkit.cli.show_statistics import show_statistics, statistics, stats_json  # imports JAX and Orbax

    with reading_bar() as progress:
        known, damaged = statistics(found, memory_bytes, timeout_s, progress)
    found = replace(found, problems=tuple(dict.fromkeys((*found.problems, *damaged))))
    if as_json:
        print_json({**found.to_json(depth=depth or 1), "stats": stats_json(known)})
    else:
        show_inspection(found, depth)
        show_statistics(known)
    return found
