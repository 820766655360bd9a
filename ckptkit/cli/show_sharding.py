"""How the leaves of a checkpoint are placed on a mesh, as text or JSON."""

from __future__ import annotations

import math

import click

from ckptkit.cli.text import print_json, print_line
from ckptkit.diagnosis.layouts import Layout, report_layouts
from ckptkit.inspection import Inspection, LeafInfo
from ckptkit.inspection.words import parsed_sharding


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
