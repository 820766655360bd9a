"""An inspection as text: what it is, its leaves, its totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ckptkit.cli.text import age_text, count_text, print_line, print_table, shape_text, short_json, size_text
from ckptkit.errors import StepNotFoundError
from ckptkit.guard.record import FORMAT, describe
from ckptkit.inspection import Inspection, Item, LeafInfo, totals
from ckptkit.inspection.sharing import sharing_words
from ckptkit.util import clock

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
            for line in _guard_lines(item.value):
                print_line(f"  guard: {line}")


def _guard_lines(value: Any) -> list[str]:
    """The guard's record in a small item: the item itself, or an entry of it."""
    records = [value, *value.values()] if isinstance(value, Mapping) else []
    found = [each for each in records if isinstance(each, Mapping) and each.get("format") == FORMAT]
    try:
        return [line for each in found for line in describe(each)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"its record cannot be read: {error!r}"]


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
