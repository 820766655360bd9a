"""`ckptkit inspect`: the leaves and totals of a checkpoint, or how its leaves are placed on a mesh."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import click

from ckptkit.cli.exits import exit_with
from ckptkit.cli.options import JSON, MEMORY, TIMEOUT
from ckptkit.cli.text import (
    age_text,
    count_text,
    print_json,
    print_line,
    print_table,
    shape_text,
    short_json,
    size_text,
)
from ckptkit.errors import StepNotFoundError, with_damage
from ckptkit.formats import inspect as inspect_path
from ckptkit.inspection import Inspection, Item, totals
from ckptkit.inspection.layouts import Layout, report_layouts
from ckptkit.inspection.roots import step_in
from ckptkit.inspection.sharing import sharing_words
from ckptkit.model.leaf_info import LeafInfo, parsed_sharding
from ckptkit.util import clock
from ckptkit.util.gc_pause import collection_paused

# Records that optional packages leave in a step's small items: by their format, the package and the module that knows
# it, which is imported when there is one.
_RECORDS = {"ckptkit.guard/1": ("guard", "ckptkit.guard.record")}


@click.command()
@click.argument("path")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="The step N of a root [default: its newest].")
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
    step: int | None,
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
        chosen = path if step is None else step_in(path, step, timeout_s=timeout_s)
        found = inspect_path(chosen, timeout_s=timeout_s)
        with with_damage(found.problems):  # a leaf may be missing for that
            found = matching(found, pattern, sort)
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


_VALUE_CHARS = 200  # of a flag or a command; --json has all of it


def matching(found: Inspection, pattern: str | None, sort: str | None) -> Inspection:
    """`found` with only the leaves that match, in the order asked for; raises where none does."""
    items = tuple(replace(item, leaves=_chosen(item, pattern, sort)) for item in found.items)
    if pattern is not None:  # it is unknown for some leaves
        items = tuple(replace(item, stored_bytes=None) for item in items)
    if pattern is not None and not any(item.leaves for item in items):
        raise StepNotFoundError(
            f"{found.path}: no leaf matches {pattern!r}; inspect without --match lists them", path=found.path
        )
    return replace(found, items=items)


def show_inspection(found: Inspection, depth: int | None) -> None:
    """Prints it on stdout."""
    sums = totals(found.items, depth=depth or 1)
    for line in _heading(found, sums):
        print_line(line)
    leaves = [(item, leaf) for item in found.items for leaf in item.leaves]
    if leaves and depth is None:
        print_line()
        _print_leaves(leaves)
    if leaves:
        for title, part in ((f"group (depth {depth or 1})", sums["by_group"]), ("dtype", sums["by_dtype"])):
            rows = [(key, str(entry["leaves"]), size_text(entry["bytes"])) for key, entry in part.items()]
            print_line()
            print_table([(title, False), ("leaves", True), ("bytes", True)], rows)
    for item in found.items:
        if item.value is not None:
            print_line()
            print_line(f"{item.name} ({item.kind}): {short_json(item.value)}")
            for line in _record_lines(item.value):
                print_line(f"  {line}")


def _record_lines(value: Any) -> list[str]:
    """The records of ckptkit's packages in a small item, in words: the item itself, or an entry of it."""
    records = [value, *value.values()] if isinstance(value, Mapping) else []
    found = [each for each in records if isinstance(each, Mapping) and each.get("format") in _RECORDS]
    return [f"{name}: {line}" for each in found for name, line in _described(each)]


def _described(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The package's name with each line; nothing where that package is not installed."""
    name, module = _RECORDS[record["format"]]
    try:
        return [(name, line) for line in importlib.import_module(module).describe(record)]
    except ModuleNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [(name, f"its record cannot be read: {error!r}")]


def _heading(found: Inspection, sums: Mapping[str, Any]) -> list[str]:
    origin = found.origin
    what = {"step": "step", "item": "item of step", "slot": "fast-tier slot, step"}.get(found.kind, found.kind)
    step = "" if found.step is None else f" {found.step}"
    layouts = "; ".join(f"{item.name}: {item.kind} ({item.layout})" for item in found.items)
    lines = [f"{found.path}: {what if step else found.kind}{step}, {layouts}"]
    lines += [f"  {note}" for note in found.notes]
    processes = "" if origin.processes is None else f" from {count_text(origin.processes, 'process', 'processes')}"
    hosts = f" on {', '.join(origin.hosts[:4])}{', ...' * (len(origin.hosts) > 4)}" if origin.hosts else ""
    save = "" if origin.save_id is None else f", save {origin.save_id}"
    age = "" if origin.committed_at_s is None else f", {age_text(clock.wall_s() - origin.committed_at_s)} ago"
    if origin.writer != "unknown":
        lines.append(f"  written by {origin.writer}{processes}{hosts}{save}{age}")
        lines.append(
            "  proven: every cell has a digest (not checked here)" if origin.proven else f"  {_unproven(found)}"
        )
    if origin.certified:
        lines.append("  certified: a replay came to these bits")
    lines += [f"  {name}: {_short(value)}" for name, value in origin.provenance.items()]
    if sums["leaves"] or origin.writer != "unknown":
        leaves = count_text(sums["leaves"], "leaf", "leaves")
        lines.append(f"  {leaves}, {size_text(sums['bytes'])} ({sums['bytes']} bytes){_stored(found)}")
    if found.shared:
        size = size_text(sum(file.size_bytes for file in found.shared.values()))
        files = count_text(len(found.shared), "file")
        lines.append(f"  shares {size} in {files} (hard links) with {sharing_words(found.shared)}")
    return lines


def _short(value: str) -> str:
    return value if len(value) <= _VALUE_CHARS else f"{value[:_VALUE_CHARS]}..."


def _stored(found: Inspection) -> str:
    """Bytes of the files of the arrays, if known for all of them."""
    sizes = [item.stored_bytes for item in found.items if item.kind == "arrays"]
    known = [size for size in sizes if size is not None]
    return f", {size_text(sum(known))} stored" if known and len(known) == len(sizes) else ""


def _unproven(found: Inspection) -> str:
    if found.origin.writer == "orbax":
        return "unproven: stock Orbax keeps no digests"
    return "unproven: its records are incomplete"


def _print_leaves(leaves: list[tuple[Item, LeafInfo]]) -> None:
    slots = any(leaf.held_bytes is not None for _, leaf in leaves)
    columns = [("leaf", False), ("dtype", False), ("shape", False), ("bytes", True)]
    columns += [("held", True)] * slots + [("sharding", False), ("cell", False)]
    print_table(columns, [_row(item, leaf, slots) for item, leaf in leaves])


def _row(item: Item, leaf: LeafInfo, slots: bool) -> list[str]:
    dtype = leaf.dtype or leaf.kind
    if leaf.key_impl:
        dtype = f"{dtype} (key {leaf.key_impl})"
    held = [size_text(leaf.held_bytes or 0)] * slots
    size = "" if leaf.dtype is None else size_text(leaf.array_bytes)
    sharding = leaf.sharding or ("" if leaf.kind == "jax" else f"- ({leaf.kind})")
    return [f"{item.name}:{leaf.name}", dtype, shape_text(leaf.shape), size, *held, sharding, shape_text(leaf.cell)]


def _chosen(item: Item, pattern: str | None, sort: str | None) -> tuple[LeafInfo, ...]:
    leaves = [
        leaf
        for leaf in item.leaves
        if pattern is None or fnmatchcase(leaf.name, pattern) or fnmatchcase(f"{item.name}:{leaf.name}", pattern)
    ]
    if sort == "name":
        leaves.sort(key=lambda leaf: leaf.name)
    elif sort == "bytes":
        leaves.sort(key=lambda leaf: (-leaf.array_bytes, leaf.name))
    return tuple(leaves)


def show_sharding(found: Inspection, mesh: str | None, *, as_json: bool) -> None:
    """Prints the report over the mesh that was saved, or over `mesh`."""
    leaves = [(item.name, leaf) for item in found.items for leaf in item.leaves if leaf.shape is not None]
    saved = [parsed[1] for _, leaf in leaves if (parsed := parsed_sharding(leaf.sharding)) is not None]
    if mesh is None and not saved:
        raise click.UsageError(f"{found.path} was saved without a mesh: give --mesh, like data=2,fsdp=4")
    sizes = saved[0] if mesh is None else _parsed(mesh)
    report = report_layouts([_layout(item, leaf) for item, leaf in leaves], sizes)
    if as_json:
        print_json({"path": found.path, "step": found.step, **report.to_json()})
        return
    print_line(f"{found.path}: step {found.step}")
    for line in str(report).splitlines():
        print_line(line)


def _layout(item: str, leaf: LeafInfo) -> Layout:
    shape = leaf.shape or ()
    parsed = parsed_sharding(leaf.sharding)
    return Layout(
        name="/".join((item, *leaf.path)),
        shape=shape,
        itemsize=leaf.array_bytes // max(1, math.prod(shape)),
        spec=() if parsed is None else parsed[0],
    )


def _parsed(mesh: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        axis, _, size = part.strip().partition("=")
        if not axis or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise click.UsageError(f"--mesh {mesh!r}: cannot read {part!r}; write each axis once, like data=2,fsdp=4")
        sizes[axis] = int(size)
    return sizes
