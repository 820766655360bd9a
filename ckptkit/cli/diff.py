"""`ckptkit diff`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ckptkit.cli.exits import Exit, exit_with
from ckptkit.cli.options import DEPTH, JSON, MAP, MEMORY, TIMEOUT, TOP
from ckptkit.cli.progress import reading_bar
from ckptkit.cli.sources import leased_sources
from ckptkit.cli.text import count_text, group_of, print_json, print_line, print_notes, print_top
from ckptkit.conversion import Difference, mapped, no_arrays, not_read, read_rules
from ckptkit.conversion import diff as diff_tensors
from ckptkit.conversion.statistics import LeafDifference
from ckptkit.formats import open_checkpoint

_COLUMNS = [(title, title != "leaf") for title in ("leaf", "changed", "max abs", "max rel", "ulp", "cosine")]
_GROUP_COLUMNS = [(title, title != "group") for title in ("group", "leaves", "changed", "max abs", "max rel")]


@click.command()
@click.argument("a")
@click.argument("b")
@MAP
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Tolerated: |a - b| <= atol + rtol x |b|.")
@click.option(
    "--atol", type=click.FloatRange(min=0), default=0.0, help="See --rtol. Without both, only equal bits pass."
)
@TOP
@DEPTH
@JSON
@MEMORY
@TIMEOUT
def diff(
    a: str,
    b: str,
    map_path: str | None,
    rtol: float,
    atol: float,
    top: int | None,
    depth: int | None,
    as_json: bool,
    memory_bytes: int,
    timeout_s: float,
) -> int:
    """Compare the checkpoints A and B: leaves, shapes and dtypes, then values, most changed first. Any two formats.

    The rules of --map are applied to A. Exit code 20 if they differ by more than the tolerances.
    """
    rules = [] if map_path is None else read_rules(map_path)
    with (
        open_checkpoint(a, timeout_s=timeout_s) as one,
        open_checkpoint(b, timeout_s=timeout_s) as two,
        leased_sources([*one.sources, *two.sources], timeout_s),
    ):
        tensors = mapped(one.by_name(), rules), two.by_name()
        with reading_bar() as progress:
            found = diff_tensors(*tensors, rtol=rtol, atol=atol, memory_bytes=memory_bytes, progress=progress)
        origins = one.facts.origin.differences(two.facts.origin)
        unread = list(dict.fromkeys(not_read([one, two])))
        notes = [f"not compared: {each}" for each in dict.fromkeys([*no_arrays(one), *no_arrays(two)])]
    problems = [*one.facts.problems, *two.facts.problems]
    if as_json:
        print_json({**found.to_json(), "notes": notes, "problems": problems, "provenance": origins})
    else:
        _show(found, [*map(_told, origins), *notes], top, depth)
    code = exit_with(problems, unread=unread)
    return code if problems or found.same else Exit.DIFFERENT


def _show(found: Difference, notes: Sequence[str], top: int | None, depth: int | None) -> None:
    close = sum(leaf.close for leaf in found.values)
    counts = [
        count_text(found.equal, "leaf is the same", "leaves are the same"),
        count_text(len(found.values) - close, "differs in its values", "differ in their values"),
    ]
    print_line(", ".join(counts) + f", {close} within the tolerances" * (close > 0))
    print_notes(notes)
    lines = [f"  only in A: {name}" for name in found.only_a] + [f"  only in B: {name}" for name in found.only_b]
    lines += [f"  {name} is {one} in A, {two} in B" for name, one, two in found.shapes]
    for line in lines[:top]:
        print_line(line)
    if top is not None and len(lines) > top:
        print_line(f"  ... and {len(lines) - top} more")
    if found.values:
        print_line()
        leaves = sorted(found.values, key=lambda leaf: (-leaf.changed, -leaf.max_rel, leaf.name))
        if depth is None:
            print_top(_COLUMNS, [_row(leaf) for leaf in leaves], top)
        else:
            print_top(_GROUP_COLUMNS, _groups(leaves, depth), top)


def _told(origin: tuple[str, str | None, str | None]) -> str:
    name, one, two = origin
    return f"made with another {name}: {one or 'none'} in A, {two or 'none'} in B"


def _row(leaf: LeafDifference) -> list[str]:
    return [
        leaf.name,
        f"{100 * leaf.changed:.3g} %",
        f"{leaf.max_abs:.3g}",
        f"{leaf.max_rel:.3g}",
        "" if leaf.ulp is None else str(leaf.ulp),
        "" if leaf.cosine is None else f"{leaf.cosine:.8f}",
    ]


def _groups(leaves: Sequence[LeafDifference], depth: int) -> list[list[str]]:
    """Of each group the largest difference of any leaf; in the order of the most changed leaf."""
    groups: dict[str, list[LeafDifference]] = {}
    for leaf in leaves:
        groups.setdefault(group_of(leaf.name, depth), []).append(leaf)
    return [
        [
            name,
            str(len(group)),
            f"{100 * max(leaf.changed for leaf in group):.3g} %",
            f"{max(leaf.max_abs for leaf in group):.3g}",
            f"{max(leaf.max_rel for leaf in group):.3g}",
        ]
        for name, group in groups.items()
    ]
